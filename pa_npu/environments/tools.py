"""The tool environment: several turns, in which the policy may call a tool and reads its answer before it goes on.

    prompt ──policy──> ... <<48/2>> ──tool──> =24 ──policy──> ... #### 24 <end>
                       trained        not trained  trained

Token in, token out: what the policy wrote is never rendered to text and tokenised again; only the
tool's answer is tokenised, and follows what was written. A turn ends with a call, with the policy's
end token, or at a limit; the sample ends when a turn ends without a call, or when turns or tokens
are used up. The samples of a group go on independently of each other.

environment.options:
    tool    "calculator" (default), or a function of your own, module:function, from the call's text
            to the answer's. It runs in a process of its own and has environment.timeout_s; its
            failure is its answer ("error: ...").
    call    what opens and closes a call; default ["<<", ">>"], the marks of GSM8K's calculator
            annotations (arXiv 2110.14168)
    example a call that a tool of your own must answer, tried before the run; default: one of the
    reference answer, the question
            and "1+1"
    answer  what opens and closes a tool's answer; default ["=", "\\n"]
"""

from __future__ import annotations

import ast
import asyncio
import logging
import operator
from collections.abc import Awaitable, Callable, Sequence
from fractions import Fraction

import numpy as np

from pa_npu.control.tasks import gather
from pa_npu.control.worker_process import WorkerProcess, json_line
from pa_npu.data.prompts import Prompt
from pa_npu.data.text_encoder import TextEncoder
from pa_npu.environments.protocol import EnvironmentContext, Generate, write
from pa_npu.errors import ConfigError, DeadlineExceeded
from pa_npu.samples.types import Sample, SampleBuilder

Tool = Callable[[str], Awaitable[str]]
"""From a call's text to the answer's; a failure is an answer that begins with "error: "."""

_MODULE = "pa_npu.environments.tool_worker"
_STARTUP_TIMEOUT_S = 60.0  # importing a user's module on a busy machine
_OPTIONS = ("tool", "call", "answer", "example")
_LONGEST = 200  # characters of an expression for the calculator
_LARGEST = 10**30  # of a value in it
_LARGEST_EXPONENT = 100
_DECIMALS = 6

_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}

logger = logging.getLogger(__name__)


class ToolEnvironment:
    """See the module's docstring."""

    waits_are_bounded = True

    def __init__(self, context: EnvironmentContext) -> None:
        context.refuse_options("tools", _OPTIONS)
        self._context = context
        self._open, self._close = _pair(context, "call", ("<<", ">>"))
        self._answer = _pair(context, "answer", ("=", "\n"))
        self._tool: Tool = make_tool(context)
        self._encoder = TextEncoder(context.tokenizer)

    async def close(self) -> None:
        """End the tool's process, where it has one."""
        if isinstance(self._tool, ToolProcess):
            await self._tool.close()

    async def rollout(self, prompt: Prompt, num_samples: int, generate: Generate) -> list[Sample]:
        return await gather(
            [self._sample(prompt, number, generate) for number in range(num_samples)]
        )

    async def trial(self, prompt: Prompt) -> None:
        """Calls a tool of the user's before a run. Raises ConfigError where it answers nothing."""
        example = self._context.options.get("example")
        if example is not None and not isinstance(example, str):
            raise ConfigError(
                f"environment.options: example must be a text, the call to try, not {example!r:.60}"
            )
        if isinstance(self._tool, ToolProcess):
            await self._tool.trial(
                [example] if example is not None else [prompt.answer, prompt.text, "1+1"]
            )

    async def _sample(self, prompt: Prompt, number: int, generate: Generate) -> Sample:
        sample, text = SampleBuilder(prompt.tokens), ""
        left = self._context.max_response_tokens
        for turn in range(self._context.max_turns):
            (generation,) = await generate(
                sample.tokens, sample=number, turn=turn, max_tokens=left, stop=(self._close,)
            )
            write(sample, generation)
            text += generation.text
            left -= len(generation.tokens)
            call = self._call_at_end(generation.text)
            if call is None:
                return sample.finish(generation.finished, text)
            answer = self._answer[0] + await self._tool(call) + self._answer[1]
            if turn == self._context.max_turns - 1:
                break  # no turn is left to read the answer
            tokens = await self._encoder.encode(answer, max_tokens=left)
            if tokens is None or len(tokens) >= left:
                break  # no token is left behind it
            sample.show(np.asarray(tokens, np.int32))
            text += answer
            left -= len(tokens)
        return sample.finish(False, text)

    def _call_at_end(self, text: str) -> str | None:
        """Returns the policy's question to the tool at the end of a turn; None if there is none."""
        if not text.endswith(self._close):
            return None
        _, opened, call = text.removesuffix(self._close).rpartition(self._open)
        return call if opened else None


def _pair(context: EnvironmentContext, name: str, default: tuple[str, str]) -> tuple[str, str]:
    value = context.options.get(name, default)
    if (
        not isinstance(value, (list, tuple))
        or len(value) != 2
        or not all(isinstance(text, str) for text in value)
    ):
        raise ConfigError(
            f"environment.options: {name} must be two texts, [opening, closing], not {value!r}"
        )
    if name == "call" and not all(value):
        raise ConfigError(
            "environment.options: call needs marks that are not empty, or no call could be told "
            "from text"
        )
    return value[0], value[1]


def make_tool(context: EnvironmentContext) -> Tool:
    """The tool of environment.options. Raises ConfigError where there is none of this name."""
    name = context.options.get("tool", "calculator")
    if name == "calculator":
        return _calculator
    if not isinstance(name, str) or ":" not in name:
        raise ConfigError(
            f"environment.options: tool {name!r} is neither calculator nor module:function; use "
            "one of these"
        )
    return ToolProcess(name, context.timeout_s)


async def _calculator(call: str) -> str:
    return calculate(call)


class ToolProcess:
    """A user's function in a process of its own; calls one after another, each with a time limit,
    after which it is killed.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._worker: WorkerProcess | None = None

    async def __call__(self, call: str) -> str:
        return (await self._answer(call))[0]

    async def trial(self, calls: Sequence[str]) -> None:
        """Calls the tool before a run.

        Raises ConfigError where it answers none of the calls, or does not answer in time.
        """
        try:
            answers = [await self._answer(call) for call in calls]
        finally:
            await self.close()
        if all(failed for _, failed in answers):
            tried = ", ".join(repr(call[:40]) for call in calls)
            raise ConfigError(
                f"environment.options: tool {self._name} fails for each of {tried} "
                f"({answers[-1][0].removeprefix('error: ')}); correct the function, or name a call "
                "that it answers in environment.options.example"
            )

    async def _answer(self, call: str) -> tuple[str, bool]:
        """The answer, and whether it is the tool's failure."""
        async with self._turn:
            worker = self._worker or await self._start()
            worker.write(json_line({"call": call}))
            try:
                reply = await asyncio.wait_for(worker.read(), self._timeout_s)
                if reply is not None:
                    return str(reply["answer"]), "failure" in reply
                reason = "the tool ended, or wrote what cannot be read"
            except asyncio.TimeoutError:
                reason = f"no answer within {self._timeout_s:g} s"
            await self.close()
            logger.warning(
                "environment.options: tool %s: %s; it is started anew", self._name, reason
            )
            return f"error: {reason}", True

    async def _start(self) -> WorkerProcess:
        try:
            worker = await WorkerProcess.start([_MODULE, self._name], None, _STARTUP_TIMEOUT_S)
        except DeadlineExceeded as late:
            raise ConfigError(
                f"environment.options: tool {self._name}: {late}; correct the function"
            ) from None
        problem = (
            worker.ready.get("unusable")
            if worker.ready
            else "its process ended while importing it, see the log"
        )
        if problem:
            await worker.reap()
            raise ConfigError(
                f"environment.options: tool {self._name}: {problem}; correct the function"
            )
        self._worker = worker
        return worker

    async def close(self) -> None:
        """End the process; a later call starts another."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.reap()


def calculate(expression: str) -> str:
    """The value of + - * / ** and brackets over decimal numbers: whole, or rounded to 6 decimals.
    "error: ..." otherwise.
    """
    if len(expression) > _LONGEST:
        return f"error: more than {_LONGEST} characters"
    try:
        return _written(
            _value(
                ast.parse(expression.strip().replace(",", "").replace("^", "**"), mode="eval").body
            )
        )
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "error: not an expression"


def _value(node: ast.AST) -> Fraction:
    """Raises ValueError for everything that is no arithmetic."""
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, (int, float))
        and not isinstance(node.value, bool)
    ):
        value = Fraction(str(node.value))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, exponent = _value(node.left), _value(node.right)
        if exponent.denominator != 1 or abs(exponent) > _LARGEST_EXPONENT:
            raise ValueError("exponent")
        value = base ** int(exponent)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        value = _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError("not arithmetic")
    if abs(value) > _LARGEST:
        raise ValueError("too large")
    return value


def _written(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(value * 10**_DECIMALS)
    whole, rest = divmod(abs(scaled), 10**_DECIMALS)
    sign = "-" if scaled < 0 else ""
    return f"{sign}{whole}.{rest:0{_DECIMALS}d}".rstrip("0").rstrip(".")

"""The tool environment: the policy may call a tool in several turns, and reads its answers.

    prompt ──policy──> ... <<48/2>> ──tool──> =24 ──policy──> ... #### 24 <end>
                       trained        not trained  trained

The policy's tokens are never rendered to text and tokenised again; only the tool's answer is
tokenised and appended. A turn ends with a call, with the policy's end token, or at a limit. A
sample ends when a turn ends without a call, or when its turns or tokens are used up. The samples of
a group are independent of each other.

environment.options:
    tool    "calculator" (default), or module:function of your own, which returns the answer's text
            for the call's text. It runs in a process of its own and has environment.timeout_s per
            call. If it fails, its answer is "error: ..."
    call    marks that open and close a call; default ["<<", ">>"], the marks of GSM8K's calculator
            annotations (arXiv 2110.14168)
    answer  marks that open and close a tool's answer; default ["=", "\\n"]
    example a call that is tried before the run; a tool of your own must answer it. By default it
            must answer the reference answer, the question or "1+1"
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
"""Returns the answer's text for a call's text; the answer to a failed call begins with "error: "."""

_MODULE = "pa_npu.environments.tool_worker"
_STARTUP_TIMEOUT_S = 60.0  # importing a user's module on a busy machine
_OPTIONS = ("tool", "call", "answer", "example")
# Limits of the calculator.
_LONGEST = 200  # characters of an expression
_LARGEST = 10**30  # absolute value
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
    """Runs num_samples independent dialogues of the policy with a tool."""

    waits_are_bounded = True  # every call of the tool has a time limit
    trains_in_context = True

    def __init__(self, context: EnvironmentContext) -> None:
        context.refuse_options("tools", _OPTIONS)
        self._context = context
        self._open, self._close = _marks(context, "call", ("<<", ">>"))
        self._answer_marks = _marks(context, "answer", ("=", "\n"))
        self._tool: Tool = make_tool(context)
        self._encoder = TextEncoder(context.tokenizer)

    async def close(self) -> None:
        """Ends the tool's process, if it has one."""
        if isinstance(self._tool, ToolProcess):
            await self._tool.close()

    async def rollout(self, prompt: Prompt, num_samples: int, generate: Generate) -> list[Sample]:
        return await gather(
            [self._sample(prompt, number, generate) for number in range(num_samples)]
        )

    async def trial(self, prompt: Prompt) -> None:
        """Calls a user's tool before a run. Raises ConfigError if it answers no call."""
        example = self._context.options.get("example")
        if example is not None and not isinstance(example, str):
            raise ConfigError(
                f"environment.options: example must be a text, the call to try, not {example!r:.60}"
            )
        calls = [prompt.answer, prompt.text, "1+1"] if example is None else [example]
        if isinstance(self._tool, ToolProcess):
            await self._tool.trial(calls)

    async def _sample(self, prompt: Prompt, number: int, generate: Generate) -> Sample:
        sample = SampleBuilder(prompt.tokens)
        text = ""
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
            opening, closing = self._answer_marks
            answer = opening + await self._tool(call) + closing
            if turn == self._context.max_turns - 1:
                break  # no turn is left to read the answer
            tokens = await self._encoder.encode(answer, max_tokens=left)
            if tokens is None or len(tokens) >= left:
                break  # no token is left behind the answer
            self._context.show(sample, np.asarray(tokens, np.int32), "tool")
            text += answer
            left -= len(tokens)
        return sample.finish(False, text)

    def _call_at_end(self, text: str) -> str | None:
        """Returns the call at the end of a turn; None if there is none."""
        if not text.endswith(self._close):
            return None
        _, opened, call = text.removesuffix(self._close).rpartition(self._open)
        return call if opened else None


def _marks(context: EnvironmentContext, name: str, default: tuple[str, str]) -> tuple[str, str]:
    """Returns the option `name`: an opening and a closing mark. Raises ConfigError."""
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
            "environment.options: call must have marks that are not empty, which distinguish a "
            "call from text; give two texts"
        )
    return value[0], value[1]


def make_tool(context: EnvironmentContext) -> Tool:
    """Makes the tool of environment.options. Raises ConfigError for an invalid name."""
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
    """A user's function in a process of its own.

    Calls run one after another. A call that exceeds timeout_s kills the process; the next call
    starts another.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._worker: WorkerProcess | None = None

    async def __call__(self, call: str) -> str:
        answer, _ = await self._answer(call)
        return answer

    async def trial(self, calls: Sequence[str]) -> None:
        """Calls the tool before a run.

        Raises ConfigError if it answers none of the calls, or not in time.
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
        """Returns the answer, and whether the tool failed."""
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
        problem = "its process ended while importing it, see the log"
        if worker.ready:
            problem = worker.ready.get("unusable", "")
        if problem:
            await worker.reap()
            raise ConfigError(
                f"environment.options: tool {self._name}: {problem}; correct the function"
            )
        self._worker = worker
        return worker

    async def close(self) -> None:
        """Ends the process; a later call starts another."""
        worker = self._worker
        self._worker = None
        if worker is not None:
            await worker.reap()


def calculate(expression: str) -> str:
    """Evaluates + - * / ** and brackets over decimal numbers.

    Returns a whole number, a number rounded to 6 decimals, or "error: ...".
    """
    if len(expression) > _LONGEST:
        return f"error: more than {_LONGEST} characters"
    source = expression.strip().replace(",", "").replace("^", "**")
    try:
        return _format(_evaluate(ast.parse(source, mode="eval").body))
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "error: not an expression"


def _evaluate(node: ast.AST) -> Fraction:
    """Returns a node's value. Raises ValueError if it is not arithmetic, or too large."""
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, (int, float))
        and not isinstance(node.value, bool)
    ):
        value = Fraction(str(node.value))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _evaluate(node.operand)
        if isinstance(node.op, ast.USub):
            value = -value
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base = _evaluate(node.left)
        exponent = _evaluate(node.right)
        if exponent.denominator != 1 or abs(exponent) > _LARGEST_EXPONENT:
            raise ValueError("exponent")
        value = base ** int(exponent)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        operation = _OPERATIONS[type(node.op)]
        value = operation(_evaluate(node.left), _evaluate(node.right))
    else:
        raise ValueError("not arithmetic")
    if abs(value) > _LARGEST:
        raise ValueError("too large")
    return value


def _format(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(value * 10**_DECIMALS)
    whole, rest = divmod(abs(scaled), 10**_DECIMALS)
    sign = "-" if scaled < 0 else ""
    return f"{sign}{whole}.{rest:0{_DECIMALS}d}".rstrip("0").rstrip(".")

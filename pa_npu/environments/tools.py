"""The tool environment: several turns, in which the policy may call a tool and reads its answer before it goes on.

    prompt ──policy──> ... <<48/2>> ──tool──> =24 ──policy──> ... #### 24 <end>
                       trained        not trained  trained

Token in, token out: what the policy wrote is never rendered to text and tokenised again; only the tool's answer is tokenised,
and follows what was written. A turn ends with a call, with the policy's end token, or at a limit; the sample ends when a turn
ends without a call, or when turns or tokens are used up. The samples of a group go on independently of each other.

environment.options:
    tool    "calculator" (default), or a function of your own, module:function, from the call's text to the answer's. It runs in
            a process of its own and has environment.timeout_s; its failure is its answer ("error: ...").
    call    what opens and closes a call; default ["<<", ">>"], the marks of GSM8K's calculator annotations (arXiv 2110.14168)
    example a call that a tool of your own must answer, tried before the run; default: one of the reference answer, the question
            and "1+1"
    answer  what opens and closes a tool's answer; default ["=", "\\n"]
"""

from __future__ import annotations

import numpy as np

from pa_npu.control.tasks import gather
from pa_npu.data.prompts import Prompt
from pa_npu.environments.protocol import EnvironmentContext, Generate, write
from pa_npu.environments.tool_process import Tool, ToolProcess, make_tool
from pa_npu.errors import ConfigError
from pa_npu.samples.types import Sample, SampleBuilder

_OPTIONS = ("tool", "call", "answer", "example")


class ToolEnvironment:
    """See the module's docstring."""

    waits_are_bounded = True

    def __init__(self, context: EnvironmentContext) -> None:
        context.refuse_options("tools", _OPTIONS)
        self._context = context
        self._open, self._close = _pair(context, "call", ("<<", ">>"))
        self._answer = _pair(context, "answer", ("=", "\n"))
        self._tool: Tool = make_tool(context)

    async def close(self) -> None:
        """End the tool's process, where it has one."""
        if isinstance(self._tool, ToolProcess):
            await self._tool.close()

    async def rollout(self, prompt: Prompt, num_samples: int, generate: Generate) -> list[Sample]:
        return await gather([self._sample(prompt, number, generate) for number in range(num_samples)])

    async def trial(self, prompt: Prompt) -> None:
        """Calls a tool of the user's before a run. Raises ConfigError where it answers nothing."""
        example = self._context.options.get("example")
        if example is not None and not isinstance(example, str):
            raise ConfigError(f"environment.options: example must be a text, the call to try, not {example!r:.60}")
        if isinstance(self._tool, ToolProcess):
            await self._tool.trial([example] if example is not None else [prompt.answer, prompt.text, "1+1"])

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
            tokens = self._context.tokenizer(answer, add_special_tokens=False)["input_ids"]
            if turn == self._context.max_turns - 1 or len(tokens) >= left:
                break  # no turn or token is left to read the answer
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
    if not isinstance(value, (list, tuple)) or len(value) != 2 or not all(isinstance(text, str) for text in value):
        raise ConfigError(f"environment.options: {name} must be two texts, [opening, closing], not {value!r}")
    if name == "call" and not all(value):
        raise ConfigError(
            "environment.options: call needs marks that are not empty, or no call could be told from text"
        )
    return value[0], value[1]

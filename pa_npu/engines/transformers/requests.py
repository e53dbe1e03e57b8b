"""The requests that a transformers engine takes: their fields, with bounds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from pa_npu.engines.images import RequestImage

Count = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
Seed = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Zero = Annotated[float, msgspec.Meta(ge=0, le=0)]
One = Annotated[float, msgspec.Meta(ge=1, le=1)]


class Extra(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Parameters beyond those of OpenAI's API.

    drawn: number of the prompt's last tokens that are the beginning of a single response, of which
        the rest is asked for.
    expert_choices: whether to return the experts of each token.
    score_temperature: of prompt_logprobs.
    """

    drawn: Annotated[int, msgspec.Meta(ge=0)] = 0
    expert_choices: int = 0
    score_temperature: Annotated[float, msgspec.Meta(gt=0)] = 1.0


Prompt = Annotated[list[int], msgspec.Meta(min_length=1)]


class CompletionRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request as pa_npu.engines.codec and score_codec write it, or as programs send it that
    compare models by the log-probs of given texts; unknown fields are refused.

    prompt: tokens or a text, or several of either. Response i follows from seed + i. logprobs: asks
    for them, with so many of the most likely tokens of each place. echo: the answer begins with the
    prompt. prompt_logprobs: asks for those of the prompt's tokens, in vLLM's form.
    """

    model: str
    prompt: str | list[Any]
    n: Count = 1
    seed: Seed = 0
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**24)] = 16
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Literal[-1] = -1
    min_p: Zero = 0.0
    repetition_penalty: One = 1.0
    presence_penalty: Zero = 0.0
    frequency_penalty: Zero = 0.0
    return_token_ids: bool = True
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool = False
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=1024)] | None = None
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=1024)] | None = None
    echo: bool = False
    vllm_xargs: Extra = Extra()
    images: list[RequestImage] = []

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def scored_choices(self) -> int | None:
        """Returns how many most likely tokens are wanted for each position of the prompt; None: no
        scores.
        """
        if self.prompt_logprobs is not None:
            return self.prompt_logprobs
        return self.logprobs if self.echo else None


class WorkerCall(msgspec.Struct, forbid_unknown_fields=True):
    method: str
    args: list[Any]


class EngineRequestRefused(Exception):
    """A request that cannot be served; the message says why."""

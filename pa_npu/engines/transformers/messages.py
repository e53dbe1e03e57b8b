"""Requests that the transformers engine's server reads, checked: what pa_npu.engines.codec writes, and nothing that is ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
Seed = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Zero = Annotated[float, msgspec.Meta(ge=0, le=0)]
One = Annotated[float, msgspec.Meta(ge=1, le=1)]


class Extra(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """drawn: so many of the prompt's last tokens are the beginning of a lone response, of which the rest is asked for. routes: say
    which experts each token took."""

    drawn: Annotated[int, msgspec.Meta(ge=0)] = 0
    routes: int = 0


class CompletionRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Response i follows from seed + i. logprobs: 0 asks for them."""

    model: str
    prompt: Annotated[list[int], msgspec.Meta(min_length=1)]
    n: Count
    seed: Seed
    max_tokens: Count
    temperature: Annotated[float, msgspec.Meta(ge=0)]
    stop_token_ids: list[int]
    ignore_eos: bool
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Literal[-1] = -1
    min_p: Zero = 0.0
    repetition_penalty: One = 1.0
    presence_penalty: Zero = 0.0
    frequency_penalty: Zero = 0.0
    return_token_ids: bool = True
    stop: list[str] = []
    include_stop_str_in_output: bool = True
    logprobs: Literal[0] | None = None
    vllm_xargs: Extra = Extra()


class WorkerCall(msgspec.Struct, forbid_unknown_fields=True):
    method: str
    args: list[Any]

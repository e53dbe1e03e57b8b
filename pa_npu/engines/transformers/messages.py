"""Messages between the transformers engine and its client: one JSON object per request and answer, checked on both sides."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
Seed = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Response i follows from seed + i. written: the beginning of a lone response, of which the rest is asked for. routes: say
    which experts each token took."""

    prompt: Annotated[list[int], msgspec.Meta(min_length=1)]
    n: Count
    seed: Seed
    max_tokens: Count
    temperature: Annotated[float, msgspec.Meta(ge=0)]
    stop_token_ids: list[int]
    ignore_eos: bool
    logprobs: bool
    stop: list[str] = []
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    written: list[int] = []
    routes: bool = False


class GeneratedResponse(msgspec.Struct):
    """routes: of the tokens behind the prompt that were computed, which the last one is not where it ends the response."""

    tokens: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    routes: bytes = b""


class GenerateAnswer(msgspec.Struct):
    """routes: of the prompt, uint16 [tokens, layers with experts, experts per token]."""

    responses: list[GeneratedResponse]
    routes: bytes = b""


class JoinRequest(msgspec.Struct, forbid_unknown_fields=True):
    """As pa_npu.engines.protocol.WeightGroups."""

    host: str
    port: int
    rank: int
    world_size: int
    stages: list[dict[str, Any]]
    backend: str
    timeout_s: float


class LoadRequest(msgspec.Struct, forbid_unknown_fields=True):
    """As RolloutEngine.load_weights."""

    version: Annotated[int, msgspec.Meta(ge=0)]
    begins_within_s: Annotated[float, msgspec.Meta(ge=0)] | None = None


class VersionRequest(msgspec.Struct, forbid_unknown_fields=True):
    """As RolloutEngine.prepare_weights and swap_weights."""

    version: Annotated[int, msgspec.Meta(ge=0)]


class WeightsAnswer(msgspec.Struct):
    """Per worker, of which there is one. host_bytes, device_bytes: MemoryPeak of a load; None without one."""

    versions: list[int | None]
    digests: list[list[str]]
    host_bytes: int | None = None
    device_bytes: int | None = None


class InfoAnswer(msgspec.Struct):
    """model: the directory that the engine was started with. version: of the software."""

    model: str
    version: str
    max_num_seqs: int
    records_routes: bool = False

"""TransformersEngine: the coordinator's client of one transformers engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from pa_npu.engines.answers import Answered, checked_generations, excerpt, with_routes
from pa_npu.engines.http_client import HttpEngine
from pa_npu.engines.protocol import (
    EngineCapabilities,
    EngineError,
    Generation,
    LoadedWeights,
    Sampling,
    WeightGroups,
)
from pa_npu.engines.transformers.messages import (
    GenerateAnswer,
    GenerateRequest,
    InfoAnswer,
    JoinRequest,
    LoadRequest,
    VersionRequest,
    WeightsAnswer,
)
from pa_npu.platform.memory_peaks import MemoryPeak
from pa_npu.samples.routes import Routes

T = TypeVar("T")


class TransformersEngine(HttpEngine):
    """RolloutEngine over the paths of pa_npu.engines.transformers.server."""

    def _ask(
        self,
        prompt_tokens: npt.NDArray[np.int32],
        n: int,
        seed: int,
        sampling: Sampling,
        written: npt.NDArray[np.int32],
    ) -> tuple[str, bytes]:
        stops = [] if sampling.ignore_eos else list(sampling.stop_token_ids)
        request = GenerateRequest(
            prompt_tokens.tolist(),
            n,
            seed,
            sampling.max_tokens,
            sampling.temperature,
            stops,
            sampling.ignore_eos,
            sampling.logprobs,
            list(sampling.stop),
            sampling.top_p,
            written.tolist(),
            sampling.routes is not None,
        )
        return "/generate", msgspec.json.encode(request)

    def _answer(
        self, data: bytes, n: int, sampling: Sampling, version: int | None, instance: str | None
    ) -> list[Generation]:
        responses = self._decode(data, GenerateAnswer).responses
        if len(responses) != n:
            raise EngineError(f"engine {self.name}: {len(responses)} responses, but {n} were asked for")
        answered = [Answered(one.tokens, one.logprobs, one.text, one.finish_reason) for one in responses]
        return checked_generations(answered, sampling, self._vocab_size, self.name, version, instance)

    async def _with_routes(
        self, generations: list[Generation], data: bytes, given: int, routes: Routes, deadline_s: float
    ) -> list[Generation]:
        answer = self._decode(data, GenerateAnswer)
        parts = [answer.routes + response.routes for response in answer.responses]
        return [
            with_routes(generation, np.frombuffer(part, "<u2"), given, routes, self.name)
            for generation, part in zip(generations, parts, strict=True)
        ]

    async def join_weight_groups(self, connection: WeightGroups, *, deadline_s: float) -> None:
        request = JoinRequest(
            *connection.store,
            connection.first_rank,
            connection.world_size,
            [dict(stage) for stage in connection.stages],
            connection.backend,
            connection.timeout_s,
        )
        await self._request("POST", "/join", msgspec.json.encode(request), deadline_s)

    async def _load(
        self, version: int, begins_within_s: float | None, deadline_s: float
    ) -> tuple[LoadedWeights, Mapping[str, str]]:
        body = msgspec.json.encode(LoadRequest(version, begins_within_s))
        data, headers = await self._request("POST", "/load", body, deadline_s)
        return self._loaded(data), headers

    async def prepare_weights(self, version: int, *, deadline_s: float) -> LoadedWeights:
        data, _ = await self._request("POST", "/prepare", msgspec.json.encode(VersionRequest(version)), deadline_s)
        return self._loaded(data)

    async def _swap(self, version: int, deadline_s: float) -> tuple[LoadedWeights, Mapping[str, str]]:
        data, headers = await self._request("POST", "/swap", msgspec.json.encode(VersionRequest(version)), deadline_s)
        return self._loaded(data), headers

    async def loaded_weights(self, *, deadline_s: float) -> LoadedWeights:
        data, _ = await self._request("GET", "/weights", None, deadline_s)
        return self._loaded(data)

    def _loaded(self, data: bytes) -> LoadedWeights:
        answer = self._decode(data, WeightsAnswer)
        memory = None if answer.host_bytes is None else MemoryPeak(answer.host_bytes, answer.device_bytes)
        digests = tuple(tuple(of_worker) for of_worker in answer.digests)
        return LoadedWeights(tuple(answer.versions), digests, memory)

    async def hand_on(self, *, deadline_s: float) -> None:
        await self._request("POST", "/hand_on", None, deadline_s)

    async def sleep(self, *, deadline_s: float) -> None:
        """It keeps its memory."""

    async def wake(self, *, deadline_s: float) -> None:
        """It has kept its memory."""

    async def _capabilities(self, deadline_s: float) -> EngineCapabilities:
        data, _ = await self._request("GET", "/info", None, deadline_s)
        info = self._decode(data, InfoAnswer)
        return EngineCapabilities(
            "transformers",
            info.version,
            self._instance,
            num_workers=1,
            max_num_seqs=info.max_num_seqs,
            continues=True,
            records_routes=info.records_routes,
        )

    def _decode(self, data: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise EngineError(f"engine {self.name}: answer is malformed ({error}): {excerpt(data)}") from None

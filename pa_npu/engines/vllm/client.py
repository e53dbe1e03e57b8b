"""VllmEngine: the coordinator's client of one vLLM server."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pa_npu.engines.answers import decode_object, with_routes
from pa_npu.engines.http_client import HttpEngine
from pa_npu.engines.protocol import (
    EngineCapabilities,
    EngineError,
    Generation,
    LoadedWeights,
    Sampling,
    WeightGroups,
)
from pa_npu.engines.vllm.codec import decode_response, encode_request, recorded_routes
from pa_npu.errors import DeadlineExceeded
from pa_npu.platform.memory_peaks import MemoryPeak
from pa_npu.samples.routes import Routes

# Between looks whether a version has been received.
_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.02, 0.5
# Of an answer with routes, beside them.
_FRAME_BYTES = 2**16


class VllmEngine(HttpEngine):
    """RolloutEngine over vLLM's OpenAI-like paths and those of its development mode."""

    def _ask(
        self,
        prompt_tokens: npt.NDArray[np.int32],
        n: int,
        seed: int,
        sampling: Sampling,
        written: npt.NDArray[np.int32],
    ) -> tuple[str, bytes]:
        return "/v1/completions", encode_request(prompt_tokens, n, seed, sampling, written)

    async def hand_on(self, *, deadline_s: float) -> None:
        # new requests wait between the two; releases differ in the names of modes, and `abort` is the default of all
        await self._request("POST", "/pause?mode=abort&clear_cache=false", None, deadline_s)
        await self._request("POST", "/resume", None, deadline_s)

    async def sleep(self, *, deadline_s: float) -> None:
        # level 2 keeps no weights, of which the next load brings all anyway
        await self._request("POST", "/sleep?level=2", None, deadline_s)

    async def wake(self, *, deadline_s: float) -> None:
        await self._request("POST", "/wake_up", None, deadline_s)

    def _answer(
        self, data: bytes, n: int, sampling: Sampling, version: int | None, instance: str | None
    ) -> list[Generation]:
        return decode_response(data, n, sampling, self._vocab_size, self.name, version, instance)

    async def _with_routes(
        self, generations: list[Generation], data: bytes, given: int, routes: Routes, deadline_s: float
    ) -> list[Generation]:
        try:
            request, recorded = recorded_routes(data, routes.layers)
            if recorded is None:
                asked = [request, len(generations), given]
                most = _FRAME_BYTES + sum(given + len(one.tokens) for one in generations) * routes.most_bytes
                (first, *_), _ = await self._on_workers("pa_routes", asked, deadline_s, most_bytes=most)
                shared = base64.b64decode(first["given"])
                recorded = [np.frombuffer(shared + base64.b64decode(own), "<u2") for own in first["own"]]
        except (KeyError, ValueError, TypeError) as error:
            raise EngineError(
                f"engine {self.name}: its answer has no routes ({type(error).__name__}: {error}); does it record them?"
            ) from None
        size = int(np.prod(routes.column.shape))
        # it may have computed more than it answers, behind a text that ends a response
        ends = [(given + len(one.tokens)) * size for one in generations]
        return [
            with_routes(one, found.reshape(-1)[:end], given, routes, self.name)
            for one, found, end in zip(generations, recorded, ends, strict=True)
        ]

    async def join_weight_groups(self, connection: WeightGroups, *, deadline_s: float) -> None:
        args = [
            *connection.store,
            connection.first_rank,
            connection.world_size,
            [dict(stage) for stage in connection.stages],
            connection.backend,
            connection.timeout_s,
        ]
        await self._on_workers("pa_connect", args, deadline_s)

    async def _load(
        self, version: int, begins_within_s: float | None, deadline_s: float
    ) -> tuple[LoadedWeights, Mapping[str, str]]:
        args = [version] if begins_within_s is None else [version, begins_within_s]
        results, headers = await self._on_workers("pa_receive", args, deadline_s)
        return self._loaded(results), headers

    async def prepare_weights(self, version: int, *, deadline_s: float) -> LoadedWeights:
        end_s = time.monotonic() + deadline_s
        await self._on_workers("pa_prepare", [version], deadline_s)
        pause_s = _SHORTEST_LOOK_S
        while (left_s := end_s - time.monotonic()) > 0:
            # workers answer between two steps, which a look costs little of
            results, _ = await self._on_workers("pa_prepared", [version], left_s)
            loaded = self._loaded(results)
            if None not in loaded.versions:
                return loaded
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
        raise DeadlineExceeded(
            f"engine {self.name}: it did not receive weight version {version} within {deadline_s:g} s"
        )

    async def _swap(self, version: int, deadline_s: float) -> tuple[LoadedWeights, Mapping[str, str]]:
        results, headers = await self._on_workers("pa_swap", [version], deadline_s)
        return self._loaded(results), headers

    async def loaded_weights(self, *, deadline_s: float) -> LoadedWeights:
        results, _ = await self._on_workers("pa_version", [], deadline_s)
        return self._loaded(results)

    def _loaded(self, results: Sequence[dict[str, Any]]) -> LoadedWeights:
        versions = tuple(result.get("version") for result in results)
        if not all(version is None or type(version) is int for version in versions):
            raise EngineError(
                f"engine {self.name}: its workers say that they hold weight versions {list(versions)!r:.200}"
            )
        digests = tuple(tuple(map(str, result.get("digests") or ())) for result in results)
        return LoadedWeights(versions, digests if any(digests) else (), _memory(results))

    async def _on_workers(
        self, method: str, args: Sequence[Any], deadline_s: float, **limits: Any
    ) -> tuple[list[dict[str, Any]], Mapping[str, str]]:
        """The results of a method of the worker extension, in rank order, and the answer's headers. limits: as of `_request`.

        The deadline stays here: a `timeout` given to vLLM shifts every later reply by one when it fires. After
        DeadlineExceeded the engine is in an unknown state and must be killed.
        """
        body = json.dumps({"method": method, "args": list(args)}).encode()
        what = f"{method} on its workers"
        data, headers = await self._request("POST", "/collective_rpc", body, deadline_s, what=what, **limits)
        results = decode_object(data, self.name).get("results")
        if not isinstance(results, list) or not all(isinstance(result, dict) for result in results):
            raise EngineError(f"engine {self.name}: {method} on its workers returned no results")
        return results, headers

    async def _capabilities(self, deadline_s: float) -> EngineCapabilities:
        data, _ = await self._request("GET", "/version", None, deadline_s)
        version = decode_object(data, self.name).get("version")
        workers, _ = await self._on_workers("pa_version", [], deadline_s)
        able = {
            name: all(worker.get(said) is True for worker in workers)
            for name, said in (("continues", "continues"), ("sleeps", "sleeps"), ("records_routes", "routes"))
        }
        return EngineCapabilities("vllm", str(version), self._instance, num_workers=len(workers), **able)


def _memory(results: Sequence[dict[str, Any]]) -> MemoryPeak | None:
    """Read the engine's memory peak: the first worker speaks for the host, each for its own device. None where they do not say."""
    said = [memory for result in results if isinstance(memory := result.get("memory"), dict)]
    host, device = ([n for memory in said if type(n := memory.get(key)) is int] for key in ("host", "device"))
    return MemoryPeak(sum(host), max(device, default=None)) if host else None

"""VllmEngine: the coordinator's HTTP client of one vLLM server. The only place that speaks HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt

from pa_npu.engines.protocol import (
    EngineCapabilities,
    EngineError,
    EngineGone,
    EngineHealth,
    Generation,
    LoadedWeights,
    Sampling,
    WeightGroups,
)
from pa_npu.engines.vllm.codec import decode_object, decode_response, encode_request
from pa_npu.errors import DeadlineExceeded

# uvicorn closes idle connections after 5 s; closing them earlier ourselves avoids writing into one that is being closed.
_KEEP_ALIVE_S = 2.0
# Bodies are megabytes (80 bytes per token): a larger buffer than aiohttp's 64 KiB halves the pauses of the transport.
_READ_BUFFER_BYTES = 2**20
_READY_PAUSE_S = 0.25
_RESET_PAUSE_S = 0.05
_PROBE_PROMPT = np.zeros(1, np.int32)
_PROBE_SAMPLING = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=False)


class VllmEngine:
    """RolloutEngine over HTTP. Owns its connections: use `async with`, inside the event loop.

    url: http://host:port. vocab_size: every token id must be below it. api_key: None takes VLLM_API_KEY, if set.
    """

    def __init__(self, url: str, vocab_size: int, api_key: str | None = None) -> None:
        self.name = url.rstrip("/")
        self._vocab_size = vocab_size
        key = api_key or os.environ.get("VLLM_API_KEY")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> VllmEngine:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(
        self, prompt_tokens: npt.NDArray[np.int32], n: int, seed: int, sampling: Sampling, *, deadline_s: float
    ) -> list[Generation]:
        body = encode_request(prompt_tokens, n, seed, sampling)
        data = await self._request("POST", "/v1/completions", body, deadline_s)
        return decode_response(data, n, sampling, self._vocab_size, self.name)

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

    async def load_weights(self, version: int, *, deadline_s: float) -> LoadedWeights:
        return self._loaded(await self._on_workers("pa_receive", [version], deadline_s))

    async def loaded_weights(self, *, deadline_s: float) -> LoadedWeights:
        return self._loaded(await self._on_workers("pa_version", [], deadline_s))

    def _loaded(self, results: Sequence[dict[str, Any]]) -> LoadedWeights:
        versions = tuple(result.get("version") for result in results)
        if not all(version is None or type(version) is int for version in versions):
            raise EngineError(
                f"engine {self.name}: its workers say that they hold weight versions {list(versions)!r:.200}"
            )
        digests = tuple(tuple(map(str, result.get("digests") or ())) for result in results)
        return LoadedWeights(versions, digests if any(digests) else ())

    async def _on_workers(self, method: str, args: Sequence[Any], deadline_s: float) -> list[dict[str, Any]]:
        """The results of a method of the worker extension, in rank order.

        The deadline stays here: a `timeout` given to vLLM shifts every later reply by one when it fires. After
        DeadlineExceeded the engine is in an unknown state and must be killed.
        """
        body = json.dumps({"method": method, "args": list(args)}).encode()
        data = await self._request("POST", "/collective_rpc", body, deadline_s, what=f"{method} on its workers")
        results = decode_object(data, self.name).get("results")
        if not isinstance(results, list) or not all(isinstance(result, dict) for result in results):
            raise EngineError(f"engine {self.name}: {method} on its workers returned no results")
        return results

    async def reset_prefix_cache(self, *, deadline_s: float) -> None:
        """Retries while vLLM still holds blocks of requests that have just ended."""
        start = time.monotonic()
        while True:
            left_s = deadline_s - (time.monotonic() - start)
            data = await self._request("POST", "/reset_prefix_cache", None, max(left_s, 0.001))
            # vLLM before 0.31 answers with an empty body
            if decode_object(data, self.name).get("success", True):
                return
            if left_s <= _RESET_PAUSE_S:
                raise DeadlineExceeded(
                    f"engine {self.name}: prefix cache still in use after {deadline_s:g} s; are requests in flight?"
                )
            await asyncio.sleep(_RESET_PAUSE_S)

    async def probe(self, *, deadline_s: float) -> None:
        await self.generate(_PROBE_PROMPT, 1, 0, _PROBE_SAMPLING, deadline_s=deadline_s)

    async def check_health(self, *, deadline_s: float) -> EngineHealth:
        await self._request("GET", "/health", None, deadline_s)
        return EngineHealth()

    async def wait_ready(self, *, deadline_s: float) -> EngineCapabilities:
        start = time.monotonic()
        reason = "no answer"
        while (left_s := deadline_s - (time.monotonic() - start)) > 0:
            try:
                await self.check_health(deadline_s=min(left_s, 10.0))
                return EngineCapabilities("vllm")
            except (EngineError, DeadlineExceeded) as error:
                reason = str(error)
            await asyncio.sleep(min(_READY_PAUSE_S, left_s))
        raise DeadlineExceeded(f"engine {self.name}: not ready after {deadline_s:g} s ({reason}); see the engine's log")

    async def _request(
        self, method: str, path: str, body: bytes | None, deadline_s: float, what: str | None = None
    ) -> bytes:
        """The body of a 200 answer. Everything else is an EngineError, or DeadlineExceeded."""
        what = what or path
        async with self._failures(what, deadline_s):
            timeout = aiohttp.ClientTimeout(total=deadline_s)
            async with self._open_session().request(method, self.name + path, data=body, timeout=timeout) as response:
                data = await response.read()
        if response.status != 200:
            excerpt = data[:300].decode("utf-8", "replace").strip()
            # a server error is what the API process says when the engine behind it has died
            kind = EngineGone if response.status >= 500 else EngineError
            raise kind(f"engine {self.name}: {what} answered {response.status}: {excerpt}")
        return data

    @asynccontextmanager
    async def _failures(self, what: str, deadline_s: float) -> AsyncIterator[None]:
        try:
            yield
        except asyncio.TimeoutError:
            raise DeadlineExceeded(
                f"engine {self.name}: {what} not answered within {deadline_s:g} s; it may hang"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            detail = str(error) or type(error).__name__
            raise EngineGone(
                f"engine {self.name}: {what} failed ({detail}); it has probably died, see its log"
            ) from None

    def _open_session(self) -> aiohttp.ClientSession:
        # created on first use, because aiohttp binds a session to the running loop
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                headers=self._headers,
                read_bufsize=_READ_BUFFER_BYTES,
                trust_env=False,
            )
        return self._session

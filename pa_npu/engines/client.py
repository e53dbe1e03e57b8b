"""EngineClient: the coordinator's client of one engine that answers as vLLM's server does, with the workers' calls of this package.

A client belongs to one start of one engine: it remembers which start answered first, and an answer
of another one is EngineGone. It remembers which weight version it had it load; a response generated
by another version is InvariantViolation (I1).
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import aiohttp
import msgspec
import numpy as np
import numpy.typing as npt

from pa_npu.config.texts import path_problem
from pa_npu.control.bounded_http import bounded_get, read_at_most
from pa_npu.engines.codec import (
    decode_object,
    decode_response,
    encode_request,
    recorded_routes,
    with_routes,
)
from pa_npu.engines.http_server import (
    INSTANCE_HEADER,
    KEY_VARIABLE,
    NO_VERSION,
    OPEN_PATH,
    VERSION_HEADER,
)
from pa_npu.engines.live_weights import LiveReport
from pa_npu.engines.protocol import (
    NOTHING,
    EngineCapabilities,
    EngineError,
    EngineGone,
    Generation,
    LoadedWeights,
    Sampling,
    WeightGroups,
)
from pa_npu.errors import DeadlineExceeded, InvariantViolation
from pa_npu.platform.memory_peaks import MemoryPeak
from pa_npu.samples.routes import Routes

# Servers close idle connections after 5 s (uvicorn); closing them earlier ourselves avoids writing
# into one that is being closed.
_KEEP_ALIVE_S = 2.0
# Bodies are megabytes (80 bytes per token): a larger buffer than aiohttp's 64 KiB halves the pauses
# of the transport.
_READ_BUFFER_BYTES = 2**20
_GET_TIMEOUT_S = 10.0
_UNAUTHORISED = 401
# The size of an answer at most, where nothing else is said.
ANSWER_BYTES = 2**24
_READY_PAUSE_S = 0.25
_CAPABILITIES_WITHIN_S = 60.0
_WORKERS_ANSWER_S = 10.0
# Between looks whether a version has been received.
_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.02, 0.5
# Of an answer with routes, beside them.
_FRAME_BYTES = 2**16
_PROBE_PROMPT = np.zeros(1, np.int32)
_PROBE_SAMPLING = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=False)
# Of an answer, beside ANSWER_BYTES: so much per token that was asked for and per token of the
# prompt, which is echoed. A token takes 80 to 200 bytes (its text three times, its log-prob twice);
# more is no answer of an engine.
_TOKEN_BYTES, _PROMPT_TOKEN_BYTES = 2048, 16


class EngineClient:
    """RolloutEngine over OpenAI-like paths and those of vLLM's development mode.

    Owns its connections: use `async with` in the event loop.

    url: http://host:port. vocab_size: every token id must be below it. api_key: None takes
    VLLM_API_KEY, if set. kind: of the engine, the value of rollout.backend.
    """

    def __init__(
        self, url: str, vocab_size: int, api_key: str | None = None, kind: str = "vllm"
    ) -> None:
        self.name = url.rstrip("/")
        key = api_key or os.environ.get(KEY_VARIABLE)
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {key}"} if key else {}
        )
        self._session: aiohttp.ClientSession | None = None
        self._instance: str | None = None
        self._responses: set[aiohttp.ClientResponse] = set()  # that are being read
        self._vocab_size = vocab_size
        self._kind = kind
        self._asked_to_load = False
        self._version: int | None = None  # that it loaded for this client
        self._generating = 0

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        for response in list(self._responses):
            response.close()  # the session's close leaves whoever reads one waiting
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(
        self,
        prompt_tokens: npt.NDArray[np.int32],
        n: int,
        seed: int,
        sampling: Sampling,
        *,
        deadline_s: float,
        written: npt.NDArray[np.int32] = NOTHING,
    ) -> list[Generation]:
        body = encode_request(prompt_tokens, n, seed, sampling, written)
        given = len(prompt_tokens) + len(written)
        most = ANSWER_BYTES + n * (_TOKEN_BYTES * sampling.max_tokens + _PROMPT_TOKEN_BYTES * given)
        if sampling.routes is not None:
            most += n * (sampling.max_tokens + given) * sampling.routes.most_bytes
        self._generating += 1
        try:
            data, headers = await self._request(
                "POST", "/v1/completions", body, deadline_s, most_bytes=most, keep_connection=True
            )
        finally:
            self._generating -= 1
        version = self._check_version(headers)
        generations = decode_response(data, n, sampling, self._vocab_size, self.name, version)
        if sampling.routes is None:
            return generations
        return await self._with_routes(generations, data, given, sampling.routes, deadline_s)

    async def _with_routes(
        self,
        generations: list[Generation],
        data: bytes,
        given: int,
        routes: Routes,
        deadline_s: float,
    ) -> list[Generation]:
        """The generations with the routes of what they were given, so many tokens, and of their
        own. data: the answer.
        """
        try:
            request, recorded = recorded_routes(data, routes.layers)
            if recorded is None:
                asked = [request, len(generations), given]
                most = (
                    _FRAME_BYTES
                    + sum(given + len(one.tokens) for one in generations) * routes.most_bytes
                )
                (first, *_), _ = await self._on_workers(
                    "pa_routes", asked, deadline_s, most_bytes=most
                )
                shared = base64.b64decode(first["given"], validate=True)
                recorded = [
                    np.frombuffer(shared + base64.b64decode(own, validate=True), "<u2")
                    for own in first["own"]
                ]
            if len(recorded) != len(generations):
                raise ValueError(f"{len(recorded)} of {len(generations)} responses")
        except (KeyError, ValueError, TypeError) as error:
            raise EngineError(
                f"engine {self.name}: its answer has no routes ({type(error).__name__}: {error}); "
                "does it record them?"
            ) from None
        size = int(np.prod(routes.column.shape))
        # it may have computed more than it answers, behind a text that ends a response
        ends = [(given + len(one.tokens)) * size for one in generations]
        return [
            with_routes(one, found.reshape(-1)[:end], given, routes, self.name)
            for one, found, end in zip(generations, recorded, ends, strict=True)
        ]

    async def hand_on(self, *, deadline_s: float) -> None:
        # new requests wait between the two; releases differ in the names of modes, and `abort` is
        # the default of all
        await self._request("POST", "/pause?mode=abort&clear_cache=false", None, deadline_s)
        await self._request("POST", "/resume", None, deadline_s)

    async def sleep(self, *, deadline_s: float) -> None:
        # level 2 keeps no weights, of which the next load brings all anyway
        await self._request("POST", "/sleep?level=2", None, deadline_s)

    async def wake(self, *, deadline_s: float) -> None:
        await self._request("POST", "/wake_up", None, deadline_s)

    async def join_weight_groups(self, connection: WeightGroups, *, deadline_s: float) -> None:
        await self._on_workers("pa_connect", [vars(connection)], deadline_s)

    async def load_weights(
        self, version: int, *, deadline_s: float, begins_within_s: float | None = None
    ) -> LoadedWeights:
        args = [version] if begins_within_s is None else [version, begins_within_s]
        return await self._load("pa_receive", args, deadline_s)

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
            f"engine {self.name}: it did not receive weight version {version} within "
            f"{deadline_s:g} s"
        )

    async def swap_weights(self, version: int, *, deadline_s: float) -> LoadedWeights:
        return await self._load("pa_swap", [version], deadline_s)

    async def _load(self, method: str, args: Sequence[Any], deadline_s: float) -> LoadedWeights:
        """Return what a load answers, if the server says the same of itself; responses must be by
        that version from here on.
        """
        self._asked_to_load, self._version = True, None
        results, headers = await self._on_workers(method, args, deadline_s)
        loaded, said = self._loaded(results), said_version(headers)
        if set(loaded.versions) != {said}:
            raise EngineError(
                f"engine {self.name}: its workers hold weight versions {list(loaded.versions)}, "
                f"but its server says {headers.get(VERSION_HEADER, 'nothing')}; was it started "
                "with the command of this package?"
            )
        self._version = said
        return loaded

    async def loaded_weights(self, *, deadline_s: float) -> LoadedWeights:
        results, _ = await self._on_workers("pa_version", [], deadline_s)
        return self._loaded(results)

    def _loaded(self, results: Sequence[dict[str, Any]]) -> LoadedWeights:
        versions = tuple(result.get("version") for result in results)
        if not all(version is None or type(version) is int for version in versions):
            raise EngineError(
                f"engine {self.name}: its workers say that they hold weight versions "
                f"{list(versions)!r:.200}"
            )
        digests = tuple(tuple(map(str, result.get("digests") or ())) for result in results)
        return LoadedWeights(
            versions=versions,
            digests=digests if any(digests) else (),
            memory=_memory(results),
            live=self._live(results),
        )

    def _live(self, results: Sequence[dict[str, Any]]) -> tuple[LiveReport, ...]:
        """Returns what every worker says that it holds; empty unless all of them say it.

        Raises EngineError for another form.
        """
        answers = [result.get("live") for result in results]
        if None in answers:
            return ()
        try:
            return tuple(msgspec.convert(answer, LiveReport, strict=False) for answer in answers)
        except msgspec.ValidationError as error:
            raise EngineError(
                f"engine {self.name}: its workers' report of what they hold cannot be read: {error}"
            ) from None

    async def _on_workers(
        self, method: str, args: Sequence[Any], deadline_s: float, **limits: Any
    ) -> tuple[list[dict[str, Any]], Mapping[str, str]]:
        """The results of a method of the workers, in rank order, and the answer's headers. limits:
        as of `_request`.

        The deadline stays here: a `timeout` given to vLLM shifts every later reply by one when it
        fires. After DeadlineExceeded the engine is in an unknown state and must be killed.
        """
        body = json.dumps({"method": method, "args": list(args)}).encode()
        what = f"{method} on its workers"
        data, headers = await self._request(
            "POST", "/collective_rpc", body, deadline_s, what=what, **limits
        )
        results = decode_object(data, self.name).get("results")
        if not isinstance(results, list) or not all(isinstance(result, dict) for result in results):
            raise EngineError(f"engine {self.name}: {method} on its workers returned no results")
        return results, headers

    async def probe(self, *, deadline_s: float) -> None:
        try:
            await self.generate(_PROBE_PROMPT, 1, 0, _PROBE_SAMPLING, deadline_s=deadline_s)
        except DeadlineExceeded:
            if not self._generating:
                raise
            # where the batch is full, the token waits for its turn; workers answer between two
            # steps
            await self.loaded_weights(deadline_s=min(deadline_s, _WORKERS_ANSWER_S))

    async def check_health(self, *, deadline_s: float) -> int | None:
        _, headers = await self._request("GET", OPEN_PATH, None, deadline_s)
        return said_version(headers)

    async def wait_ready(self, *, deadline_s: float) -> EngineCapabilities:
        start = time.monotonic()
        reason = "no answer"
        while (left_s := deadline_s - (time.monotonic() - start)) > 0:
            try:
                await self.check_health(deadline_s=min(left_s, 10.0))
            except (EngineError, DeadlineExceeded) as error:
                reason = str(error)
                await asyncio.sleep(min(_READY_PAUSE_S, left_s))
            else:
                # a server that serves may have lost its workers a moment ago, and then never
                # answers
                return await self._capabilities(min(left_s, _CAPABILITIES_WITHIN_S))
        raise DeadlineExceeded(
            f"engine {self.name}: not ready after {deadline_s:g} s ({reason}); see the engine's log"
        )

    async def _capabilities(self, deadline_s: float) -> EngineCapabilities:
        """Ask an engine that serves what it can do."""
        data, _ = await self._request("GET", "/version", None, deadline_s)
        version = decode_object(data, self.name).get("version")
        workers, _ = await self._on_workers("pa_version", [], deadline_s)
        able = {
            name: all(worker.get(said) is True for worker in workers)
            for name, said in (
                ("continues", "continues"),
                ("sleeps", "sleeps"),
                ("records_routes", "routes"),
            )
        }
        return EngineCapabilities(self._kind, str(version), num_workers=len(workers), **able)

    def _check_version(self, headers: Mapping[str, str]) -> int | None:
        """The version that the engine says it generated by.

        Raises InvariantViolation where it was given another.
        """
        said = said_version(headers)
        if self._asked_to_load and (said is None or said != self._version):
            published = "none completely" if self._version is None else str(self._version)
            raise InvariantViolation(
                f"I1 version: engine {self.name} says that it generated by weight version "
                f"{headers.get(VERSION_HEADER)}, but this run gave it {published}; does another "
                "run use it?"
            )
        return said

    async def _request(
        self,
        method: Literal["GET", "POST"],
        path: str,
        body: bytes | None,
        deadline_s: float,
        *,
        what: str | None = None,
        most_bytes: int = ANSWER_BYTES,
        keep_connection: bool = False,
    ) -> tuple[bytes, Mapping[str, str]]:
        """Body and headers of a 200 answer of this start of the engine. Everything else is an
        EngineError, or DeadlineExceeded.

        keep_connection: for the next request. uvicorn ends it after an error of the workers, and a
        request that meets that end looks like the death of the engine, so only what is asked often
        keeps it.
        """
        what = what or path
        headers = {} if keep_connection else {"Connection": "close"}
        timeout = aiohttp.ClientTimeout(total=deadline_s)
        try:
            async with self._open_session().request(
                method,
                self.name + path,
                data=body,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                self._responses.add(response)
                try:
                    data = await read_at_most(response, most_bytes)
                finally:
                    self._responses.discard(response)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(
                f"engine {self.name}: {what} not answered within {deadline_s:g} s; it may hang"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            detail = str(error) or type(error).__name__
            raise EngineGone(
                f"engine {self.name}: {what} failed ({detail}); it has probably died, see its log"
            ) from None
        except ValueError as error:
            raise EngineError(f"engine {self.name}: {what}: {error}; is it an engine?") from None
        if response.status != 200:
            excerpt = data[:300].decode("utf-8", "replace").strip()
            # a server error is what the API process says when the engine behind it has died
            kind = EngineGone if response.status >= 500 else EngineError
            raise kind(f"engine {self.name}: {what} answered {response.status}: {excerpt}")
        self._recognise(response.headers.get(INSTANCE_HEADER))
        return data, response.headers

    def _recognise(self, instance: str | None) -> None:
        if self._instance is None:
            self._instance = instance
        elif instance != self._instance:
            raise EngineGone(
                f"engine {self.name}: it was started again (it says that it is "
                f"{instance or 'nobody'}, and was {self._instance}), so that it does not hold the "
                "weights that it was given"
            )

    def _open_session(self) -> aiohttp.ClientSession:
        # created on first use, because aiohttp binds a session to the running loop
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                headers=self._headers,
                read_bufsize=_READ_BUFFER_BYTES,
                cookie_jar=aiohttp.DummyCookieJar(),  # engines set none
                trust_env=False,
                # engines do not compress, and a few bytes can become gigabytes
                auto_decompress=False,
            )
        return self._session


def _memory(results: Sequence[dict[str, Any]]) -> MemoryPeak | None:
    """Read the engine's memory peak: the first worker speaks for the host, each for its own device.

    None where they do not say.
    """
    said = [memory for result in results if isinstance(memory := result.get("memory"), dict)]
    host, device = (
        [n for memory in said if type(n := memory.get(key)) is int] for key in ("host", "device")
    )
    return MemoryPeak(sum(host), max(device, default=None)) if host else None


def said_version(headers: Mapping[str, str]) -> int | None:
    """None for no version, for one that changed while the answer was made, and for what is none."""
    said = headers.get(VERSION_HEADER, NO_VERSION)
    return int(said) if said.isascii() and said.isdecimal() and len(said) < 19 else None


def served_model(url: str, key: str) -> str:
    """The model directory that an engine was started with.

    Raises OSError or ValueError where it does not say.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    status, body = bounded_get(f"{url}/v1/models", headers, _GET_TIMEOUT_S)
    if status == _UNAUTHORISED:
        raise OSError(f"HTTP {status}: it refuses this API key")
    if status != 200:
        raise OSError(f"HTTP {status}")
    try:
        directory = json.loads(body)["data"][0]["root"]
    except (LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"its answer cannot be read: {type(error).__name__}") from None
    if not isinstance(directory, str) or path_problem(directory):
        raise ValueError("its answer names no directory")
    return directory

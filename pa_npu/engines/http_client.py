"""HttpClient: requests to one start of one engine, with deadlines, bounded answers and a check of who answered.

It remembers which start answered first; an answer of another one is EngineGone.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

import aiohttp

from pa_npu.config.texts import path_problem
from pa_npu.control.bounded_http import bounded_get, read_at_most
from pa_npu.engines.http_server import INSTANCE_HEADER, KEY_VARIABLE, NO_VERSION, VERSION_HEADER
from pa_npu.engines.protocol import EngineError, EngineGone
from pa_npu.errors import DeadlineExceeded

# Servers close idle connections after 5 s (uvicorn); closing them earlier ourselves avoids writing into one that is being closed.
_KEEP_ALIVE_S = 2.0
# Bodies are megabytes (80 bytes per token): a larger buffer than aiohttp's 64 KiB halves the pauses of the transport.
_READ_BUFFER_BYTES = 2**20
_GET_TIMEOUT_S = 10.0
_UNAUTHORISED = 401
ANSWER_BYTES = 2**24
"""The size of an answer at most, where nothing else is said."""

_E = TypeVar("_E", bound="HttpClient")


class HttpClient:
    """Owns its connections: use `async with` in the event loop.

    url: http://host:port. api_key: None takes VLLM_API_KEY, if set.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.name = url.rstrip("/")
        key = api_key or os.environ.get(KEY_VARIABLE)
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._session: aiohttp.ClientSession | None = None
        self._instance: str | None = None
        self._responses: set[aiohttp.ClientResponse] = set()  # that are being read

    async def __aenter__(self: _E) -> _E:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        for response in list(self._responses):
            response.close()  # the session's close leaves whoever reads one waiting
        if self._session is not None:
            await self._session.close()
            self._session = None

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
        """Body and headers of a 200 answer of this start of the engine. Everything else is an EngineError, or DeadlineExceeded.

        keep_connection: for the next request. uvicorn ends it after an error of the workers, and a request that meets that end
        looks like the death of the engine, so only what is asked often keeps it.
        """
        what = what or path
        headers = {} if keep_connection else {"Connection": "close"}
        async with self._failures(what, deadline_s):
            timeout = aiohttp.ClientTimeout(total=deadline_s)
            async with self._open_session().request(
                method, self.name + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                self._responses.add(response)
                try:
                    data = await read_at_most(response, most_bytes)
                finally:
                    self._responses.discard(response)
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
                f"engine {self.name}: it was started again (it says that it is {instance or 'nobody'}, and was "
                f"{self._instance}), so that it does not hold the weights that it was given"
            )

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
        except ValueError as error:
            raise EngineError(f"engine {self.name}: {what}: {error}; is it an engine?") from None

    def _open_session(self) -> aiohttp.ClientSession:
        # created on first use, because aiohttp binds a session to the running loop
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                headers=self._headers,
                read_bufsize=_READ_BUFFER_BYTES,
                cookie_jar=aiohttp.DummyCookieJar(),  # engines set none
                trust_env=False,
                auto_decompress=False,  # engines do not compress, and a few bytes can become gigabytes
            )
        return self._session


def said_version(headers: Mapping[str, str]) -> int | None:
    """None for no version, for one that changed while the answer was made, and for what is none."""
    said = headers.get(VERSION_HEADER, NO_VERSION)
    return int(said) if said.isascii() and said.isdecimal() and len(said) < 19 else None


def directory_in(answer: Any, *path: str | int) -> str:
    """The model directory that stands in an engine's answer. Raises ValueError where there is none."""
    try:
        for step in path:
            answer = answer[step]
    except (LookupError, TypeError) as error:
        raise ValueError(f"its answer cannot be read: {type(error).__name__}") from None
    if not isinstance(answer, str) or path_problem(answer):
        raise ValueError("its answer names no directory")
    return answer


def get_json(url: str, key: str) -> Any:
    """The JSON at a URL of an engine, without an event loop. Raises OSError or ValueError when there is none."""
    status, body = bounded_get(url, {"Authorization": f"Bearer {key}"} if key else {}, _GET_TIMEOUT_S)
    if status == _UNAUTHORISED:
        raise OSError(f"HTTP {status}: it refuses this API key")
    if status != 200:
        raise OSError(f"HTTP {status}")
    try:
        return json.loads(body)
    except RecursionError:
        raise ValueError("its answer is nested too deeply") from None

"""EngineHttp: requests to one start of one engine, with a deadline and a bound on every answer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Literal

import aiohttp

from pa_npu.control.bounded_http import read_at_most
from pa_npu.engines.http_server import INSTANCE_HEADER, KEY_VARIABLE
from pa_npu.engines.protocol import EngineError, EngineGone
from pa_npu.errors import DeadlineExceeded

# Servers close idle connections after 5 s (uvicorn); closing them earlier ourselves avoids writing
# into one that is being closed.
_KEEP_ALIVE_S = 2.0
# Bodies are megabytes (80 bytes per token): a larger buffer than aiohttp's 64 KiB halves the pauses
# of the transport.
_READ_BUFFER_BYTES = 2**20
# Largest size of an answer, where no other is given.
ANSWER_BYTES = 2**24


class EngineHttp:
    """The connections of a client to one start of one engine.

    It remembers which start answered first, and raises EngineGone for the answer of another one.

    Args:
        url: http://host:port.
        api_key: None takes VLLM_API_KEY, if set.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self.name = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        key = os.environ.get(KEY_VARIABLE) if api_key is None else api_key
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._session: aiohttp.ClientSession | None = None
        self._instance: str | None = None
        self._responses: set[aiohttp.ClientResponse] = set()  # those that are being read

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
        action: str | None = None,
        max_bytes: int = ANSWER_BYTES,
        keep_connection: bool = False,
        accept: str | None = None,
    ) -> tuple[bytes, Mapping[str, str]]:
        """Sends a request; returns body and headers of the answer.

        Raises EngineError, or DeadlineExceeded, unless the answer has status 200 and comes from the
        start of the engine that this client belongs to.

        Args:
            method: of HTTP.
            path: behind the engine's URL.
            body: JSON, or None.
            deadline_s: seconds from now until the answer is complete.
            action: the request, for messages; None: the path.
            max_bytes: largest size of the answer.
            keep_connection: for the next request. uvicorn ends it after an error of the workers,
                and a request that meets that end looks like the death of the engine. So only
                frequent requests keep it.
            accept: a form of the answer that the engine may choose in place of JSON.
        """
        action = action or path
        headers = {} if keep_connection else {"Connection": "close"}
        if accept is not None:
            headers["Accept"] = accept
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
                    data = await read_at_most(response, max_bytes)
                finally:
                    self._responses.discard(response)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(
                f"engine {self.name}: {action} not answered within {deadline_s:g} s; it may hang"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            detail = str(error) or type(error).__name__
            raise EngineGone(
                f"engine {self.name}: {action} failed ({detail}); it has probably died, see its log"
            ) from None
        except ValueError as error:
            raise EngineError(f"engine {self.name}: {action}: {error}; is it an engine?") from None
        if response.status != 200:
            excerpt = data[:300].decode("utf-8", "replace").strip()
            # A 500 is what the API process answers when the engine behind it has died.
            kind = EngineGone if response.status >= 500 else EngineError
            raise kind(f"engine {self.name}: {action} answered {response.status}: {excerpt}")
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
        # Created on first use: aiohttp binds a session to the running loop.
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

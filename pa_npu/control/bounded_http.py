"""Makes HTTP requests with a limit on their total time and on the size of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp

_MAX_BYTES = 1 << 20


async def read_at_most(reply: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Reads an answer's body. Raises ValueError if it is larger, before all of it is read."""
    too_large = ValueError(f"its answer is longer than {max_bytes} bytes")
    if (reply.content_length or 0) > max_bytes:
        raise too_large
    if reply.content_length is not None and not reply.headers.get("Content-Encoding"):
        return await reply.read()  # the header's length is exact and within the limit
    body = bytearray()
    async for part in reply.content.iter_any():
        body += part
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


async def bounded_request(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    headers: Mapping[str, str],
    deadline_s: float,
    body: bytes | None = None,
) -> tuple[int, bytes]:
    """Returns the status and the body of one answer.

    Raises OSError if no complete answer comes within deadline_s, ValueError if it is too large.
    """
    import aiohttp

    # a limit on the total time: a limit on each read would not end an answer that drips
    timeout = aiohttp.ClientTimeout(total=deadline_s)
    try:
        async with session.request(
            method, url, headers=headers, data=body, timeout=timeout, allow_redirects=False
        ) as reply:
            return reply.status, await read_at_most(reply, _MAX_BYTES)
    except asyncio.TimeoutError:
        raise OSError(f"no complete answer within {deadline_s:g} s") from None
    except aiohttp.ClientError as error:
        raise OSError(" ".join(str(error).split()) or type(error).__name__) from None


def bounded_get(url: str, headers: Mapping[str, str], deadline_s: float) -> tuple[int, bytes]:
    """Does the same as `bounded_request` for one GET, outside of an event loop."""

    async def get() -> tuple[int, bytes]:
        import aiohttp

        async with aiohttp.ClientSession(auto_decompress=False, trust_env=False) as session:
            return await bounded_request(session, "GET", url, headers, deadline_s)

    return asyncio.run(get())

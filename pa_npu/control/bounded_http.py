"""HTTP requests whose time and size are bounded, whatever the other side sends: at most so many seconds and bytes in all."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp

_MOST_BYTES = 1 << 20


async def read_at_most(reply: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Read an answer's body; raises ValueError where it is larger, before all of it is read."""
    too_large = ValueError(f"its answer is longer than {most_bytes} bytes")
    if (reply.content_length or 0) > most_bytes:
        raise too_large
    if reply.content_length is not None and not reply.headers.get("Content-Encoding"):
        return await reply.read()  # as long as it says, at once
    found = bytearray()
    async for part in reply.content.iter_any():
        found += part
        if len(found) > most_bytes:
            raise too_large
    return bytes(found)


async def bounded_request(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    headers: Mapping[str, str],
    deadline_s: float,
    body: bytes | None = None,
) -> tuple[int, bytes]:
    """Status and body of one answer. Raises OSError or ValueError when there is no such answer."""
    import aiohttp

    # a total time, because one for each read is none for an answer that drips
    timeout = aiohttp.ClientTimeout(total=deadline_s)
    try:
        async with session.request(
            method, url, headers=headers, data=body, timeout=timeout, allow_redirects=False
        ) as reply:
            return reply.status, await read_at_most(reply, _MOST_BYTES)
    except asyncio.TimeoutError:
        raise OSError(f"no complete answer within {deadline_s:g} s") from None
    except aiohttp.ClientError as error:
        raise OSError(" ".join(str(error).split()) or type(error).__name__) from None


def bounded_get(url: str, headers: Mapping[str, str], deadline_s: float) -> tuple[int, bytes]:
    """The same for one GET. Not for use in an event loop."""

    async def get() -> tuple[int, bytes]:
        import aiohttp

        async with aiohttp.ClientSession(auto_decompress=False, trust_env=False) as session:
            return await bounded_request(session, "GET", url, headers, deadline_s)

    return asyncio.run(get())

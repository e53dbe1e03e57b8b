"""One GET whose time and size are bounded, whatever the other side sends: at most so many seconds and bytes in all."""

from __future__ import annotations

import asyncio

_MOST_BYTES = 1 << 20


async def _get(url: str, headers: dict[str, str], deadline_s: float) -> tuple[int, bytes]:
    import aiohttp

    # a total time, because one for each read is none for an answer that drips
    timeout = aiohttp.ClientTimeout(total=deadline_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, auto_decompress=False, trust_env=False) as session,
            session.get(url, headers=headers, allow_redirects=False) as reply,
        ):
            body = bytearray()
            async for chunk in reply.content.iter_chunked(1 << 16):
                body += chunk
                if len(body) > _MOST_BYTES:
                    raise ValueError(f"its answer is longer than {_MOST_BYTES} bytes")
            return reply.status, bytes(body)
    except asyncio.TimeoutError:
        raise OSError(f"no complete answer within {deadline_s:g} s") from None
    except aiohttp.ClientError as error:
        raise OSError(" ".join(str(error).split()) or type(error).__name__) from None


def bounded_get(url: str, headers: dict[str, str], deadline_s: float) -> tuple[int, bytes]:
    """Status and body. Raises OSError or ValueError when there is no such answer. Not for use in an event loop."""
    return asyncio.run(_get(url, headers, deadline_s))

"""Waits of scripted parts, which end in seconds and say why: a test that is stuck names what never came."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LIMIT_S = 20.0
"""Far more than what a script waits for takes on a busy machine, far less than the deadlines of a
run.
"""


async def comes(event: asyncio.Event, why: Callable[[], str]) -> None:
    """Until the event is set; AssertionError with `why` when it is not within LIMIT_S."""
    try:
        await asyncio.wait_for(event.wait(), LIMIT_S)
    except asyncio.TimeoutError:
        raise AssertionError(f"{why()} ({LIMIT_S:g} s)") from None

"""Guards a request to an engine whose worker may die before it answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from pa_npu.control.tasks import guarded
from pa_npu.engines.protocol import RolloutEngine
from pa_npu.errors import DeadlineExceeded

T = TypeVar("T")

_HEALTH_EVERY_S = 2.0


async def while_healthy(
    engine: RolloutEngine,
    work: Coroutine[Any, Any, T],
    *,
    health_timeout_s: float,
    sending: asyncio.Task[float] | None,
    limit_s: float,
) -> T:
    """Returns the result of `work`, or raises EngineError as soon as the engine is not healthy.

    Args:
        engine: that does the work.
        work: the request.
        health_timeout_s: how long the engine may take to answer that it is healthy.
        sending: for work that was asked for before the trainers send: returns when they began to
            (time.perf_counter). A worker that hangs leaves the engine healthy, so that from then on
            the work has `limit_s`, however long it waited before. None: the work has a deadline.
        limit_s: time that the work has once the trainers send. Raises DeadlineExceeded beyond it.
    """

    async def watch() -> None:
        while True:
            await asyncio.sleep(_HEALTH_EVERY_S)
            await engine.check_health(deadline_s=health_timeout_s)
            if sending is None or not sending.done():
                continue
            # A failure of the trainers ends the attempt elsewhere.
            if sending.cancelled() or sending.exception() is not None:
                continue
            if time.perf_counter() - sending.result() > limit_s:
                raise DeadlineExceeded(
                    f"engine {engine.name}: it has not loaded the weights {limit_s:g} s after the "
                    "trainers began to send them; it may hang"
                )

    return await guarded(work, watch())

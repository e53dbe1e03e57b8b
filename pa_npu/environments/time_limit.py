"""Ends an environment that never returns, or that blocks the event loop in which all groups run.

Its own work is what it does while the policy owes it no answer. Between two answers that may take
environment.timeout_s for each of the prompt's samples, and at least a minute. A blocked loop can
tell nobody, so a timer of the process interrupts what blocks it.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from pa_npu.config.user_code import place_of
from pa_npu.environments.protocol import Environment, EnvironmentFailed

LEAST_S = 60.0  # a turn of pure Python, on a machine that computes much else
_BEAT_S = 1.0
_SLACK_S = 0.01
_END_S = 5.0


async def ended(
    task: asyncio.Future[Any], own_s: float, idle_s: Callable[[], float], what: str
) -> None:
    """Wait for an environment's rollout, which gets own_s, and at least LEAST_S, for its own work
    between two answers.

    idle_s: seconds since the policy owed it an answer. Raises EnvironmentFailed where it takes
    longer. what: for messages.
    """
    limit_s = max(LEAST_S, own_s)
    try:
        while idle_s() < limit_s:
            if (await asyncio.wait([task], timeout=limit_s - idle_s() + _SLACK_S))[0]:
                return
        raise EnvironmentFailed(
            f"{what}: it has neither asked the policy nor returned for {limit_s:g} s; end what it "
            "waits for, or raise environment.timeout_s"
        )
    finally:
        await _end(task)


async def _end(task: asyncio.Future[Any]) -> None:
    """Cancel it and wait for its end, also where this wait is itself cancelled; one that does not
    end in time is left behind.
    """
    task.cancel()
    deadline_s = time.monotonic() + _END_S
    while not task.done() and (left_s := deadline_s - time.monotonic()) > 0:
        with suppress(asyncio.CancelledError):
            await asyncio.wait([task], timeout=left_s)


@contextmanager
def interrupting(environment: Environment, limit_s: float) -> Iterator[None]:
    """Raises EnvironmentFailed inside code of the environment that keeps the running loop from
    going on for limit_s.

    Only in a main thread, where signals are handled, and where nobody else uses its timer.
    """
    free = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    )
    if not free:
        yield
        return
    loop = asyncio.get_running_loop()
    beat: asyncio.TimerHandle | None = None

    def go_on() -> None:
        nonlocal beat
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        beat = loop.call_later(min(_BEAT_S, limit_s / 2), go_on)

    def late(_: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        if place := place_of(frame):
            raise EnvironmentFailed(
                f"environment {type(environment).__name__}: it has blocked all groups for "
                f"{limit_s:g} s at {place}; wait with await, and give what blocks to "
                "asyncio.to_thread or to a process"
            )

    signal.signal(signal.SIGALRM, late)
    go_on()
    try:
        yield
    finally:
        if beat is not None:
            beat.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

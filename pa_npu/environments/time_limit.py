"""Ends an environment that never returns, or that blocks the event loop in which all groups run.

An environment's own work is what it does while it waits for no answer of the policy. Between two
answers this work may take environment.timeout_s for each of the prompt's samples, and at least a
minute. A blocked event loop cannot check this, so a timer of the process interrupts the code that
blocks it.
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

LEAST_S = 60.0  # enough for a turn of pure Python on a busy machine
_BEAT_S = 1.0
_SLACK_S = 0.01
_END_S = 5.0


async def ended(
    task: asyncio.Future[Any], own_s: float, idle_s: Callable[[], float], subject: str
) -> None:
    """Waits for an environment's rollout. Raises EnvironmentFailed if it takes too long.

    Args:
        task: the rollout.
        own_s: limit of the environment's own work between two answers, at least LEAST_S.
        idle_s: returns the seconds since the environment last waited for an answer of the policy.
        subject: names the environment and the group in the error message.
    """
    limit_s = max(LEAST_S, own_s)
    try:
        while idle_s() < limit_s:
            done, _ = await asyncio.wait([task], timeout=limit_s - idle_s() + _SLACK_S)
            if done:
                return
        raise EnvironmentFailed(
            f"{subject}: it has neither asked the policy nor returned for {limit_s:g} s; end what "
            "it waits for, or raise environment.timeout_s"
        )
    finally:
        await _end(task)


async def _end(task: asyncio.Future[Any]) -> None:
    """Cancels a task and waits for its end, even if this wait is itself cancelled.

    A task that does not end within _END_S is left behind.
    """
    task.cancel()
    deadline_s = time.monotonic() + _END_S
    while not task.done() and (left_s := deadline_s - time.monotonic()) > 0:
        with suppress(asyncio.CancelledError):
            await asyncio.wait([task], timeout=left_s)


@contextmanager
def interrupting(environment: Environment, limit_s: float) -> Iterator[None]:
    """Raises EnvironmentFailed inside the environment's code if it blocks the loop for limit_s.

    Does nothing outside of the main thread, which alone handles signals, or if SIGALRM is in use.
    """
    can_use_timer = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    )
    if not can_use_timer:
        yield
        return
    loop = asyncio.get_running_loop()
    beat: asyncio.TimerHandle | None = None

    def restart_timer() -> None:
        nonlocal beat
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        beat = loop.call_later(min(_BEAT_S, limit_s / 2), restart_timer)

    def interrupt(_: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        place = place_of(frame)
        if place:
            raise EnvironmentFailed(
                f"environment {type(environment).__name__}: it has blocked all groups for "
                f"{limit_s:g} s at {place}; wait with await, and give what blocks to "
                "asyncio.to_thread or to a process"
            )

    signal.signal(signal.SIGALRM, interrupt)
    restart_timer()
    try:
        yield
    finally:
        if beat is not None:
            beat.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

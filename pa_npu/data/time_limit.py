"""A time limit on code of somebody else that runs here, such as a chat template that loops."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TimeLimitReached(BaseException):
    """Not an Exception, so that what is interrupted does not take it for one of its own."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeLimitReached in the block after so many seconds of it.

    With a signal, which only the main thread can receive: in another thread there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_signal: int, _frame: FrameType | None) -> None:
        raise TimeLimitReached

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

"""Limits of time and memory on code of somebody else that runs here, such as a chat template that loops or grows."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_AGAIN_S = 0.1


class TimeLimitReached(BaseException):
    """Raised when a time limit is reached. It is no Exception, so that the code that is interrupted
    does not catch it as one of its own.
    """


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeLimitReached in the block after so many seconds of processor time, which a busy
    machine does not use up.

    It raises again and again: Python drops what is raised inside a finalizer or a callback of its
    garbage collector. With a signal, which only the main thread can receive: in another thread
    there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_signal: int, _frame: FrameType | None) -> None:
        raise TimeLimitReached

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Lets the process have so many bytes of address space more than it has; what wants more raises
    MemoryError in the block.

    The limit is the whole process's: other threads share it as long as the block lasts. Costs about
    10 us.
    """
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _address_space() + num_bytes
    for lower in (before, hard):
        if lower != resource.RLIM_INFINITY:
            limit = min(limit, lower)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_bytes().split(None, 1)[0])
    return pages * resource.getpagesize()

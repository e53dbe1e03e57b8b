"""Puts a deadline on the import of users' modules.

A module whose import never ends is named in one line within seconds. One that is slow but makes
progress is waited for. The system itself ends a process whose import computes in one call of C, in
which no thread of Python runs (ENDED_BY).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

PATIENCE_S = (20.0, 60.0)
"""Seconds without a new module after which an import is given up.

First: of the wall clock, with hardly any processor time, since it waits for something. Second: of
processor time.
"""
ENDED_BY = signal.SIGPROF
"""Ends a process whose import has computed for much longer than it may."""
_MUCH_LONGER = 1.25  # times as long, since the thread's message is the better one
_HARDLY_ANY = 0.05  # of a processor
_STEP_S = 0.25


@contextmanager
def watched(
    name: str, patience_s: Sequence[float], give_up: Callable[[str], None]
) -> Iterator[None]:
    """Ends the process if what the block imports makes no progress.

    Args:
        name: the function whose module is imported, for the message.
        patience_s: PATIENCE_S.
        give_up: called with the reason in one line, just before the process ends.
    """
    done = threading.Event()

    def watch() -> None:
        progress = _Progress(*patience_s)
        modules = len(sys.modules)
        while not done.wait(_STEP_S):
            if len(sys.modules) != modules:
                modules = len(sys.modules)
                _limit_processor_time(_MUCH_LONGER * patience_s[1])
            if reason := progress.stands_still():
                give_up(refusal(name, reason))
                os._exit(1)

    handler = signal.signal(ENDED_BY, signal.SIG_DFL) or signal.SIG_DFL
    _limit_processor_time(_MUCH_LONGER * patience_s[1])
    threading.Thread(target=watch, name="import-deadline", daemon=True).start()
    try:
        yield
    finally:
        done.set()
        _limit_processor_time(0)
        signal.signal(ENDED_BY, handler)


def refusal(name: str, reason: str) -> str:
    """Returns the line about a module whose import stands still."""
    return (
        f"reward.functions: {name} cannot be imported: its module {reason}; import nothing that "
        "waits or computes for long (put it into the function, or a cache in front of it)"
    )


def _limit_processor_time(seconds: float) -> None:
    """Lets ENDED_BY come after so much further processor time of this process; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def computed_for(seconds: float) -> str:
    return f"has computed for {seconds:g} s without an end"


class _Progress:
    """The time of the last new module, by wall clock and by processor time."""

    def __init__(self, waiting_s: float, computing_s: float) -> None:
        self._waiting_s = waiting_s
        self._computing_s = computing_s
        self._num_modules = len(sys.modules)
        self._since_s = time.monotonic()
        self._computed_s = time.process_time()

    def stands_still(self) -> str:
        """Returns why the import will hardly end; empty while it makes progress."""
        now_s = time.monotonic()
        computed_s = time.process_time()
        if len(sys.modules) != self._num_modules:
            self._num_modules = len(sys.modules)
            self._since_s = now_s
            self._computed_s = computed_s
            return ""
        waited_s = now_s - self._since_s
        busy_s = computed_s - self._computed_s
        if busy_s >= self._computing_s:
            return computed_for(self._computing_s)
        if waited_s >= self._waiting_s and busy_s < _HARDLY_ANY * waited_s:
            return f"has waited for {self._waiting_s:g} s without an end"
        return ""

"""Puts a deadline on the import of users' modules.

A module whose import never ends is named in one line within seconds. One that is slow but makes
progress is waited for.
"""

from __future__ import annotations

import os
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
        while not done.wait(_STEP_S):
            if reason := progress.stands_still():
                give_up(
                    f"reward.functions: {name} cannot be imported: its module {reason}; import "
                    "nothing that waits or computes for long (put it into the function, or a cache "
                    "in front of it)"
                )
                os._exit(1)

    threading.Thread(target=watch, name="import-deadline", daemon=True).start()
    try:
        yield
    finally:
        done.set()


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
            return f"has computed for {self._computing_s:g} s without an end"
        if waited_s >= self._waiting_s and busy_s < _HARDLY_ANY * waited_s:
            return f"has waited for {self._waiting_s:g} s without an end"
        return ""

"""The deadline of importing users' modules.

One whose import never ends is named in one line within seconds; one that is slow but goes on is
waited for.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

PATIENCE_S = (20.0, 60.0)
"""Without a new module: wall clock with hardly any processor time, since it waits for something;
and processor time.
"""
_HARDLY_ANY = 0.05  # of a processor
_STEP_S = 0.25


@contextmanager
def watched(
    name: str, patience_s: Sequence[float], give_up: Callable[[str], None]
) -> Iterator[None]:
    """Watches what the block imports, and ends the process where that stands still.

    Args:
        name: of the function whose module is imported, for the message.
        patience_s: PATIENCE_S.
        give_up: gets the reason in one line, just before the process ends.
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
    """When the last new module came, by wall clock and by processor time."""

    def __init__(self, waiting_s: float, computing_s: float) -> None:
        self._waiting_s, self._computing_s = waiting_s, computing_s
        self._num_modules = len(sys.modules)
        self._since_s, self._computed_s = time.monotonic(), time.process_time()

    def stands_still(self) -> str:
        """Returns why it will hardly end; empty while it goes on."""
        now_s, computed_s = time.monotonic(), time.process_time()
        if len(sys.modules) != self._num_modules:
            self._num_modules, self._since_s, self._computed_s = len(sys.modules), now_s, computed_s
            return ""
        waited_s, own_s = now_s - self._since_s, computed_s - self._computed_s
        if own_s >= self._computing_s:
            return f"has computed for {self._computing_s:g} s without an end"
        if waited_s >= self._waiting_s and own_s < _HARDLY_ANY * waited_s:
            return f"has waited for {self._waiting_s:g} s without an end"
        return ""

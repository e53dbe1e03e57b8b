"""Time in which processes could run: the wall clock without what they waited for a processor, so that others take nothing of it.

    limit = TimeLimit(root, limit_s)          begins now, for a process and all that it has started
    limit.is_over()                           asked every limit.look_again_s() seconds

The kernel counts for each thread how long it was ready and had no processor (schedstat, Linux). A
function that sleeps or hangs is never ready, so its time is that of the clock. Whatever waits
longer than STARVED_FACTOR times its limit has reached it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

from pa_npu.config.sections.rollout import STARVED_FACTOR
from pa_npu.control.keeper import descendants

_LONGEST_LOOK_S = 1.0
_LOOKS = 10  # of a short limit, so that a tenth of it at most is counted by the clock alone


class TimeLimit:
    """A limit on the time in which a process and its descendants could run.

    Args:
        root: id of the process.
        limit_s: what they have, from now on.
        longest_s: of wall clock; None for STARVED_FACTOR times the limit.
        waits: returns nanoseconds that each thread has waited for a processor; for tests.
    """

    def __init__(
        self,
        root: int,
        limit_s: float,
        longest_s: float | None = None,
        *,
        waits: Callable[[int], dict[str, int]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root = root
        self._limit_s = limit_s
        self._longest_s = STARVED_FACTOR * limit_s if longest_s is None else longest_s
        self._read_waits = waits or waits_of
        self._clock = clock
        self._began = self._looked = clock()
        self._counted_s = 0.0
        # read at the first look, since most that is limited ends before
        self._waits: dict[str, int] | None = None

    def is_over(self) -> bool:
        """Looks at the processes, and returns whether the limit is reached."""
        now = self._clock()
        waits = self._read_waits(self._root)
        longest_wait_s = 0.0
        if self._waits is not None:
            grown = (waited - self._waits.get(thread, 0) for thread, waited in waits.items())
            longest_wait_s = max(grown, default=0) / 1e9
        interval_s = now - self._looked
        self._counted_s += interval_s - min(interval_s, max(0.0, longest_wait_s))
        self._waits, self._looked = waits, now
        return self._counted_s >= self._limit_s or now - self._began >= self._longest_s

    def look_again_s(self) -> float:
        """Returns after how many seconds the limit may be reached, or the processes have to be
        looked at again.
        """
        look_s = min(_LONGEST_LOOK_S, self._limit_s / _LOOKS)
        left_s = min(self._limit_s - self._counted_s, self._began + self._longest_s - self._looked)
        # not ever shorter, where half of the time that is left is waited for a processor again and
        # again
        return min(look_s, max(left_s, look_s / _LOOKS))


def waits_of(root: int) -> dict[str, int]:
    """Returns the nanoseconds that each thread of a process and of its descendants has waited for a
    processor.

    Empty where the kernel does not say.
    """
    waits: dict[str, int] = {}
    for pid in (root, *descendants(root)):
        for thread in _threads(pid):
            with (
                contextlib.suppress(OSError, ValueError, IndexError),
                open(f"{thread}/schedstat", "rb") as file,
            ):
                waits[thread] = int(file.read().split()[1])
    return waits


def _threads(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            yield f"/proc/{pid}/task/{thread}"

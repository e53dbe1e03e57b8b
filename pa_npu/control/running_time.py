"""Limits the time of processes without counting the time in which they waited for a processor.

    limit = TimeLimit(root, limit_s)          begins now, for a process and all its descendants
    limit.is_over()                           has to be called every limit.look_again_s() seconds

The kernel counts for each thread how long it was ready and had no processor (schedstat, Linux).
Other processes on the machine therefore take nothing from the limit. A function that sleeps or
hangs is never ready, so all its time counts. The limit is also reached after STARVED_FACTOR times
its length of wall clock.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

from pa_npu.config.sections.reward import STARVED_FACTOR
from pa_npu.control.keeper import descendants

_LONGEST_LOOK_S = 1.0
_LOOKS = 10  # looks during a short limit; at most a tenth of it is counted by the clock alone


class TimeLimit:
    """A limit on the time in which a process and its descendants could run.

    Args:
        root: id of the process.
        limit_s: the limit, from now on.
        longest_s: limit of wall clock; None stands for STARVED_FACTOR times limit_s.
        waits: returns the nanoseconds that each thread of a process has waited for a processor; a
            test may replace it.
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
        # read at the first look, because most limited work ends before
        self._waits: dict[str, int] | None = None

    def is_over(self) -> bool:
        """Looks at the processes, and returns whether the limit is reached."""
        now = self._clock()
        waits = self._read_waits(self._root)
        longest_wait_s = 0.0
        if self._waits is not None:
            new_waits = (waited - self._waits.get(thread, 0) for thread, waited in waits.items())
            longest_wait_s = max(new_waits, default=0) / 1e9
        interval_s = now - self._looked
        self._counted_s += interval_s - min(interval_s, max(0.0, longest_wait_s))
        self._waits = waits
        self._looked = now
        return self._counted_s >= self._limit_s or now - self._began >= self._longest_s

    def look_again_s(self) -> float:
        """Returns after how many seconds `is_over` has to be called again."""
        look_s = min(_LONGEST_LOOK_S, self._limit_s / _LOOKS)
        left_s = min(self._limit_s - self._counted_s, self._began + self._longest_s - self._looked)
        # a lower bound, or looks would become ever shorter if the processes hardly run
        return min(look_s, max(left_s, look_s / _LOOKS))


def waits_of(root: int) -> dict[str, int]:
    """Returns for each thread of a process and its descendants how long it waited for a processor.

    The times are in nanoseconds. The result is empty if the kernel does not count them.
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

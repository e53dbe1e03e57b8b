"""A device that takes as long as asked and no core.

Where a machine has fewer cores than a run has processes, these take each other's time, and no
measurement tells that from the schedule's. On paced devices vLLM schedules, samples and loads
weights, and Megatron trains, a model so small that either takes a fraction of a core; each decode
step and each microbatch then lasts as long as a device of the given speed would need, by sleeping
for the rest of it. Everything else is a run's. `engine.py` and `trainer.py` say how a run is given
them.

A device that goes on with what it has works without a gap: what vLLM does between two steps, and
Megatron between two microbatches, happens beside it, as on devices that compute by themselves.
"""

from __future__ import annotations

import time


class Device:
    """The clock of one."""

    def __init__(self) -> None:
        self._free_s = 0.0

    def begins(self, goes_on: bool) -> float:
        """Now, or when the work before ended if it goes on."""
        return self._free_s if goes_on else time.monotonic()

    def ends(self, begin_s: float, seconds: float) -> None:
        """Returns when `seconds` have passed since begin_s, or at once where more have."""
        now = time.monotonic()
        self._free_s = max(begin_s + seconds, now)
        time.sleep(self._free_s - now)

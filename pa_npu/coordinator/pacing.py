"""Follows an iteration's schedule in real time: waits for the turn of the next group, and says what windows engines have."""

from __future__ import annotations

import asyncio
import math
import time

from pa_npu.coordinator.variants import Variant
from pa_npu.dispatch.schedule import Dispatching, Schedule
from pa_npu.engines.pool import Lease


class Pace(Variant):
    """One iteration, from its construction on. `before_admit` and `admitted` are for one task; the others for any."""

    def __init__(self, schedule: Schedule, num_engines: int) -> None:
        self.schedule = schedule
        self._dispatching = Dispatching(schedule, num_engines)
        self._left = list(schedule.order) if schedule.reach is not None else []
        self._start_s = time.perf_counter()
        self._completed = asyncio.Event()

    async def before_admit(self) -> None:
        """Wait until the next group may be dispatched, if an engine has room.

        Groups in flight end by their own deadlines, and with none in flight the next one may go, so this wait has an end too.
        """
        while True:
            self._completed.clear()
            wait_s = self._dispatching.ready_at() - self._now_s()
            if wait_s <= 0:
                return
            try:
                await asyncio.wait_for(self._completed.wait(), None if wait_s == math.inf else wait_s)
            except asyncio.TimeoutError:
                return

    def index(self, number: int) -> int:
        """Returns the index of the number-th group that goes, if known before its engine is. Beyond the order it is `number`."""
        if number >= len(self.schedule.order):
            return number
        return self._left[0] if self._left else self.schedule.order[number]

    def taken_by(self, engine: str) -> int | None:
        """The index that goes to this engine instead of `index`, which is not asked for again; None: that one."""
        if self.schedule.reach is None or not self._left:
            return None
        return self._left.pop(self.schedule.reach.place(engine, self._left, self._now_s()))

    def admitted(self, lease: Lease) -> None:
        """The next group has been given to an engine."""
        self._dispatching.dispatched()

    def generated(self, lease: Lease) -> None:
        """The last response of a group is there, which had this engine at last."""
        self._dispatching.completed(self._now_s())
        self._completed.set()

    def window(self, engine: str) -> int:
        """Sequences that the engine may have in flight now."""
        return self._dispatching.window(engine)

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s

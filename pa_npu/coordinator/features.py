"""The named points of producing an iteration, which a feature overrides where it takes part; the producer has them in a table.

A run that does not use a feature has no object of it: assembly.py decides, and nothing on the main
path asks. Two stand here, because every iteration has them: AdmissionPace follows its schedule,
IdleTailMeter says how much of the engines was idle at its end.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pa_npu.coordinator.episode import ScoredGroup
from pa_npu.dispatch.schedule import Dispatching, Schedule
from pa_npu.engines.pool import EnginePool, Lease
from pa_npu.samples.group import Group


class Feature:
    """Takes a feature's part in producing. Every point of this class does nothing."""

    async def before_admit(self) -> None:
        """Is awaited before a group asks for room on an engine.

        A wait holds back all further groups, and needs a deadline.
        """

    def admitted(self, lease: Lease, index: int) -> None:
        """Is called when a group has room on an engine. index: its dispatch index."""

    def nothing_left(self) -> None:
        """Is called when no group is left, or none can be admitted before another one is scored."""

    def generated(self, lease: Lease) -> None:
        """Is called when all samples of a group are there; it ended under `lease`."""

    def scored(self, index: int, group: ScoredGroup) -> None:
        """Is called when a group has its rewards, whether it is trained or not."""

    def delivered(self, group: Group, scored: ScoredGroup) -> None:
        """Is called when a group is in the buffer."""

    def all_dispatched(self) -> None:
        """Is called when engines have had every group that the iteration began with."""


class HookPoints:
    """Lists, for each point, the methods of one iteration's features that do something there."""

    def __init__(self, features: Sequence[Feature]) -> None:
        def at(point: str) -> list[Any]:
            methods = []
            for feature in features:
                is_overridden = getattr(type(feature), point) is not getattr(Feature, point)
                if is_overridden:
                    methods.append(getattr(feature, point))
            return methods

        self.before_admit: list[Callable[[], Awaitable[None]]] = at("before_admit")
        self.admitted: list[Callable[[Lease, int], None]] = at("admitted")
        self.nothing_left: list[Callable[[], None]] = at("nothing_left")
        self.generated: list[Callable[[Lease], None]] = at("generated")
        self.scored: list[Callable[[int, ScoredGroup], None]] = at("scored")
        self.delivered: list[Callable[[Group, ScoredGroup], None]] = at("delivered")
        self.all_dispatched: list[Callable[[], None]] = at("all_dispatched")


class AdmissionPace(Feature):
    """Follows one iteration's schedule in real time, from its construction on.

    `before_admit` and `admitted` are for one task; the others for any.
    """

    def __init__(self, schedule: Schedule, num_engines: int) -> None:
        self.schedule = schedule
        self._dispatching = Dispatching(schedule, num_engines)
        self._left = list(schedule.order) if schedule.slow_engine_limit is not None else []
        self._start_s = time.perf_counter()
        self._completed = asyncio.Event()

    async def before_admit(self) -> None:
        """Waits until the next group may be dispatched, if an engine has room.

        Groups in flight end by their own deadlines, and with none in flight the next one may go, so
        this wait has an end too.
        """
        while True:
            self._completed.clear()
            wait_s = self._dispatching.ready_at() - self._now_s()
            if wait_s <= 0:
                return
            try:
                await asyncio.wait_for(
                    self._completed.wait(), None if wait_s == math.inf else wait_s
                )
            except asyncio.TimeoutError:
                return

    def index(self, number: int) -> int:
        """Returns the index of the number-th group that goes, if known before its engine is.

        Beyond the order it is `number`.
        """
        if number >= len(self.schedule.order):
            return number
        return self._left[0] if self._left else self.schedule.order[number]

    def taken_by(self, engine: str) -> int | None:
        """Returns the index of the group that goes to this engine in place of the next one in
        order; None: the next one in order.
        """
        if self.schedule.slow_engine_limit is None or not self._left:
            return None
        return self._left.pop(
            self.schedule.slow_engine_limit.place(engine, self._left, self._now_s())
        )

    def admitted(self, lease: Lease, index: int) -> None:
        """Notes that the next group has been given to an engine."""
        self._dispatching.note_dispatched()

    def generated(self, lease: Lease) -> None:
        """Notes that a group's last response is there; it came from this engine."""
        self._dispatching.note_completed(self._now_s())
        self._completed.set()

    def window(self, engine: str) -> int:
        """Sequences that the engine may have in flight now."""
        return self._dispatching.window(engine)

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s


@dataclass
class _EngineLoad:
    capacity: int = 0
    idle_s: float = 0.0
    idle_sequence_s: float = 0.0
    total_s: float = 0.0


class IdleTailMeter(Feature):
    """Tail waste: how much of the engines' capacity is idle because there is nothing left to
    dispatch.

        tail_waste = sum over engines e of the integral of (C_e - n_e(t)) over the times t at which
        nothing was left to dispatch
                     / sum over engines of C_e * (end of generation - its beginning)

    n_e: sequences in flight on e; C_e: the most that it had in flight in the iteration. Generation
    ends with the last response. The times are those from the last group's dispatch on; with dynamic
    sampling also those in which it is not known whether replacements are needed. A group's
    sequences are in flight until its longest response ends. Longest-first dispatch makes tail waste
    small; what it cannot take away is a window as large as the iteration, where everything is
    dispatched at once.

    While there is something to dispatch, an event costs the same however many engines there are.
    """

    def __init__(self, pool: EnginePool) -> None:
        self.tail_waste = 0.0
        """As of the last response: what comes after it is no generation."""
        self._pool = pool
        self._waits = False
        self._last = pool.use()
        self._engines: defaultdict[str, _EngineLoad] = defaultdict(_EngineLoad)  # seen so far

    def admitted(self, lease: Lease, index: int) -> None:
        """Counts a group that has been given to an engine."""
        engine = lease.engine
        if self._waits or engine.name not in self._last:
            self._advance()
            self._waits = False
        seen = self._engines[engine.name]
        seen.capacity = max(seen.capacity, self._pool.in_flight(engine))

    def nothing_left(self) -> None:
        """Notes that engines have nothing to take until the next dispatch."""
        self._advance()
        self._waits = True

    def generated(self, lease: Lease) -> None:
        """Counts a group whose responses are here."""
        if not self._waits:
            return  # others are to come
        self._advance()
        capacity_s = sum(engine.capacity * engine.total_s for engine in self._engines.values())
        idle_s = sum(e.capacity * e.idle_s - e.idle_sequence_s for e in self._engines.values())
        self.tail_waste = max(0.0, idle_s / capacity_s) if capacity_s else 0.0

    def _advance(self) -> None:
        use = self._pool.use()
        for name in (engine.name for engine in self._pool.engines):
            after = use[name]
            seen = self._engines[name]
            before = self._last.get(name, after)
            seconds = after.updated_s - before.updated_s
            seen.capacity = max(seen.capacity, after.in_flight_sequences)
            seen.total_s += seconds
            if self._waits:
                seen.idle_s += seconds
                seen.idle_sequence_s += after.sequence_seconds - before.sequence_seconds
        self._last = use

"""Tail waste: how much of the engines' capacity is idle because there is nothing left to dispatch.

    tail_waste = sum over engines e of the integral of (C_e - n_e(t)) over the times t at which nothing was left to dispatch
                 / sum over engines of C_e * (end of generation - its beginning)

n_e: sequences in flight on e; C_e: the most that it had in flight in the iteration. Generation ends with the last response. The
times are those from the last group's dispatch on; with dynamic sampling also those in which it is not known whether replacements
are needed. A group's sequences are in flight until its longest response ends. Longest-first dispatch makes tail waste small;
what it cannot take away is a window as large as the iteration, where everything is dispatched at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from pa_npu.coordinator.variants import Variant
from pa_npu.engines.pool import EnginePool, EngineUse, Lease


@dataclass
class _Engine:
    capacity: int = 0
    idle_s: float = 0.0
    idle_sequence_s: float = 0.0
    total_s: float = 0.0


class TailMeter(Variant):
    """Follows one iteration's generation.

    While there is something to dispatch, an event costs the same however many engines there are.
    """

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._waits = False
        self._last = pool.use()
        # seen so far, and as of the last response: what comes after it is no generation
        self._engines: dict[str, _Engine] = {}
        self._tail_waste = 0.0

    def admitted(self, lease: Lease) -> None:
        """A group has been given to an engine."""
        engine = lease.engine
        if self._waits or engine.name not in self._last:
            self._advance()
            self._waits = False
        seen = self._engines.setdefault(engine.name, _Engine())
        seen.capacity = max(seen.capacity, self._pool.in_flight(engine))

    def nothing_left(self) -> None:
        """From here on, until the next dispatch, engines have nothing more to take."""
        self._advance()
        self._waits = True

    def generated(self, lease: Lease) -> None:
        """A group's responses are here."""
        if not self._waits:
            return  # others are to come
        self._advance()
        capacity_s = sum(engine.capacity * engine.total_s for engine in self._engines.values())
        idle_s = sum(e.capacity * e.idle_s - e.idle_sequence_s for e in self._engines.values())
        self._tail_waste = max(0.0, idle_s / capacity_s) if capacity_s else 0.0

    @property
    def tail_waste(self) -> float:
        """As of the last response."""
        return self._tail_waste

    def _advance(self) -> None:
        use = self._pool.use()
        for engine in self._pool.engines:
            self._advance_engine(engine.name, self._last.get(engine.name, use[engine.name]), use[engine.name])
        self._last = use

    def _advance_engine(self, name: str, before: EngineUse, after: EngineUse) -> None:
        engine = self._engines.setdefault(name, _Engine())
        engine.capacity = max(engine.capacity, after.in_flight_sequences)
        engine.total_s += after.updated_s - before.updated_s
        if self._waits:
            engine.idle_s += after.updated_s - before.updated_s
            engine.idle_sequence_s += after.sequence_seconds - before.sequence_seconds

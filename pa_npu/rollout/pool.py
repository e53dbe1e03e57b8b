"""EnginePool: chooses an engine for every group, bounds what is in flight, and counts what each engine did.

Admission is asked for in dispatch order by one task (the producer, or the evaluation), and returns a lease on the engine with the
fewest in-flight tokens among those with room in their window. Whoever holds the lease sends the request and closes it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pa_npu.errors import DeadlineExceeded
from pa_npu.rollout.protocol import RolloutEngine
from pa_npu.rollout.tasks import gather

T = TypeVar("T")


@dataclass
class EngineUse:
    """What one engine has in flight and has done. Totals only grow; callers take differences."""

    in_flight_sequences: int = 0
    in_flight_tokens: int = 0
    requests: int = 0
    tokens: int = 0
    """Response tokens received."""
    sequence_seconds: float = 0.0
    """Integral of in_flight_sequences over time."""
    busy_s: float = 0.0
    """Time with anything in flight."""
    updated_s: float = field(default_factory=time.perf_counter)

    def advance(self, sequences: int = 0, tokens: int = 0) -> None:
        """Account for the time since the last change, then change what is in flight."""
        now_s = time.perf_counter()
        elapsed_s = now_s - self.updated_s
        self.sequence_seconds += elapsed_s * self.in_flight_sequences
        self.busy_s += elapsed_s if self.in_flight_sequences else 0.0
        self.in_flight_sequences += sequences
        self.in_flight_tokens += tokens
        self.updated_s = now_s


class Lease:
    """Room for some sequences on one engine, from admission to `close` (or the end of its `with` block)."""

    def __init__(self, pool: EnginePool, engine: RolloutEngine, use: EngineUse, sequences: int, tokens: int) -> None:
        self.engine = engine
        self._pool = pool
        self._use = use
        self._sequences = sequences
        self._tokens = tokens
        use.advance(sequences, tokens)
        self._start = (use.updated_s, use.sequence_seconds)
        self._closed = False
        self.duration_s = 0.0
        self.in_flight_mean = 0.0
        """Sequences in flight on this engine, averaged over the lease."""

    def close(self, response_tokens: int = 0) -> None:
        """Give the room back; response_tokens were received. Further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        use = self._use
        use.advance(-self._sequences, -self._tokens)
        use.requests += 1
        use.tokens += response_tokens
        start_s, start_integral = self._start
        self.duration_s = use.updated_s - start_s
        self.in_flight_mean = (
            (use.sequence_seconds - start_integral) / self.duration_s if self.duration_s else self._sequences
        )
        self._pool._room.set()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class EnginePool:
    """Several engines as one. Owns the clients: close it, or use `async with`."""

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        if not engines:
            raise ValueError("engines: an empty pool can generate nothing")
        self.engines = tuple(engines)
        self._uses = {engine.name: EngineUse() for engine in engines}
        if len(self._uses) != len(engines):
            raise ValueError(f"engines: names must differ, found {[engine.name for engine in engines]}")
        self._room = asyncio.Event()

    async def __aenter__(self) -> EnginePool:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self.engines))

    async def admit(self, sequences: int, tokens: int, window: Callable[[], int], deadline_s: float) -> Lease:
        """Wait until an engine has room for `sequences` more, of about `tokens` together, and take it.

        window: the largest number of sequences in flight per engine, asked anew whenever room appears; an idle engine
        takes anything, so that a group larger than the window still runs. Call it from one task only, in dispatch order.
        """
        start_s = time.monotonic()
        while True:
            if (engine := self._with_room(sequences, window())) is not None:
                return Lease(self, engine, self._uses[engine.name], sequences, tokens)
            self._room.clear()
            left_s = deadline_s - (time.monotonic() - start_s)
            try:
                await asyncio.wait_for(self._room.wait(), max(left_s, 0.0))
            except asyncio.TimeoutError:
                raise DeadlineExceeded(
                    f"no room for {sequences} sequences on any of {len(self.engines)} engines within {deadline_s:g} s "
                    f"({self.num_in_flight} in flight, window {window()}); the engines answer nothing, see their logs"
                ) from None

    def _with_room(self, sequences: int, window: int) -> RolloutEngine | None:
        uses = self._uses
        free = [
            engine
            for engine in self.engines
            if uses[engine.name].in_flight_sequences + sequences <= window or not uses[engine.name].in_flight_sequences
        ]
        return min(free, key=lambda engine: uses[engine.name].in_flight_tokens, default=None)

    @property
    def num_in_flight(self) -> int:
        """Sequences in flight on all engines."""
        return sum(use.in_flight_sequences for use in self._uses.values())

    def use(self) -> dict[str, EngineUse]:
        """A copy of the counters by engine name, as of now."""
        for use in self._uses.values():
            use.advance()
        return {name: EngineUse(**vars(use)) for name, use in self._uses.items()}

    async def on_all(self, call: Callable[[RolloutEngine], Awaitable[T]]) -> list[T]:
        """`call` on every engine at the same time; results in engine order, the first failure cancels the others."""
        return await gather([call(engine) for engine in self.engines])

"""EnginePool: chooses an engine for every group, bounds what is in flight, and counts what each engine did.

Admission is asked for in dispatch order by one task (the producer, or the evaluation), and returns
a lease on the engine with the fewest in-flight tokens for its window among those with room
(pa_npu/dispatch/schedule.py). A group's session (group_session.py) sends its requests under the
lease and closes it. What an engine lost while it had it is admitted again, before anything new.
Which engines serve is the fleet's business (membership.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from pa_npu.config.sections.rollout import EngineSettings
from pa_npu.config.words import counted
from pa_npu.control.tasks import gather
from pa_npu.dispatch.schedule import engine_with_room
from pa_npu.engines.device_roles import DeviceRoles
from pa_npu.engines.group_session import Decode
from pa_npu.engines.protocol import EngineError, RolloutEngine
from pa_npu.errors import DeadlineExceeded, PaNpuError

logger = logging.getLogger(__name__)

T = TypeVar("T")
OnLost = Callable[[RolloutEngine, str], Awaitable[None]]
Sleep = Callable[[Collection[int]], Awaitable[None]]

CHANGING = -1
"""The version of an engine that exchanges its weights."""

# Until a request that met an engine just as it handed on is on it too.
_LATE_REQUEST_S = 0.05
_USUAL = EngineSettings(engines=(0,))


@dataclass
class EngineUse:
    """The use of one engine: what it has in flight and has done.

    Totals only grow; callers take differences.
    """

    in_flight_sequences: int = 0
    asked: int = 0
    """Requests on their way."""
    in_flight_tokens: int = 0
    requests: int = 0
    tokens: int = 0
    """Response tokens received."""
    sequence_seconds: float = 0.0
    """Integral of in_flight_sequences over time."""
    busy_s: float = 0.0
    """Time with anything in flight."""
    seat: int | None = None
    """The engine's index, which its successor has too."""
    shared: bool = False
    """Whether the engine is on a trainer's device."""
    settings: EngineSettings = _USUAL
    """The settings particular to it (rollout.engine_settings)."""
    version: int | None = None
    """The weight version that it writes by; None where nobody has said, CHANGING while it changes.
    """
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
    """Room for some sequences on one engine, from admission to `close`."""

    def __init__(
        self, pool: EnginePool, engine: RolloutEngine, use: EngineUse, sequences: int, tokens: int
    ) -> None:
        self.engine = engine
        self.sequences = sequences
        self.tokens = tokens
        self._pool = pool
        self._use = use
        use.advance(sequences, tokens)
        self.start_s = use.updated_s
        self._closed = False
        self.duration_s = 0.0
        self.first: Lease = self
        """The one under which its group began, on this engine or another."""

    def expect(self, tokens: int) -> None:
        """Say how many tokens the lease's sequences are expected to have, where that was not known
        at admission.
        """
        self._use.advance(0, tokens - self.tokens)
        self.tokens = tokens

    def hold(self, sequences: int) -> None:
        """Hold so many sequences from here on, whether there is room or not."""
        self._use.advance(sequences - self.sequences)
        self.sequences = sequences

    def close(self, response_tokens: int = 0) -> None:
        """Give the room back; response_tokens were received. Further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        use = self._use
        use.advance(-self.sequences, -self.tokens)
        use.requests += 1
        use.tokens += response_tokens
        self.duration_s = use.updated_s - self.start_s
        self._pool._room.set()


class EnginePool:
    """Several engines as one. Owns the clients: close it, or use `async with`.

    probe_timeout_s: for an engine that has not answered by a request's deadline to show that it
    works. decode: for the text of responses that several engines wrote. devices: which of their
    devices decode; others get no group.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine] = (),
        probe_timeout_s: float = 60.0,
        decode: Decode | None = None,
    ) -> None:
        self.probe_timeout_s = probe_timeout_s
        self.decode = decode
        self.continues = True
        """Whether every engine goes on with what another one has begun."""
        self._engines = {engine.name: engine for engine in engines}
        self._uses = {engine.name: EngineUse() for engine in engines}
        if len(self._uses) != len(engines):
            raise ValueError(
                f"engines: names must differ, found {[engine.name for engine in engines]}"
            )
        self._serving = set(self._engines)
        self._room = asyncio.Event()
        self.devices = DeviceRoles(self._room.set)
        self._again = 0  # admissions of what was lost that are waiting
        self._open: Counter[int | None] = Counter()  # sessions, by the version that writes for them
        self._failure: PaNpuError | None = None
        self.on_lost: OnLost | None = None
        """Is told of engines that are gone, with the reason."""
        self.on_sleep: Sleep | None = None
        """Puts engines to sleep."""

    async def __aenter__(self) -> EnginePool:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))

    @property
    def engines(self) -> tuple[RolloutEngine, ...]:
        """Those that serve."""
        return tuple(engine for name, engine in self._engines.items() if name in self._serving)

    def add(
        self,
        engine: RolloutEngine,
        *,
        seat: int | None = None,
        shared: bool = False,
        settings: EngineSettings | None = None,
    ) -> None:
        """One more engine; it does not serve yet. Arguments as of EngineUse."""
        self._engines[engine.name] = engine
        use = self._uses.setdefault(engine.name, EngineUse())
        use.seat, use.shared = seat, shared
        if settings is not None:
            use.settings = settings

    async def remove(self, engine: RolloutEngine) -> None:
        """It serves no more and is not counted from here on."""
        self.suspend(engine)
        del self._engines[engine.name]
        await engine.close()

    def serve(self, engine: RolloutEngine, version: int | None = None) -> None:
        """It takes groups from here on. version: by which it writes them."""
        self._serving.add(engine.name)
        self.set_version(engine, version)

    def set_version(self, engine: RolloutEngine, version: int | None) -> None:
        """By which an engine writes from here on; with CHANGING it takes no group that a version
        has to write.
        """
        self._uses[engine.name].version = version
        self._room.set()

    def suspend(self, engine: RolloutEngine) -> None:
        """Admit nothing more to it; what it has in flight goes on."""
        self._serving.discard(engine.name)
        self._room.set()  # where it was the last that writes by a version, later ones may do

    async def report_lost(self, engine: RolloutEngine, reason: str) -> bool:
        """An engine is gone; false where nobody asked to be told."""
        if self.on_lost is None:
            return False
        await self.on_lost(engine, reason)
        return True

    def fail(self, error: PaNpuError) -> None:
        """No engine will ever serve again: every admission raises this."""
        self._failure = error
        self._room.set()

    def in_flight(self, engine: RolloutEngine) -> int:
        """Sequences in flight on one engine."""
        return self._uses[engine.name].in_flight_sequences

    async def admit(
        self,
        sequences: int,
        tokens: int,
        window: Callable[[str], int],
        deadline_s: float,
        *,
        again: bool = False,
        version: int | None = None,
    ) -> Lease:
        """Wait until an engine has room for `sequences` more, of about `tokens` together, and take
        it.

        window: the most sequences in flight on an engine, by its name, asked anew whenever room
        appears; one with a window of its own has no more than that. An idle engine takes anything,
        so that a group larger than the window still runs. version: by which the engine must write;
        None: any. Call it from one task only, in dispatch order; with `again`, for what an engine
        has lost or handed on, from anywhere.
        """
        end_s = time.monotonic() + deadline_s
        self._again += again
        try:
            while True:
                if self._failure is not None:
                    raise self._failure
                found = None
                if again or not self._again:
                    limit = self._own_or(window)
                    found = engine_with_room(self._able(version), sequences, limit)
                if found is not None:
                    use = self._uses[found]
                    if version is not None and use.version not in (None, version):
                        logger.warning(
                            "no engine has weight version %d any more: engine %s writes a group of "
                            "it by version %s, and the run is no longer what it would have been "
                            "undisturbed",
                            version,
                            found,
                            use.version,
                        )
                    return Lease(self, self._engines[found], use, sequences, tokens)
                if (left_s := end_s - time.monotonic()) <= 0:
                    raise DeadlineExceeded(
                        f"no room for {counted(sequences, 'sequence')} on any of "
                        f"{counted(len(self.engines), 'engine')} within {deadline_s:g} s "
                        f"({self.num_in_flight} in flight, {self._windows(window)}); the engines "
                        "answer nothing, see their logs"
                    )
                self._room.clear()
                # asyncio.wait_for makes a task of every wait, and there is one for nearly every
                # group
                at_the_end = asyncio.get_running_loop().call_later(left_s, self._room.set)
                try:
                    await self._room.wait()
                finally:
                    at_the_end.cancel()
        finally:
            self._again -= again
            if again:
                self._room.set()  # for those that had to wait for this one

    def writes_before(self, version: int) -> bool:
        """Whether there are groups that an older version still has to write, or has to write again."""
        is_open = any(
            number and older is not None and older < version for older, number in self._open.items()
        )
        return is_open or self.in_flight_before(version)

    def in_flight_before(self, version: int) -> bool:
        """Whether an engine with an older version has anything in flight."""
        uses = self._uses.values()
        return any(
            use.in_flight_sequences and use.version is not None and use.version < version
            for use in uses
        )

    def _able(self, version: int | None) -> dict[str, EngineUse]:
        """Engines that may take what this version has to write: those that write by it. Where the
        last of these is lost after others have gone on to a later version, the others: what they
        write is fresher, but not what the run would have had."""
        working = [
            engine.name
            for engine in self.engines
            if self.devices.takes_work(self._uses[engine.name].seat)
        ]
        uses = {name: self._uses[name] for name in working}
        if version is None:
            return uses
        held = {name: use for name, use in uses.items() if use.version in (None, version)}
        return held or {
            name: use
            for name, use in uses.items()
            if use.version is not None and use.version > version
        }

    def _own_or(self, window: Callable[[str], int]) -> Callable[[str], int]:
        def limit(name: str) -> int:
            own = self._uses[name].settings.window
            return window(name) if own is None else min(own, window(name))

        return limit

    def _windows(self, window: Callable[[str], int]) -> str:
        limit = self._own_or(window)
        sizes = sorted({limit(engine.name) for engine in self.engines})
        return (
            f"window {' to '.join(str(size) for size in dict.fromkeys([*sizes[:1], *sizes[-1:]]))}"
        )

    @property
    def num_in_flight(self) -> int:
        """Sequences in flight on all engines."""
        return sum(use.in_flight_sequences for use in self._uses.values())

    def use(self) -> dict[str, EngineUse]:
        """A copy of the counters by engine name, as of now."""
        for use in self._uses.values():
            use.advance()
        return {name: EngineUse(**vars(self._uses[name])) for name in self._engines}

    def rests(self, engine: RolloutEngine) -> bool:
        """Returns whether the engine takes nothing because its device has other work."""
        use = self._uses.get(engine.name)
        return use is not None and not self.devices.takes_work(use.seat)

    def by_seat(self) -> dict[int, EngineUse]:
        """Uses of the engines that serve, by index."""
        uses = (self._uses[engine.name] for engine in self.engines)
        return {use.seat: use for use in uses if use.seat is not None}

    def count_open(self, version: int | None, change: int) -> None:
        """A session for which this version writes begins (1) or has ended (-1)."""
        self._open[version] += change
        if change < 0:  # one that begins makes no room, and admission would look for it in vain
            self._room.set()

    @contextmanager
    def asking(self, engine: RolloutEngine) -> Iterator[None]:
        """A request to the engine is on its way."""
        use = self._uses[engine.name]
        use.asked += 1
        try:
            yield
        finally:
            use.asked -= 1
            self._room.set()

    async def hand_on(self, seats: Collection[int], deadline_s: float) -> None:
        """Until nothing is asked of these engines, which rest: where engines continue each other's
        responses, they end theirs as they stand, else they finish them. One that fails is lost:
        what it had begins again elsewhere."""

        async def empty(engine: RolloutEngine) -> None:
            # a request that was on its way when the engine handed on is handed on in the next turn
            use, is_lost = self._uses[engine.name], False
            while use.asked:
                if self.continues and not is_lost:
                    try:
                        await engine.hand_on(deadline_s=deadline_s)
                    except (EngineError, DeadlineExceeded) as error:
                        is_lost = True
                        if not await self.report_lost(engine, str(error)):
                            raise
                again = asyncio.get_running_loop().call_later(_LATE_REQUEST_S, self._room.set)
                self._room.clear()
                await self._room.wait()
                again.cancel()

        engines = [
            engine for engine in self._engines.values() if self._uses[engine.name].seat in seats
        ]
        await gather([empty(engine) for engine in engines])

    async def sleep(self, seats: Collection[int] | None = None) -> None:
        """Engines with these indices, which have nothing in flight, give their memory back until a
        publish, where they can.

        None: all on trainers' devices.
        """
        if self.on_sleep is not None:
            shared = {
                use.seat for use in self._uses.values() if use.shared and use.seat is not None
            }
            await self.on_sleep(shared if seats is None else seats)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Until this is so; asked again when a group ends on an engine, and when one serves, is
        lost or changes version.
        """
        while not is_so():
            self._room.clear()
            await self._room.wait()

"""EnginePool: chooses an engine for every group, bounds what is in flight, and counts the work done.

One task (the producer, or the evaluation) asks for admission in dispatch order. Admission returns a
lease on an engine: among those with room, the one with the fewest in-flight tokens for its window
(pa_npu/dispatch/schedule.py). A group's session (group_session.py) sends its requests under the
lease and closes it. Groups that an engine lost are admitted again before anything new. The
membership decides which engines serve (membership.py).
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

# Within this time a request that was on its way to an engine as it cut its responses has arrived.
_LATE_REQUEST_S = 0.05
_USUAL = EngineSettings(engines=(0,))


@dataclass
class EngineUse:
    """The use of one engine: what is in flight on it, and what it has done.

    Totals only grow; callers take differences.
    """

    in_flight_sequences: int = 0
    num_requests_sent: int = 0
    """Requests that are not answered yet."""
    in_flight_tokens: int = 0
    requests: int = 0
    tokens: int = 0
    """Response tokens received."""
    sequence_seconds: float = 0.0
    """Integral of in_flight_sequences over time."""
    busy_s: float = 0.0
    """Time with anything in flight."""
    engine_index: int | None = None
    """The engine's index; its successor has the same."""
    shared: bool = False
    """Whether the engine is on a trainer's device."""
    settings: EngineSettings = _USUAL
    """Its own settings (rollout.engine_settings)."""
    version: int | None = None
    """The weight version that it writes by; CHANGING during an exchange, None if unknown."""
    updated_s: float = field(default_factory=time.perf_counter)

    def advance(self, sequences: int = 0, tokens: int = 0) -> None:
        """Accounts for the time since the last change, then changes what is in flight."""
        now_s = time.perf_counter()
        elapsed_s = now_s - self.updated_s
        self.sequence_seconds += elapsed_s * self.in_flight_sequences
        if self.in_flight_sequences:
            self.busy_s += elapsed_s
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
        """The lease that its group began under, on this engine or another."""

    def expect(self, tokens: int) -> None:
        """Sets the estimate of the group's tokens, once the prompt is known."""
        self._use.advance(0, tokens - self.tokens)
        self.tokens = tokens

    def resize(self, sequences: int) -> None:
        """Sets the number of sequences that the lease has room for, whether there is room or not."""
        self._use.advance(sequences - self.sequences)
        self.sequences = sequences

    def close(self, response_tokens: int = 0) -> None:
        """Gives the room back after `response_tokens` were received; may be called again."""
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

    Args:
        engines: that serve from the start.
        probe_timeout_s: within which an engine that has not answered by a request's deadline must
            show that it works.
        decode: makes the text of responses that several engines wrote.

    `devices` knows which of their devices decode; other devices get no group.
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
        """Whether every engine can continue responses of another one."""
        self._engines = {engine.name: engine for engine in engines}
        self._uses = {engine.name: EngineUse() for engine in engines}
        if len(self._uses) != len(engines):
            raise ValueError(
                f"engines: names must differ, found {[engine.name for engine in engines]}"
            )
        self._serving = set(self._engines)
        self._room = asyncio.Event()
        self.devices = DeviceRoles(self._room.set)
        self._num_again = 0  # waiting admissions of groups that an engine lost
        self._open: Counter[int | None] = Counter()  # sessions, by the version that writes for them
        self._failure: PaNpuError | None = None
        self._on_lost: OnLost | None = None
        self._on_sleep: Sleep | None = None

    def subscribe(self, *, on_lost: OnLost, on_sleep: Sleep | None = None) -> None:
        """Names who replaces engines and puts them to sleep.

        A subscriber needs the pool to be made, so that it cannot be handed to the pool's
        constructor.

        Args:
            on_lost: called for an engine that is gone, with the reason.
            on_sleep: called with the indices of engines that are to sleep.
        """
        self._on_lost = on_lost
        self._on_sleep = on_sleep

    async def __aenter__(self) -> EnginePool:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))

    @property
    def engines(self) -> tuple[RolloutEngine, ...]:
        """The engines that serve."""
        return tuple(engine for name, engine in self._engines.items() if name in self._serving)

    def add(
        self,
        engine: RolloutEngine,
        *,
        engine_index: int | None = None,
        shared: bool = False,
        settings: EngineSettings | None = None,
    ) -> None:
        """Adds an engine, which does not serve yet. Arguments as for EngineUse."""
        self._engines[engine.name] = engine
        use = self._uses.setdefault(engine.name, EngineUse())
        use.engine_index = engine_index
        use.shared = shared
        if settings is not None:
            use.settings = settings

    async def remove(self, engine: RolloutEngine) -> None:
        """Removes an engine, which serves no more."""
        self.suspend(engine)
        del self._engines[engine.name]
        await engine.close()

    def serve(self, engine: RolloutEngine, version: int | None = None) -> None:
        """Lets an engine take groups, and write them by `version`."""
        self._serving.add(engine.name)
        self.set_version(engine, version)

    def set_version(self, engine: RolloutEngine, version: int | None) -> None:
        """Sets the version that an engine writes by.

        With CHANGING it takes no group that has to be written by a particular version.
        """
        self._uses[engine.name].version = version
        self._room.set()

    def suspend(self, engine: RolloutEngine) -> None:
        """Stops admission to an engine; what it has in flight goes on."""
        self._serving.discard(engine.name)
        # If it was the last one that writes by a version, later ones may write its groups.
        self._room.set()

    async def report_lost(self, engine: RolloutEngine, reason: str) -> bool:
        """Reports that an engine is gone; returns False if nobody replaces engines."""
        if self._on_lost is None:
            return False
        await self._on_lost(engine, reason)
        return True

    def fail(self, error: PaNpuError) -> None:
        """Lets every admission raise this error: no engine will ever serve again."""
        self._failure = error
        self._room.set()

    def in_flight(self, engine: RolloutEngine) -> int:
        """Returns the number of sequences in flight on an engine."""
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
        """Waits until an engine has room, and returns a lease on it.

        An idle engine takes anything, so that a group larger than the window still runs. Call it
        from one task only, in dispatch order; with `again` it may be called from anywhere.

        Args:
            sequences: to make room for.
            tokens: about how many they have together.
            window: largest number of sequences in flight on an engine, by its name; called anew
                whenever there may be room. The window of an engine's own settings also bounds it.
            deadline_s: seconds from now; DeadlineExceeded is raised then.
            again: whether an engine has lost or cut these sequences.
            version: weight version that has to write them; None: any.
        """
        end_s = time.monotonic() + deadline_s
        self._num_again += again
        try:
            while True:
                if self._failure is not None:
                    raise self._failure
                name = None
                if again or not self._num_again:
                    limit = self._limited(window)
                    name = engine_with_room(self._able(version), sequences, limit)
                if name is not None:
                    use = self._uses[name]
                    if version is not None and use.version not in (None, version):
                        logger.warning(
                            "no engine has weight version %d any more: engine %s writes a group of "
                            "it by version %s, and the run is no longer what it would have been "
                            "undisturbed",
                            version,
                            name,
                            use.version,
                        )
                    return Lease(self, self._engines[name], use, sequences, tokens)
                if (left_s := end_s - time.monotonic()) <= 0:
                    raise DeadlineExceeded(
                        f"no room for {counted(sequences, 'sequence')} on any of "
                        f"{counted(len(self.engines), 'engine')} within {deadline_s:g} s "
                        f"({self.num_in_flight} in flight, {self._windows(window)}); the engines "
                        "answer nothing, see their logs"
                    )
                self._room.clear()
                # A timer, since asyncio.wait_for makes a task of every wait, and nearly every group
                # waits.
                at_the_end = asyncio.get_running_loop().call_later(left_s, self._room.set)
                try:
                    await self._room.wait()
                finally:
                    at_the_end.cancel()
        finally:
            self._num_again -= again
            if again:
                self._room.set()  # for those that had to wait for this one

    def writes_before(self, version: int) -> bool:
        """Returns whether an older version still has groups to write, or to write again."""
        for older, number in self._open.items():
            if number and older is not None and older < version:
                return True
        return self.in_flight_before(version)

    def in_flight_before(self, version: int) -> bool:
        """Returns whether an engine with an older version has anything in flight."""
        busy = [use.version for use in self._uses.values() if use.in_flight_sequences]
        return any(older is not None and older < version for older in busy)

    def _able(self, version: int | None) -> dict[str, EngineUse]:
        """Returns the engines that may take sequences which this version has to write.

        They write by it. If the last of these is lost after others went on to a later version, the
        others may: what they write is fresher, but not what the run would have had.
        """
        uses = {engine.name: self._uses[engine.name] for engine in self.engines}
        uses = {
            name: use for name, use in uses.items() if self.devices.takes_work(use.engine_index)
        }
        if version is None:
            return uses
        able = {name: use for name, use in uses.items() if use.version in (None, version)}
        if able:
            return able
        return {name: use for name, use in uses.items() if (use.version or 0) > version}

    def _limited(self, window: Callable[[str], int]) -> Callable[[str], int]:
        """Returns `window` bounded by the windows of engines' own settings."""

        def limit(name: str) -> int:
            engine_window = self._uses[name].settings.window
            if engine_window is None:
                return window(name)
            return min(engine_window, window(name))

        return limit

    def _windows(self, window: Callable[[str], int]) -> str:
        limit = self._limited(window)
        sizes = sorted({limit(engine.name) for engine in self.engines})
        if len(sizes) > 1:
            return f"window {sizes[0]} to {sizes[-1]}"
        return f"window {sizes[0] if sizes else ''}"

    @property
    def num_in_flight(self) -> int:
        """Sequences in flight on all engines."""
        return sum(use.in_flight_sequences for use in self._uses.values())

    def use(self) -> dict[str, EngineUse]:
        """Returns a copy of the counters by engine name, as of now."""
        for use in self._uses.values():
            use.advance()
        return {name: EngineUse(**vars(self._uses[name])) for name in self._engines}

    def is_resting(self, engine: RolloutEngine) -> bool:
        """Returns whether an engine takes nothing because its device has other work."""
        use = self._uses.get(engine.name)
        return use is not None and not self.devices.takes_work(use.engine_index)

    def by_seat(self) -> dict[int, EngineUse]:
        """Returns the uses of the engines that serve, by index."""
        uses = (self._uses[engine.name] for engine in self.engines)
        return {use.engine_index: use for use in uses if use.engine_index is not None}

    def count_open(self, version: int | None, change: int) -> None:
        """Counts a session for which this version writes: 1 as it begins, -1 as it ends."""
        self._open[version] += change
        if change < 0:  # a session that begins makes no room
            self._room.set()

    @contextmanager
    def count_request(self, engine: RolloutEngine) -> Iterator[None]:
        """Encloses a request to the engine."""
        use = self._uses[engine.name]
        use.num_requests_sent += 1
        try:
            yield
        finally:
            use.num_requests_sent -= 1
            self._room.set()

    async def vacate(self, engine_indices: Collection[int], deadline_s: float) -> None:
        """Waits until no request is left on these engines, which rest.

        If engines can continue each other's responses, these cut theirs as they stand; else they
        finish them. An engine that fails is lost: its responses begin again elsewhere.
        """

        async def empty(engine: RolloutEngine) -> None:
            # A request that was on its way when the engine cut its responses is cut in the next
            # turn.
            use = self._uses[engine.name]
            is_lost = False
            while use.num_requests_sent:
                if self.continues and not is_lost:
                    try:
                        await engine.cut_responses(deadline_s=deadline_s)
                    except (EngineError, DeadlineExceeded) as error:
                        is_lost = True
                        if not await self.report_lost(engine, str(error)):
                            raise
                again = asyncio.get_running_loop().call_later(_LATE_REQUEST_S, self._room.set)
                self._room.clear()
                await self._room.wait()
                again.cancel()

        engines = [
            engine
            for engine in self._engines.values()
            if self._uses[engine.name].engine_index in engine_indices
        ]
        await gather([empty(engine) for engine in engines])

    async def sleep(self, engine_indices: Collection[int] | None = None) -> None:
        """Lets engines that can sleep give their memory back until a publish.

        `engine_indices`: None: of all on trainers' devices. They have nothing in
        flight.
        """
        if self._on_sleep is None:
            return
        if engine_indices is None:
            uses = self._uses.values()
            engine_indices = {
                use.engine_index for use in uses if use.shared and use.engine_index is not None
            }
        await self._on_sleep(engine_indices)

    async def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Waits until `is_so` returns True.

        It is called again when a group ends on an engine, and when an engine serves, is lost or
        changes its version.
        """
        while not is_so():
            self._room.clear()
            await self._room.wait()

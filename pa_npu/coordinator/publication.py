"""How a weight version comes from the trainers to the engines: one policy per run, called at named points of an iteration.

    policy                engines load version v                                              key
    BlockingPublication   at the border: all at once, and everybody waits                     publish.mode=blocking
    DelayedPublication    into a second buffer while they generate; all swap at the border    publish.mode=delayed
    RollingPublication    the same, but each swaps as soon as it has no group left            publish.mode=rolling
    SkippingPublication   as BlockingPublication; trainers may leave a version out            publish.divergence
    NoPublication         there are no engines (no_publication.py)                            rollout.engines=0

    point            when                                                      who does something there
    cross            the trainers are about to have `version`                  all
    swaps_in_turn    the last iteration before a border is about to begin      rolling
    expect           engines are about to generate; a version may come         delayed, rolling
    close            the run ends, or has failed                               delayed, rolling

Before weights come, everybody else lets go of the engines: evaluations in the background, samples
for other programs, and groups that an older version still writes.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from pa_npu.config.sections.operation import PublishConfig
from pa_npu.control.channel import StoreChannel
from pa_npu.control.milestones import Milestones
from pa_npu.control.tasks import TaskScope, cancel
from pa_npu.coordinator.record import BorderOutcome
from pa_npu.data.prompts import Prompt
from pa_npu.engines.member import Member
from pa_npu.engines.membership import EngineMembership
from pa_npu.engines.pool import EnginePool
from pa_npu.publish.coordinator_side import CoordinatorPublish
from pa_npu.publish.engines_hold import EnginesHold
from pa_npu.publish.messages import READY
from pa_npu.publish.probes import ProbePlan, decides_publishes
from pa_npu.telemetry.timeline import Timeline, now, on_clock

OnCrossed = Callable[[BorderOutcome], Awaitable[None]]
"""Is awaited once all engines hold the version, before anything else happens by it."""


class EngineGuest(Protocol):
    """Uses the engines beside the run's own groups, and lets go of them when weights come."""

    @property
    def is_running(self) -> bool:
        """Returns whether it may have requests in flight."""

    async def make_way(self, version: int) -> None:
        """Ends its requests, because `version` is about to come."""

    def engines_hold(self, version: int) -> None:
        """Learns that engines hold `version` and may be used again."""


class Publication(ABC):
    """The points at which a run's publication takes part in an iteration."""

    CONCURRENT_ITERATIONS: ClassVar[int] = 0
    """How many iterations may begin while an earlier one is still being written."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Returns the version that writes new groups. Defined once the first border has been
        crossed.
        """

    @abstractmethod
    async def cross(
        self, version: int, prompt: Prompt, on_crossed: OnCrossed, scope: TaskScope
    ) -> asyncio.Future[BorderOutcome]:
        """Takes the engines to `version`; returns when new groups may be given to them.

        Args:
            prompt: what engines are probed with, if a probe is due.
            on_crossed: awaited with the outcome, before the returned future has it.
            scope: where a border goes on for which some engines need more time than others.
        """

    def swaps_in_turn(self, version: int) -> bool:
        """Returns whether the border of `version` begins before the groups of all earlier versions
        are written.
        """
        return False

    @abstractmethod
    def expect(self, version: int, crossed: asyncio.Future[BorderOutcome]) -> None:
        """Lets `version` come while engines generate. crossed: the border before it."""

    @abstractmethod
    async def close(self) -> None:
        """Gives up what is under way."""


@dataclass(eq=False, repr=False, kw_only=True)
class BlockingPublication(Publication):
    """Loads every version into all engines between two iterations.

    Args:
        guests: who lets go of the engines before weights come.
        written: waits until all groups of versions before this one are written.
        first: the version that the run begins with.
        startup_timeout_s: how long trainers may take until they send the first version.
        wait_timeout_s: the same of every later version.
        border_timeout_s: how long a border may take.
    """

    channel: StoreChannel
    membership: EngineMembership
    pool: EnginePool
    publish: CoordinatorPublish
    timeline: Timeline
    guests: Sequence[EngineGuest]
    written: Callable[[int], Awaitable[None]]
    probes: ProbePlan
    milestones: Milestones
    first: int
    startup_timeout_s: float
    wait_timeout_s: float
    border_timeout_s: float
    _version: int = field(default=-1, init=False)

    @property
    def version(self) -> int:
        assert self._version >= 0, "no version has been published"
        return self._version

    async def cross(
        self, version: int, prompt: Prompt, on_crossed: OnCrossed, scope: TaskScope
    ) -> asyncio.Future[BorderOutcome]:
        await self._free_engines(version)
        return await self._load(version, prompt, on_crossed)

    def expect(self, version: int, crossed: asyncio.Future[BorderOutcome]) -> None:
        """Does nothing: no version comes while engines generate."""

    async def close(self) -> None:
        """Does nothing: no version is under way between two borders."""

    def is_probed(self, version: int) -> bool:
        """Returns whether engines answer a probe after they have loaded `version`."""
        ends = (self.first, self.milestones.last)
        return version in ends or not self.probes.rides

    async def _free_engines(self, version: int) -> None:
        """Makes the guests let go of the engines.

        Engines that wait inside a load answer nothing, so a guest goes on until trainers are ready.
        """
        for guest in self.guests:
            if guest.is_running:
                await READY.wait_async(self.channel, self._within_s(version), version=version)
                await guest.make_way(version)

    async def _load(
        self, version: int, prompt: Prompt, on_crossed: OnCrossed
    ) -> asyncio.Future[BorderOutcome]:
        """Loads `version` into all engines when the trainers send it."""
        await self.written(version)
        probe_prompt = prompt if self.is_probed(version) else None
        held = await self.publish.publish(version, probe_prompt, self._within_s(version))
        return await ended(self._note_held(version, held), on_crossed)

    def _within_s(self, version: int) -> float:
        """Returns the seconds that the trainers may take until they send `version`."""
        return self.startup_timeout_s if version == self.first else self.wait_timeout_s

    def _note_held(self, version: int, held: EnginesHold) -> BorderOutcome:
        """Notes that all engines hold `version`."""
        # engines were asked before the trainers were ready: that ran while they trained
        self.timeline.complete("publish", on_clock(held.ready_s), now(), version=version)
        self._version = version
        return self._left(held)

    def _left(self, held: EnginesHold) -> BorderOutcome:
        """Tells the guests which version the engines hold, and returns what the border left."""
        for guest in self.guests:
            guest.engines_hold(self.version)
        return BorderOutcome(held, self.pool.use(), self.membership.size)


class SkippingPublication(BlockingPublication):
    """Leaves a version out where the trainers say that the engines' policy is near theirs.

    Then the version that engines hold writes what is due. The trainers decide
    (pa_npu.trainer.publication).
    """

    async def cross(
        self, version: int, prompt: Prompt, on_crossed: OnCrossed, scope: TaskScope
    ) -> asyncio.Future[BorderOutcome]:
        await self._free_engines(version)
        if version == self.first:
            return await self._load(version, prompt, on_crossed)
        ready = await READY.wait_async(self.channel, self._within_s(version), version=version)
        if ready.publishes:
            return await self._load(version, prompt, on_crossed)
        now_s = time.perf_counter()
        unchanged = EnginesHold(
            probe=None, ready_s=now_s, loaded_s=now_s, compared_s=now_s, done_s=now_s
        )
        return await ended(self._left(unchanged), on_crossed)


@dataclass(eq=False, repr=False, kw_only=True)
class DelayedPublication(BlockingPublication):
    """Sends a version while engines generate; they swap to it when all groups are written.

    A version is loaded at the border where it could not be sent: engines died or joined meanwhile.
    So are the first and the last version, whose log-probs are compared (I5).
    """

    _arriving: asyncio.Task[list[Member] | None] | None = field(default=None, init=False)
    _swapping: asyncio.Task[EnginesHold] | None = field(default=None, init=False)

    def is_delayed(self, version: int) -> bool:
        """Returns whether `version` is sent while engines generate."""
        return 0 < version < self.milestones.last

    def is_probed(self, version: int) -> bool:
        delayed = self.is_delayed(version) and version != self.first
        return not delayed and super().is_probed(version)

    async def cross(
        self, version: int, prompt: Prompt, on_crossed: OnCrossed, scope: TaskScope
    ) -> asyncio.Future[BorderOutcome]:
        await self._free_engines(version)
        prepared = await self._prepared()
        if prepared is None:
            return await self._load(version, prompt, on_crossed)
        return await self._swap(version, prepared, on_crossed, scope)

    def expect(self, version: int, crossed: asyncio.Future[BorderOutcome]) -> None:
        """Lets `version` come into the engines' second buffers, once these are free of the version
        before.
        """
        if self.is_delayed(version):
            self._arriving = asyncio.create_task(
                self._arrive(version, crossed), name=f"weight version {version}"
            )

    async def close(self) -> None:
        await cancel([task for task in (self._arriving, self._swapping) if task is not None])

    async def _arrive(
        self, version: int, crossed: asyncio.Future[BorderOutcome]
    ) -> list[Member] | None:
        """Returns the engines that have `version` in their second buffers; see
        CoordinatorPublish.prepare.
        """
        await asyncio.wait({crossed})
        # trainers wait for what is produced meanwhile, and then they train
        within_s = self.border_timeout_s + self.wait_timeout_s
        return await self.publish.prepare(version, within_s)

    async def _prepared(self) -> list[Member] | None:
        """Waits for the version that is on its way; None where it has to be loaded at the border."""
        if self._arriving is None:
            return None
        members = await self._arriving
        self._arriving = None
        return members

    async def _swap(
        self, version: int, prepared: Sequence[Member], on_crossed: OnCrossed, scope: TaskScope
    ) -> asyncio.Future[BorderOutcome]:
        """Swaps all engines to the version that they have prepared."""
        self._start_swap(version, prepared, asyncio.Event())
        return await ended(await self._swapped(version), on_crossed)

    def _start_swap(
        self, version: int, prepared: Sequence[Member], begun: asyncio.Event
    ) -> asyncio.Task[EnginesHold]:
        """Starts the swap. begun: is set when the first engines have swapped."""
        self._swapping = asyncio.create_task(
            self.publish.swap(version, prepared, begun.set),
            name=f"swap to weight version {version}",
        )
        return self._swapping

    async def _swapped(self, version: int) -> BorderOutcome:
        """Waits until all engines have swapped, and all groups of earlier versions are written."""
        assert self._swapping is not None
        held = await self._swapping
        self._swapping = None
        await self.written(version)
        return self._note_held(version, held)


class RollingPublication(DelayedPublication):
    """Lets engines swap one after another, each when it has no group of the version before.

    New groups are given out as soon as one engine has swapped; the border ends when all have. They
    swap together to a version that is saved, or evaluated before anything is produced: for these
    the iteration before has to be complete.
    """

    CONCURRENT_ITERATIONS = 1

    def swaps_in_turn(self, version: int) -> bool:
        is_kept = self.milestones.is_saved(version) or self.milestones.is_evaluated(version)
        return self.is_delayed(version) and not is_kept

    async def _swap(
        self, version: int, prepared: Sequence[Member], on_crossed: OnCrossed, scope: TaskScope
    ) -> asyncio.Future[BorderOutcome]:
        if not self.swaps_in_turn(version):
            return await super()._swap(version, prepared, on_crossed, scope)
        begun = asyncio.Event()
        await _first_of(self._start_swap(version, prepared, begun), begun)
        self._version = version
        crossed: asyncio.Future[BorderOutcome] = asyncio.get_running_loop().create_future()

        async def end() -> None:
            outcome = await self._swapped(version)
            await on_crossed(outcome)
            crossed.set_result(outcome)

        scope.start(end(), f"border of version {version}")
        return crossed


async def ended(outcome: BorderOutcome, on_crossed: OnCrossed) -> asyncio.Future[BorderOutcome]:
    """Ends a border whose engines all hold the version; returns a future that has its outcome."""
    await on_crossed(outcome)
    crossed: asyncio.Future[BorderOutcome] = asyncio.get_running_loop().create_future()
    crossed.set_result(outcome)
    return crossed


def publication_kind(publish: PublishConfig) -> type[BlockingPublication]:
    """Returns the policy that the run's keys ask for."""
    if decides_publishes(publish):
        return SkippingPublication
    kinds: dict[str, type[BlockingPublication]] = {
        "blocking": BlockingPublication,
        "delayed": DelayedPublication,
        "rolling": RollingPublication,
    }
    return kinds[publish.mode]


async def _first_of(task: asyncio.Task[Any], event: asyncio.Event) -> None:
    """Waits until the event is set or the task has ended. Raises what the task raised."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel([waiting])
    if task.done():
        task.result()

"""The iterations that are produced and not trained yet: begun when they are due, told to the trainers, put into checkpoints.

One is produced whole, by the version that engines hold; or until engines have all its groups, which they finish beside the next
border (publish.mode=rolling).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.freshness import Freshness
from pa_npu.control.messages import DATA_POSITION, DISPATCHED, PRODUCED_AHEAD, DataPosition, ProducedAhead
from pa_npu.control.tasks import TaskScope
from pa_npu.coordinator.producer import Producer
from pa_npu.coordinator.production import Produced
from pa_npu.coordinator.updates import Updates
from pa_npu.coordinator.variants import Variant
from pa_npu.data.prompts import Prompt
from pa_npu.data.stream import TrainingStream
from pa_npu.telemetry.timeline import Timeline

# Trainers that cross the border of version v ask for positions from v on, when that of v + max_staleness + 1 may be there already.
_POSITIONS_KEPT = 3


class AllDispatched(Variant):
    """An event that is set when engines have had all groups of an iteration."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def all_dispatched(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        """Each wait for room on an engine has a deadline, and its failure ends this one too."""
        await self._event.wait()


class IterationsAhead:
    """A run's iterations, in order. train: where prompts come from. next: the iteration that is produced next."""

    def __init__(
        self,
        config: Config,
        channel: StoreChannel,
        producer: Producer,
        timeline: Timeline,
        freshness: Freshness,
        updates: Updates,
        train: TrainingStream,
        first: int,
    ) -> None:
        self.next = first
        self._config = config
        self._channel = channel
        self._producer = producer
        self._timeline = timeline
        self._freshness = freshness
        self._updates = updates
        self._train = train
        self._prompts: Sequence[Prompt] = ()  # of the next iteration
        self._produced: dict[int, Produced] = {}  # not trained yet, by iteration
        self._complete: dict[int, asyncio.Event] = {}  # of iterations that are produced beside others

    # what an interrupted run left

    def resume(self, produced: Produced, state: dict[str, Any]) -> None:
        """Take an iteration that was produced before the run was interrupted, and is in the buffer again. In order."""
        self._put_position(produced.iteration)
        self._train.restore(state)
        self._updates.resumed(produced.iteration, len(produced.dispatched.groups))
        self._take(produced)
        self._put_position(produced.iteration + 1)
        self.next = produced.iteration + 1

    # before a border

    def begin(self) -> None:
        """Before the first border: what was resumed is all there is."""
        self._put_position(self.next)

    def draw(self, last: int) -> Prompt:
        """Take the next iteration's prompts, where it is one before `last`; returns one to probe engines with."""
        if self.next < last or not self._prompts:
            self._prompts = self._drawn(self.next)
        return self._prompts[0]

    def prepare(self, last: int) -> asyncio.Task[None] | None:
        """The schedule of the next iteration is chosen while trainers still train."""
        if self.next >= last:
            return None
        preparing = self._producer.prepare(self.next, self._prompts)
        return asyncio.create_task(preparing, name=f"schedule of {self.next}")

    async def written(self, version: int) -> None:
        """Waits until what versions before this one write is complete; of some iterations only the dispatch was waited for."""
        for iteration in [i for i in self._complete if i < version + self._freshness.iterations_ahead]:
            await self._complete.pop(iteration).wait()

    # after it

    async def produce_due(self, version: int, published: int | None, last: int, scope: TaskScope) -> int:
        """Produces all that may be produced while `version` is trained, by the engines' version; returns how many iterations."""
        begun = self.next
        while self.next < last and self._freshness.is_due(self.next, version):
            prompts = self._prompts if self.next == begun else self._drawn(self.next)
            is_last_due = self.next + 1 < last and not self._freshness.is_due(self.next + 1, version)
            self._freshness.check_production(self.next, published)
            # engines that swap in turn begin the next border as soon as they have all groups of this one
            beside = is_last_due and self._config.swaps_in_turn(version + 1)
            await self._produce_next(prompts, published, scope if beside else None)
            self.next += 1
        return self.next - begun

    def end_version(self, version: int) -> None:
        """Saves the next update, once all that is due at this version is produced."""
        self._updates.save(version + 1)

    def trained(self, iteration: int) -> Produced:
        """It is no longer ahead."""
        return self._produced.pop(iteration)

    # producing

    def _drawn(self, iteration: int) -> Sequence[Prompt]:
        return self._train.take(self._updates.num_new(iteration))

    async def _produce_next(self, prompts: Sequence[Prompt], published: int | None, scope: TaskScope | None) -> None:
        """The next iteration by the version that engines hold. scope: finishes it beside whatever comes; None: here."""
        if scope is None:
            with self._timeline.span("produce", iteration=self.next):
                await self._produce(self.next, prompts, published)
            self._put_position(self.next + 1)
            return
        dispatched = AllDispatched()
        self._start(prompts, scope, published, dispatched)
        await dispatched.wait()

    async def _produce(
        self, iteration: int, prompts: Sequence[Prompt], published: int | None, *variants: Variant
    ) -> None:
        choice = self._updates.choose(iteration, prompts)
        produced = await self._producer.produce(iteration, prompts, choice, version=published, variants=variants)
        self._updates.produced(iteration, choice)
        # with what the stream of prompts learns from it and says of it
        self._take(replace(produced, numbers=produced.numbers | self._train.observe(produced.outcomes)))

    def _start(self, prompts: Sequence[Prompt], scope: TaskScope, version: int | None, *variants: Variant) -> None:
        """Produce the next iteration beside whatever comes. version: that writes all of it, if it is one."""
        iteration = self.next
        self._put_position(iteration + 1)
        done = self._complete[iteration] = asyncio.Event()

        async def produce() -> None:
            await self._produce(iteration, prompts, version, *variants)
            done.set()

        scope.start(produce(), f"iteration {iteration}")

    # telling trainers and checkpoints

    def _take(self, produced: Produced) -> None:
        """All of an iteration's groups are in the buffer: for the trainers to check (I2), and to put into checkpoints."""
        iteration = produced.iteration
        self._produced[iteration] = produced
        DISPATCHED.put(self._channel, produced.dispatched, iteration=iteration)
        if self._freshness.max_staleness:
            message = ProducedAhead(produced.numbers, produced.samples)
            PRODUCED_AHEAD.put(self._channel, message, iteration=iteration)

    def _put_position(self, iteration: int) -> None:
        """Which prompts were taken before an iteration, for checkpoints."""
        DATA_POSITION.put(self._channel, DataPosition(self._train.state()), iteration=iteration)
        past = iteration - self._freshness.max_staleness - _POSITIONS_KEPT
        if self._config.data.skip != "none" and past >= 0:  # else they are a few bytes each
            DATA_POSITION.delete(self._channel, iteration=past)

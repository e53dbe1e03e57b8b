"""The iterations that are produced and not trained yet: begun when they are due, told to the trainers, put into checkpoints.

One is produced whole, by the version that engines hold; or beside others, in parts by several versions (schedule.on_publish=
continue), or until engines have all its groups, which they finish beside the next border (publish.swap=rolling).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.freshness import Freshness
from pa_npu.control.messages import (
    CARRIED,
    DATA_POSITION,
    DISPATCHED,
    PRODUCED_AHEAD,
    UPDATE_SIZE,
    WRITTEN_AHEAD,
    CarriedGroups,
    DataPosition,
    ProducedAhead,
    UpdateSize,
    WrittenAhead,
)
from pa_npu.control.tasks import TaskScope
from pa_npu.coordinator.carried import Carried, Share
from pa_npu.coordinator.interruption import Interruptions
from pa_npu.coordinator.producer import Producer
from pa_npu.coordinator.production import Produced
from pa_npu.data.prompts import Prompt
from pa_npu.data.stream import TrainingStream
from pa_npu.dispatch.token_budget import TokenBudget, Update
from pa_npu.errors import InvariantViolation, UserError
from pa_npu.samples.rollout_buffer import RolloutBuffer
from pa_npu.telemetry.timeline import Timeline

# Trainers that cross the border of version v ask for positions from v on, when that of v + max_staleness + 1 may be there already.
_POSITIONS_KEPT = 3


class IterationsAhead:
    """Of one run, in order. train: where prompts come from. next: the iteration that is produced next."""

    def __init__(
        self,
        config: Config,
        channel: StoreChannel,
        producer: Producer,
        buffer: RolloutBuffer,
        timeline: Timeline,
        interruptions: Interruptions | None,
        train: TrainingStream,
        first: int,
    ) -> None:
        self.next = first
        self._config = config
        self._channel = channel
        self._producer = producer
        self._buffer = buffer
        self._timeline = timeline
        self._interruptions = interruptions
        self._train = train
        self._freshness = Freshness(config.schedule.max_staleness, config.iterations_ahead)
        self._prompts: Sequence[Prompt] = ()  # of the next iteration
        self._produced: dict[int, Produced] = {}  # not trained yet, by iteration
        self._complete: dict[int, asyncio.Event] = {}  # of iterations that are produced beside others
        schedule = config.schedule
        self._budget: TokenBudget | None = None
        if schedule.tokens_per_update is not None:
            self._budget = TokenBudget(schedule.tokens_per_update, schedule.prompts_per_iteration, config.data_parallel)
        self._carried: Sequence[Carried] = ()  # to the iteration that is produced next

    # what an interrupted run left

    def resume(self, produced: Produced, state: dict[str, Any]) -> None:
        """Take an iteration that was produced before the run was interrupted, and is in the buffer again. In order."""
        self._put_position(produced.iteration)
        self._train.restore(state)
        if self._budget is not None:
            self._tell_size(produced.iteration, len(produced.dispatched.groups))
        self._take(produced)
        self._put_position(produced.iteration + 1)
        self.next = produced.iteration + 1

    def carry_on(self, groups: Sequence[Carried], group_tokens: float | None) -> None:
        """Take what had been carried when the run was interrupted. group_tokens: TokenBudget's."""
        assert self._budget is not None
        if not self._config.mesh.shares(len(groups)):
            raise UserError(
                f"checkpoint.load: it carries {len(groups)} groups to a later update, which {self._budget.replicas} replicas "
                f"cannot share; continue with as many trainer.devices as before"
            )
        self._carried, self._budget.group_tokens = groups, group_tokens

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
        """The schedule of the next iteration is chosen while trainers still train; not beside responses that go on."""
        if self._interruptions is not None or self.next >= last:
            return None
        preparing = self._producer.prepare(self.next, self._prompts)
        return asyncio.create_task(preparing, name=f"schedule of {self.next}")

    async def written(self, version: int) -> None:
        """Until what versions before this one write is complete; of some iterations only the dispatch was waited for."""
        if self._interruptions is None:
            for iteration in [i for i in self._complete if i < version + self._config.iterations_ahead]:
                await self._complete.pop(iteration).wait()

    # after it

    def published(self, version: int) -> None:
        if self._interruptions is not None:
            self._interruptions.publish(version)

    async def produce_due(self, version: int, published: int | None, last: int, scope: TaskScope) -> int:
        """What may be produced while `version` is trained, by the version that engines have; returns how many iterations."""
        begun = self.next
        while self.next < last and self._freshness.is_due(self.next, version):
            prompts = self._prompts if self.next == begun else self._drawn(self.next)
            is_last_due = self.next + 1 < last and not self._freshness.is_due(self.next + 1, version)
            self._freshness.check_production(self.next, published)
            if self._interruptions is not None:
                self._interruptions.admits()
                self._start(prompts, scope, None, self._interruptions.admitted)
            elif is_last_due and self._config.swaps_in_turn(version + 1):
                dispatched = asyncio.Event()
                self._start(prompts, scope, published, dispatched.set)
                await (
                    dispatched.wait()
                )  # each wait for room on an engine has a deadline, and its failure ends this one too
            else:
                await self._produce(prompts, published)
            self.next += 1
        return self.next - begun

    async def end_version(self, version: int) -> None:
        """What this version may write is written, and the iteration that it trains complete; the next one may be saved."""
        self._put_carried(version + 1)
        if self._interruptions is not None:
            await self._interruptions.quiet()
            await self._complete.pop(version).wait()
            self._put_written(version + 1, self._interruptions)

    def trained(self, iteration: int) -> Produced:
        """It is no longer ahead."""
        return self._produced.pop(iteration)

    # producing

    def _drawn(self, iteration: int) -> Sequence[Prompt]:
        schedule = self._config.schedule
        if self._budget is None:
            return self._train.take(schedule.prompts_per_iteration)
        tokens = [group.tokens for group in self._carried]
        return self._train.take(self._budget.num_new(tokens, is_last=iteration == schedule.iterations - 1))

    async def _produce(self, prompts: Sequence[Prompt], published: int | None) -> None:
        """The next iteration, whole, by the version that engines hold."""
        iteration = self.next
        with self._timeline.span("produce", iteration=iteration):
            share = self._share(iteration, len(prompts))
            produced = await self._producer.produce(
                *(iteration, prompts, lambda: self._train.take(1)[0], share), version=published
            )
        if self._budget is not None and share is not None:
            self._carried = produced.carried
            self._budget.observe(share.update.new_tokens)
        if self._carried and iteration == self._config.schedule.iterations - 1:
            raise InvariantViolation(f"I2 exactly once: {len(self._carried)} groups are left after the last iteration")
        self._take(self._observed(produced))
        self._put_position(iteration + 1)

    def _start(
        self, prompts: Sequence[Prompt], scope: TaskScope, version: int | None, all_dispatched: Callable[[], None]
    ) -> None:
        """Produce the next iteration beside whatever comes. version: that writes all of it, if it is one."""
        iteration = self.next
        self._put_position(iteration + 1)
        done = self._complete[iteration] = asyncio.Event()

        async def produce() -> None:
            produced = await self._producer.produce(iteration, prompts, version=version, all_dispatched=all_dispatched)
            self._take(self._observed(produced))
            done.set()

        scope.start(produce(), f"iteration {iteration}")

    def _share(self, iteration: int, num_new: int) -> Share | None:
        """What an iteration takes of the carried groups and of its own; None where it takes its own."""
        if self._budget is None:
            return None
        is_last = iteration == self._config.schedule.iterations - 1
        due = sum(not self._freshness.holds(iteration + 1, group.version) for group in self._carried)
        tokens = [group.tokens for group in self._carried]
        update = Update(self._budget, tokens, num_new, len(tokens) + num_new if is_last else due)
        return Share(self._carried, update, partial(self._tell_size, iteration))

    def _observed(self, produced: Produced) -> Produced:
        """With what the stream of prompts learns from it and says of it."""
        return replace(produced, numbers=produced.numbers | self._train.observe(produced.outcomes))

    # telling trainers and checkpoints

    def _take(self, produced: Produced) -> None:
        """All of an iteration's groups are in the buffer: for the trainers to check (I2), and to put into checkpoints."""
        iteration = produced.iteration
        self._produced[iteration] = produced
        DISPATCHED.put(self._channel, produced.dispatched, iteration=iteration)
        if self._config.schedule.max_staleness:
            message = ProducedAhead(produced.numbers, produced.samples)
            PRODUCED_AHEAD.put(self._channel, message, iteration=iteration)

    def _tell_size(self, iteration: int, groups: int) -> None:
        size = UpdateSize(self._config.mesh.per_replica(groups))
        UPDATE_SIZE.put(self._channel, size, iteration=iteration)

    def _put_position(self, iteration: int) -> None:
        """Which prompts were taken before an iteration, for checkpoints."""
        DATA_POSITION.put(self._channel, DataPosition(self._train.state()), iteration=iteration)
        past = iteration - self._config.schedule.max_staleness - _POSITIONS_KEPT
        if self._config.data.skip != "none" and past >= 0:  # else they are a few bytes each
            DATA_POSITION.delete(self._channel, iteration=past)

    def _put_carried(self, version: int) -> None:
        """Before `version` is saved: what no update until then trains, and no iteration that is produced until then."""
        if self._budget is None or not self._config.saves(version) or version >= self._config.schedule.iterations:
            return
        iteration = min(version + self._config.iterations_ahead, self._config.schedule.iterations)
        buffer = self._buffer.written(version)
        for index, group in enumerate(self._carried):
            buffer.put(group.group(iteration, index), 0, index)
        told = [group.told() for group in self._carried]
        CARRIED.put(self._channel, CarriedGroups(iteration, told, self._budget.group_tokens), version=version)

    def _put_written(self, version: int, interruptions: Interruptions) -> None:
        """Before `version` is saved: the parts of responses that it goes on with."""
        schedule = self._config.schedule
        if not self._config.saves(version) or version >= schedule.iterations:
            return
        iterations = list(range(version, min(version + schedule.max_staleness, schedule.iterations)))
        buffer = self._buffer.written(version)
        for iteration in iterations:
            for group in interruptions.so_far(iteration):
                buffer.put(group, 0, group.index)
        message = WrittenAhead(iterations, schedule.prompts_per_iteration)
        WRITTEN_AHEAD.put(self._channel, message, version=version)

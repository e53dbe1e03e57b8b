"""The iterations that are produced and not trained yet: begun when due, told to trainers, kept in and taken from checkpoints.

One is produced whole, by the version that engines hold; or, where engines swap one after another,
until they have all its groups, which they finish in the background (Publication.swaps_in_turn).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pa_npu.checkpoints.ahead import AheadIteration, read_ahead
from pa_npu.checkpoints.directories import read_meta
from pa_npu.checkpoints.provenance import Change, change_of, differences
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.freshness import Freshness
from pa_npu.control.messages import (
    CARRIED_KEY,
    DATA_POSITION,
    DISPATCHED,
    PRODUCED_AHEAD,
    DataPosition,
    Dispatched,
    DispatchedGroup,
    ProducedAhead,
)
from pa_npu.control.tasks import TaskScope
from pa_npu.coordinator.delivery import Produced
from pa_npu.coordinator.episode import ScoredGroup
from pa_npu.coordinator.features import Feature
from pa_npu.coordinator.producer import Producer
from pa_npu.coordinator.publication import Publication
from pa_npu.coordinator.token_budget import restored
from pa_npu.coordinator.updates import Updates
from pa_npu.data.prompts import Prompt
from pa_npu.data.row_stream import RowGroupStream
from pa_npu.data.stream import TrainingStream
from pa_npu.errors import DataError
from pa_npu.samples.columns import NONE, RunColumns
from pa_npu.samples.group_digest import content_digest, digest_group
from pa_npu.samples.notice import is_notice, read_notice
from pa_npu.samples.rollout_buffer import RolloutBuffer
from pa_npu.samples.wire import from_bytes
from pa_npu.telemetry.timeline import Timeline

logger = logging.getLogger(__name__)


class AllDispatched(Feature):
    """An event that is set when engines have had all groups of an iteration."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def all_dispatched(self) -> None:
        self.event.set()


@dataclass(eq=False, repr=False)
class IterationsAhead:
    """A run's iterations, in order. train: where prompts come from. next: the iteration that is
    produced next.
    """

    config: Config
    channel: StoreChannel
    producer: Producer
    timeline: Timeline
    freshness: Freshness
    updates: Updates
    train: TrainingStream[Prompt] | RowGroupStream
    next: int
    _prompts: Sequence[Prompt] = field(default=(), init=False)  # of the next iteration
    _preparing: asyncio.Task[None] | None = field(default=None, init=False)
    # not trained yet, by iteration
    _produced: dict[int, Produced] = field(default_factory=dict, init=False)
    # of iterations that are finished in the background
    _complete: dict[int, asyncio.Event] = field(default_factory=dict, init=False)

    # what an interrupted run left

    def restore_groups(self, buffer: RolloutBuffer) -> None:
        """Puts the groups that the run had produced ahead of the checkpoint that it goes on from
        into the buffer again.

        In the same order, and as many for each replica. Only with schedule.max_staleness: otherwise
        a checkpoint lies between two iterations, and nothing is ahead of it.
        """
        ahead = usable_ahead(self.config, self.freshness)
        whole = [iteration for iteration in ahead if CARRIED_KEY not in iteration.numbers]
        for iteration in whole:
            dispatched = []
            digests = []
            for number, data in enumerate(iteration.groups):
                by_rule = is_notice(data)
                group = from_bytes(read_notice(data)[1] if by_rule else data, buffer.columns)
                replica, slot = self.config.mesh.slot_of(number)
                buffer.put(group, replica, slot, by_rule=by_rule)
                dispatched.append(
                    DispatchedGroup(
                        index=group.index,
                        replica=replica,
                        response_tokens=tuple(group.trained_lengths.tolist()),
                        leading_tokens=tuple(group.leading_lengths.tolist()),
                        by_rule=by_rule,
                        content=content_digest(group),
                    )
                )
                digests.append(digest_group(group, {(replica, slot): group.part}))
            self._put_position(iteration.iteration)
            self.train.restore(iteration.data)
            self.updates.resumed(iteration.iteration, len(dispatched))
            message = Dispatched(iteration.iteration, tuple(dispatched))
            self._announce(
                Produced(
                    iteration.iteration,
                    iteration.numbers,
                    iteration.samples,
                    message,
                    tuple(digests),
                )
            )
            self.next = iteration.iteration + 1
            self._put_position(self.next)
        for iteration in ahead[len(whole) :]:
            self.updates.carry_on(*carried_of(iteration, buffer.columns))

    # before a border

    def begin(self) -> None:
        """Begins before the first border: the iterations that were resumed are all there are."""
        self._put_position(self.next)

    def draw(self, last: int) -> Prompt:
        """Takes the next iteration's prompts, if it comes before `last`; returns one to probe
        engines with: the first, or the first that shows an image.
        """
        if self.next < last or not self._prompts:
            self._prompts = self._drawn(self.next)
        return next((prompt for prompt in self._prompts if prompt.images), self._prompts[0])

    def prepare(self, last: int) -> None:
        """Begins to choose the schedule of the next iteration, if it comes before `last`, while
        trainers still train.
        """
        if self.next < last:
            preparing = self.producer.prepare(self.next, self._prompts)
            self._preparing = asyncio.create_task(preparing, name=f"schedule of {self.next}")

    async def prepared(self) -> None:
        """Waits until the schedule that `prepare` chooses is chosen."""
        if self._preparing is not None:
            await self._preparing

    async def written(self, version: int) -> None:
        """Waits until all groups of versions before this one are written, also of iterations that
        go on in the background.
        """
        for iteration in [
            i for i in self._complete if i < version + self.freshness.iterations_ahead
        ]:
            await self._complete.pop(iteration).wait()

    # after it

    async def produce_due(
        self, version: int, publication: Publication, last: int, scope: TaskScope
    ) -> Sequence[int]:
        """Produces all iterations that may be produced while `version` is trained, by the version
        that engines hold; returns them.

        The last of them goes on in `scope` where the next border begins before it is written.
        """
        begun = self.next
        held = publication.version
        while self.next < last and self.freshness.is_due(self.next, version):
            prompts = self._prompts if self.next == begun else self._drawn(self.next)
            is_last_due = self.next + 1 < last and not self.freshness.is_due(self.next + 1, version)
            self.freshness.check_production(self.next, held)
            if is_last_due and publication.swaps_in_turn(version + 1):
                await self._produce_in_background(prompts, held, scope)
            else:
                await self._produce_whole(prompts, held)
            self.next += 1
        return range(begun, self.next)

    def trained(self, iteration: int) -> Produced:
        """Removes and returns what was produced for `iteration`, which has been trained."""
        return self._produced.pop(iteration)

    # producing

    def _drawn(self, iteration: int) -> Sequence[Prompt]:
        return self.train.next_items(self.updates.num_new(iteration))

    async def _produce_whole(self, prompts: Sequence[Prompt], held: int) -> None:
        """Produces the next iteration by the version that engines hold."""
        iteration = self.next
        with self.timeline.span("produce", iteration=iteration):
            await self._produce(iteration, prompts, held)
        self._put_position(iteration + 1)

    async def _produce_in_background(
        self, prompts: Sequence[Prompt], held: int, scope: TaskScope
    ) -> None:
        """Begins the next iteration; returns when engines have all its groups. `written` waits for
        the rest.
        """
        iteration = self.next
        self._put_position(iteration + 1)
        dispatched = AllDispatched()
        done = asyncio.Event()
        self._complete[iteration] = done

        async def produce() -> None:
            await self._produce(iteration, prompts, held, dispatched)
            done.set()

        scope.start(produce(), f"iteration {iteration}")
        # each wait for room on an engine has a deadline, and its failure ends this one too
        await dispatched.event.wait()

    async def _produce(
        self, iteration: int, prompts: Sequence[Prompt], held: int, *features: Feature
    ) -> None:
        choice = self.updates.choose(iteration, prompts)
        produced = await self.producer.produce(
            iteration, prompts, choice, version=held, features=features
        )
        self.updates.produced(iteration, choice)
        # with what the stream of prompts says of it
        self._announce(
            replace(produced, numbers=produced.numbers | self.train.observe(produced.outcomes))
        )

    # telling trainers and checkpoints

    def _announce(self, produced: Produced) -> None:
        """Tells the trainers that all of an iteration's groups are in the buffer, so that they
        check them (I2) and put them into checkpoints.
        """
        iteration = produced.iteration
        self._produced[iteration] = produced
        DISPATCHED.put(self.channel, produced.dispatched, iteration=iteration)
        if self.freshness.max_staleness:
            message = ProducedAhead(produced.numbers, produced.samples)
            PRODUCED_AHEAD.put(self.channel, message, iteration=iteration)

    def _put_position(self, iteration: int) -> None:
        """Tells checkpoints which prompts were taken before an iteration."""
        DATA_POSITION.put(self.channel, DataPosition(self.train.state()), iteration=iteration)


def usable_ahead(config: Config, freshness: Freshness) -> list[AheadIteration]:
    """Returns the iterations that checkpoint.load has ahead of its version, by number, as far as
    this run may train them.

    None where the run's keys are others, so that these groups would not be its own: they are
    produced anew, from the same prompts.
    """
    if not config.checkpoint.load or not freshness.max_staleness:
        return []
    directory = Path(config.checkpoint.load)
    ahead = read_ahead(directory)
    changed = [
        key
        for key in differences(read_meta(directory).config, config)
        if change_of(key) is Change.NEW_RUN
    ]
    if ahead and changed:
        logger.info(
            "iterations ahead of %s are produced anew: %s differ", directory, ", ".join(changed)
        )
        return []
    return ahead


def carried_of(
    iteration: AheadIteration, columns: RunColumns = NONE
) -> tuple[list[ScoredGroup], float | None]:
    """Returns the groups that are carried, and TokenBudget.group_tokens.

    Raises DataError where they cannot be read.
    """
    try:
        carried = iteration.numbers[CARRIED_KEY]
        stored = zip(iteration.groups, carried["groups"], strict=True)
        groups = [restored(from_bytes(data, columns), about) for data, about in stored]
        return groups, carried["group_tokens"]
    except (LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"groups that a checkpoint carries cannot be read ({error}); take an earlier checkpoint"
        ) from error

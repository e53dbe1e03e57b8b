"""The producer: one iteration's dispatch, from prompts to groups in the rollout buffer.

    prompts ──source──> scored groups ──choice──> advantages ──> slot ──> buffer
             (each group on its own, as soon as the one before its arrow is done)

Where groups come from is the source's business (group_source.py): engines write them
(engine_groups.py), or they are rows of data (row_groups.py). They finish, and are delivered, in any
order. Nothing here waits for trainers, so the producer cannot stall them.

A feature acts at these points (features.py), for each iteration in this order:

    point            when                                                    who is there
    before_admit     before a group asks for an engine                       the schedule's turns
    admitted         a group has room on an engine                           idle tail meter, admission pace
    nothing_left     until another group is scored                           idle tail meter
    all_dispatched   engines have had all groups that it began with          the next border (publish.mode=rolling)
    generated        all samples of a group are there                        idle tail meter, admission pace
    scored           it has its rewards                                      the iteration's numbers; changes of roles (roles.py)
    delivered        a group is in the buffer                                copies for other programs (served_run.py)

Which scored groups are trained, and which are asked for, is the choice's (updates.py; dynamic
sampling, token budgets); when they go, and with which advantages, is the delivery's (delivery.py;
whole batches).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path

from pa_npu.algorithm.registry import build_algorithm
from pa_npu.config.schema import Config
from pa_npu.coordinator.delivery import Delivery, HeldDelivery, Produced, Production
from pa_npu.coordinator.demonstrations import Demonstrations
from pa_npu.coordinator.episode import ScoredGroup
from pa_npu.coordinator.features import Feature, HookPoints
from pa_npu.coordinator.group_source import DeliveryTimes, GroupSource, IterationGroups
from pa_npu.coordinator.updates import EveryGroup
from pa_npu.data.prompts import Prompt
from pa_npu.dispatch.assignment import Assignment, GroupCost
from pa_npu.samples.rollout_buffer import RolloutBuffer
from pa_npu.telemetry.sample_store import kept_groups


@dataclass(frozen=True, eq=False)
class _Iteration:
    """The parts of one iteration."""

    choice: EveryGroup
    groups: IterationGroups
    hook_points: HookPoints
    production: Production
    delivery: Delivery
    demonstrations: Sequence[ScoredGroup]

    async def begin(self) -> None:
        """Delivers the groups that are trained before any of the iteration is generated."""
        for number, group in enumerate(self.demonstrations):
            await self.delivery.accept(number, group)
        for number, group in self.choice.begin():
            await self._accept(number, group)

    @property
    def size(self) -> int:
        """Returns how many groups are trained; known once all are scored."""
        return len(self.demonstrations) + self.choice.size

    async def _accept(self, number: int, group: ScoredGroup) -> None:
        await self.delivery.accept(len(self.demonstrations) + number, group)

    async def deliver(self, index: int, group: ScoredGroup) -> DeliveryTimes:
        """Sends a scored group, and whatever groups it releases, on the way to the buffer."""
        for notify in self.hook_points.scored:
            notify(index, group)
        scored_s = time.perf_counter()
        released = self.choice.scored(index, group)
        start_s = time.perf_counter()
        for number, chosen in released:
            await self._accept(number, chosen)
        first = len(self.demonstrations)
        by_rule = any(
            chosen is group and self.delivery.is_by_rule(first + number)
            for number, chosen in released
        )
        return DeliveryTimes(scored_s, time.perf_counter() - start_s, by_rule)


@dataclass(eq=False, repr=False)
class Producer:
    """Produces iterations, one at a time; with publish.mode=rolling the next may begin beside one.

    source: where groups come from. work: what training a group costs. store_thread: a
    single-threaded executor for the buffer's blocking calls; one thread keeps their order.
    features: the features that this run uses. streamed: makes the delivery of an iteration whose
    groups are handed over as they finish. demonstrations: rows that each iteration trains beside
    the source's groups, under the first numbers; None without any.
    """

    config: Config
    source: GroupSource
    buffer: RolloutBuffer
    work: GroupCost
    store_thread: Executor
    features: Sequence[Feature] = ()
    streamed: Callable[..., Delivery] = field(default=Delivery, kw_only=True)
    demonstrations: Demonstrations | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self._algorithm = build_algorithm(self.config)

    async def prepare(self, iteration: int, prompts: Sequence[Prompt]) -> None:
        """Lets the source choose for an iteration ahead of `produce`. No iteration may begin, and
        none be learned from, meanwhile.
        """
        await self.source.prepare(iteration, prompts)

    async def produce(
        self,
        iteration: int,
        prompts: Sequence[Prompt],
        choice: EveryGroup | None = None,
        *,
        version: int | None = None,
        features: Sequence[Feature] = (),
    ) -> Produced:
        """Puts all groups of an iteration into the buffer. The first failure cancels the rest and
        is raised.

        choice: which groups are asked for and trained; None: one per prompt. version: of the
        weights that must write them; None: any.
        features: further ones, of this iteration.
        """
        this = self._plan(iteration, prompts, choice, version, features)
        try:
            await this.begin()
            await this.groups.bring(this.hook_points, this.deliver)
            imbalance = await this.delivery.finish(this.size)
        finally:
            await this.delivery.close()
        produced = this.production.end(imbalance)
        numbers = produced.numbers | this.groups.numbers | this.delivery.numbers
        return replace(produced, numbers=numbers)

    def _plan(
        self,
        iteration: int,
        prompts: Sequence[Prompt],
        choice: EveryGroup | None,
        version: int | None,
        features: Sequence[Feature],
    ) -> _Iteration:
        config = self.config
        choice = choice or EveryGroup(prompts, config.schedule.order)
        groups = self.source.begin(iteration, prompts, choice, version)
        demonstrations: Sequence[ScoredGroup] = ()
        if self.demonstrations is not None:
            demonstrations = self.demonstrations.groups(iteration)
        expected_work = groups.expected_work
        if expected_work is not None:
            expected_work += sum(self.work(*group.trained_as) for group in demonstrations)
        assignment = Assignment(
            choice.order,
            config.mesh.data,
            config.mesh.per_replica(choice.max_groups + len(demonstrations)),
            config.schedule.updates_per_iteration,
            expected_work,
            unequal=config.devices.unequal_groups,
        )
        num_kept = kept_groups(config.telemetry.samples)
        run_dir = Path(config.run.dir)
        production = Production(iteration, num_kept, len(demonstrations), run_dir)
        hook_points = HookPoints([*self.features, *groups.features, production, *features])
        make_delivery = self.streamed if config.schedule.streams(iteration) else HeldDelivery
        delivery = make_delivery(
            config=config,
            algorithm=self._algorithm,
            production=production,
            assignment=assignment,
            work=self.work,
            buffer=self.buffer,
            store_thread=self.store_thread,
            on_delivered=hook_points.delivered,
        )
        return _Iteration(choice, groups, hook_points, production, delivery, demonstrations)

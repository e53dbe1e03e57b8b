"""The producer: one iteration's dispatch, from prompts to groups in the rollout buffer.

    prompts, by schedule ──admit──> environment on an engine ──samples──> rewards ──> choice ──> advantages ──> slot ──> buffer
                    (window per engine)            (each group on its own, as soon as the one before
                                                   its arrow is done)

Groups are admitted whole, each to one engine, in the order, at the times and with the windows of
the iteration's schedule, which the controller chooses at its border (admission.py); they finish,
and are delivered, in any order. What a group samples follows from its index, so a schedule changes
times and, with order=completion, slots, but no sample. Nothing here waits for trainers, so the
producer cannot stall them.

What a feature does it does at these points (variants.py), for each iteration in this order:

    point            when                                                    who is there
    before_admit     before a group asks for an engine                       the schedule's turns
    admitted         a group has room on an engine                           tail, pace
    nothing_left     until another group is scored                           tail
    all_dispatched   engines have had all groups that it began with          the next border (publish.mode=rolling)
    generated        all samples of a group are there                        tail, pace
    scored           it has its rewards                                      the iteration's numbers; changes of roles (roles.py)
    delivered        a group is in the buffer                                copies for other programs (served_run.py)

Which scored groups are trained, and which are asked for, is the choice's (updates.py; dynamic
sampling, token budgets); when they go, and with which advantages, is the delivery's (delivery.py;
whole batches).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import InitVar, dataclass, field, replace

from pa_npu.algorithm.registry import build_algorithm
from pa_npu.config.schema import Config
from pa_npu.control.tasks import TaskScope
from pa_npu.coordinator.admission import Admission, Admitted, Planner
from pa_npu.coordinator.answers import answers_of
from pa_npu.coordinator.delivery import Delivery, HeldDelivery, Produced, Production
from pa_npu.coordinator.episode import (
    GroupGenerate,
    ScoredGroup,
    run_episode,
    score,
    with_components,
)
from pa_npu.coordinator.updates import EveryGroup
from pa_npu.coordinator.variants import Pace, Points, TailMeter, Variant
from pa_npu.data.prompts import Prompt
from pa_npu.dispatch.assignment import Assignment, GroupCost
from pa_npu.engines.group_session import GroupSession
from pa_npu.engines.pool import EnginePool, Lease
from pa_npu.engines.protocol import Sampling
from pa_npu.environments.protocol import Environment
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.rewards.pool import RewardPool
from pa_npu.samples.rollout_buffer import RolloutBuffer
from pa_npu.samples.seeds import group_seed
from pa_npu.telemetry.sample_store import kept_groups
from pa_npu.telemetry.timeline import Timeline, now


@dataclass(frozen=True, eq=False)
class _Iteration:
    """The parts of one iteration. version: by which engines must write it; None: any."""

    number: int
    version: int | None
    choice: EveryGroup
    pace: Pace
    tail: TailMeter
    points: Points
    admission: Admission
    production: Production
    delivery: Delivery


@dataclass(eq=False, repr=False)
class Producer:
    """Produces iterations, one at a time; with publish.mode=rolling the next may begin beside one.

    work: what training a group costs. store_thread: a single-threaded executor for the buffer's
    blocking calls; one thread keeps their order. variants: the features that this run uses.
    streamed: makes the delivery of an iteration whose groups are handed over as they finish.
    """

    config: Config
    pool: EnginePool
    environment: Environment
    rewards: RewardPool
    buffer: RolloutBuffer
    controller: InitVar[ScheduleController]
    sampling: Sampling
    timeline: Timeline
    work: GroupCost
    store_thread: Executor
    variants: Sequence[Variant] = ()
    streamed: Callable[..., Delivery] = field(default=Delivery, kw_only=True)

    def __post_init__(self, controller: ScheduleController) -> None:
        self._algorithm = build_algorithm(self.config)
        self._planner = Planner(self.config, self.pool, controller, self.work)

    async def prepare(self, iteration: int, prompts: Sequence[Prompt]) -> None:
        """Choose the schedule of an iteration ahead of `produce`, in a thread; none may begin or be
        learned from meanwhile.
        """
        planner = self._planner
        await asyncio.to_thread(
            lambda: planner.controller.prepare(planner.outlook(iteration, prompts))
        )

    async def produce(
        self,
        iteration: int,
        prompts: Sequence[Prompt],
        choice: EveryGroup | None = None,
        *,
        version: int | None = None,
        variants: Sequence[Variant] = (),
    ) -> Produced:
        """Put all groups of an iteration into the buffer. The first failure cancels the rest and is
        raised.

        choice: which groups are generated and trained; None: one per prompt. version: by which
        engines must write them; None: any.
        variants: further ones, of this iteration.
        """
        this = self._plan(iteration, prompts, choice, version, variants)
        try:
            for number, group in this.choice.begin():
                await this.delivery.take(number, group)
            async with TaskScope() as scope:
                while (admitted := await this.admission.next()) is not None:
                    scope.start(
                        self._complete(this, admitted),
                        f"group {admitted.index} of iteration {iteration}",
                    )
                    if this.choice.is_dispatched:
                        for tell in this.points.all_dispatched:
                            tell()
            await self.pool.sleep()
            imbalance = await this.delivery.finish(this.choice.size)
        finally:
            await this.delivery.close()
        this.admission.end()
        produced = this.production.end(
            this.pace.schedule.largest_window, this.tail.tail_waste, imbalance
        )
        return replace(produced, numbers=produced.numbers | this.delivery.numbers)

    def _plan(
        self,
        iteration: int,
        prompts: Sequence[Prompt],
        choice: EveryGroup | None,
        version: int | None,
        variants: Sequence[Variant],
    ) -> _Iteration:
        config = self.config
        choice = choice or EveryGroup(prompts, config.schedule.order)
        assignment = Assignment(
            choice.order,
            config.mesh.data,
            config.mesh.per_replica(choice.most),
            config.schedule.updates_per_iteration,
            self._planner.expected_work(prompts),
            unequal=config.unequal_groups,
        )
        production = Production(iteration, kept_groups(config.telemetry.samples))
        tail, pace = TailMeter(self.pool), self._planner.pace(iteration, prompts)
        points = Points([*self.variants, tail, pace, production, *variants])
        make_delivery = self.streamed if config.streams(iteration) else HeldDelivery
        delivery = make_delivery(
            config=config,
            algorithm=self._algorithm,
            production=production,
            assignment=assignment,
            work=self.work,
            buffer=self.buffer,
            store_thread=self.store_thread,
            told=points.delivered,
        )
        admission = Admission(self._planner, self.pool, iteration, choice, pace, version, points)
        return _Iteration(
            iteration, version, choice, pace, tail, points, admission, production, delivery
        )

    async def _complete(self, this: _Iteration, admitted: Admitted) -> None:
        """A group, from its engine to the buffer."""
        group, lease = await self._generate(this, admitted)
        await self._deliver(this, admitted.index, group, lease)

    async def _generate(self, this: _Iteration, admitted: Admitted) -> tuple[ScoredGroup, Lease]:
        """The group with its rewards, and the lease under which it ended, closed."""
        index, prompt, iteration = admitted.index, admitted.prompt, this.number
        start_s = now()
        seed, size = (
            group_seed(self.config.run.seed, iteration, index),
            self.config.rollout.responses_per_prompt,
        )
        with GroupSession(
            self.pool,
            admitted.lease,
            this.pace.window,
            deadline_s=self.config.rollout.request_timeout_s,
            again_deadline_s=self._planner.engine_wait_s,
            label=f"group {index} of iteration {iteration}",
            version=this.version,
        ) as session:
            generate = GroupGenerate(session, seed, self.sampling, answers_of(self.environment))
            samples = await run_episode(
                self.config, self.environment, prompt, size, generate, self.sampling.max_tokens
            )
        samples = with_components(self._algorithm, samples)
        generate.answers.expect(generate.num_trained)
        for tell in this.points.generated:
            tell(session.lease)
        lengths = [sample.num_written for sample in samples]
        # what a planner fits speeds to
        shape = {"tokens": sum(lengths), "prompt": len(prompt.tokens), "lengths": lengths}
        lane = f"engine {session.lease.engine.name}"
        self.timeline.complete(f"group {index}", start_s, now(), lane, iteration=iteration, **shape)
        start_s = now()
        generate.answers.check_seeds(self.config.run.seed, iteration, index)
        group = await score(self.rewards, prompt, samples, generate.counted, generate.answers)
        self.timeline.complete(
            f"reward {index}",
            start_s,
            now(),
            "rewards",
            iteration=iteration,
            computed=group.computed,
        )
        return group, session.lease

    async def _deliver(
        self, this: _Iteration, index: int, group: ScoredGroup, lease: Lease
    ) -> None:
        for tell in this.points.scored:
            tell(index, group)
        scored_s = time.perf_counter()
        released = this.choice.scored(index, group)
        start_s = time.perf_counter()
        for number, chosen in released:
            await this.delivery.take(number, chosen)
        this.admission.delivered(index, group, lease, scored_s, time.perf_counter() - start_s)

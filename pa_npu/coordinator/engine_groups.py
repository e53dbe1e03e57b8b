"""Groups that engines write: from prompts to scored groups, each admitted whole to one engine.

    prompts, by schedule ──admit──> environment on an engine ──samples──> rewards, teachers ──> deliver
                    (window per engine)          (each group on its own, as soon as the one before
                                                 its arrow is done)

Groups are admitted in the order, at the times and with the windows of the iteration's schedule,
which the controller chooses at its border (admission.py). What a group samples follows from its
index, so a schedule changes times and, with order=completion, slots, but no sample.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

from pa_npu.algorithm.registry import build_algorithm
from pa_npu.config.schema import Config
from pa_npu.control.tasks import TaskScope, gather_both
from pa_npu.coordinator.admission import Admission, Admitted, Planner
from pa_npu.coordinator.answers import answers_of
from pa_npu.coordinator.delivery import Delivery
from pa_npu.coordinator.demonstrations import Demonstrations
from pa_npu.coordinator.episode import (
    GroupGenerate,
    ScoredGroup,
    run_episode,
    score,
    with_components,
)
from pa_npu.coordinator.features import AdmissionPace, Feature, HookPoints, IdleTailMeter
from pa_npu.coordinator.group_source import Deliver
from pa_npu.coordinator.producer import Producer
from pa_npu.coordinator.teachers import Teachers
from pa_npu.coordinator.updates import EveryGroup
from pa_npu.data.prompts import Prompt
from pa_npu.data.teachers import teacher_number
from pa_npu.dispatch.assignment import GroupCost
from pa_npu.engines.group_session import GroupSession
from pa_npu.engines.pool import EnginePool, Lease
from pa_npu.engines.protocol import Sampling
from pa_npu.environments.protocol import Environment
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.rewards.pool import RewardPool
from pa_npu.samples.rollout_buffer import RolloutBuffer
from pa_npu.samples.seeds import group_seed
from pa_npu.samples.teachers import with_teacher
from pa_npu.samples.types import Sample
from pa_npu.telemetry.timeline import Timeline, now


@dataclass(eq=False, repr=False)
class EngineGroups:
    """The GroupSource of a run with engines. work: what training a group costs. teachers: those that
    engines compute; None without any.
    """

    config: Config
    pool: EnginePool
    environment: Environment
    rewards: RewardPool
    controller: ScheduleController
    sampling: Sampling
    timeline: Timeline
    work: GroupCost
    teachers: Teachers | None = None

    def __post_init__(self) -> None:
        self.algorithm = build_algorithm(self.config)
        self.planner = Planner(self.config, self.pool, self.controller, self.work)

    async def prepare(self, iteration: int, prompts: Sequence[Prompt]) -> None:
        """Chooses the schedule of an iteration, in a thread."""
        planner = self.planner
        await asyncio.to_thread(
            lambda: planner.controller.prepare(planner.outlook(iteration, prompts))
        )

    def begin(
        self, iteration: int, prompts: Sequence[Prompt], choice: EveryGroup, version: int | None
    ) -> IterationOnEngines:
        return IterationOnEngines(
            source=self,
            number=iteration,
            version=version,
            choice=choice,
            expected_work=self.planner.expected_work(prompts),
            idle_tail_meter=IdleTailMeter(self.pool),
            admission_pace=self.planner.admission_pace(iteration, prompts),
        )


@dataclass(eq=False, repr=False)
class IterationOnEngines:
    """The IterationGroups of one iteration. version: by which engines must write it; None: any."""

    source: EngineGroups
    number: int
    version: int | None
    choice: EveryGroup
    expected_work: float | None
    idle_tail_meter: IdleTailMeter
    admission_pace: AdmissionPace
    features: Sequence[Feature] = field(init=False)

    def __post_init__(self) -> None:
        self.features = (self.idle_tail_meter, self.admission_pace)

    @property
    def numbers(self) -> dict[str, Any]:
        """Returns the admission window at the iteration's end, and IdleTailMeter's number."""
        return {
            "window": self.admission_pace.schedule.largest_window,
            "tail_waste": self.idle_tail_meter.tail_waste,
        }

    async def bring(self, hook_points: HookPoints, deliver: Deliver) -> None:
        source = self.source
        choice = self.choice
        admission = Admission(
            planner=source.planner,
            pool=source.pool,
            iteration=self.number,
            choice=choice,
            admission_pace=self.admission_pace,
            version=self.version,
            hook_points=hook_points,
        )
        async with TaskScope() as scope:
            while (admitted := await admission.next()) is not None:
                scope.start(
                    self._complete(admitted, admission, hook_points, deliver),
                    f"group {admitted.index} of iteration {self.number}",
                )
                if choice.is_dispatched:
                    for notify in hook_points.all_dispatched:
                        notify()
        await source.pool.sleep()
        admission.end()

    async def _complete(
        self, admitted: Admitted, admission: Admission, hook_points: HookPoints, deliver: Deliver
    ) -> None:
        """Generates a group and delivers it to the buffer."""
        group, lease = await self._generate(admitted, hook_points)
        times = await deliver(admitted.index, group)
        admission.delivered(admitted.index, group, lease, times)

    async def _generate(
        self, admitted: Admitted, hook_points: HookPoints
    ) -> tuple[ScoredGroup, Lease]:
        """Returns the group with its rewards, and the lease under which it ended, closed."""
        source = self.source
        config = self.source.config
        index = admitted.index
        prompt = admitted.prompt
        iteration = self.number
        start_s = now()
        seed = group_seed(config.run.seed, iteration, index)
        size = config.rollout.responses_per_prompt
        with GroupSession(
            source.pool,
            admitted.lease,
            self.admission_pace.window,
            deadline_s=config.rollout.request_timeout_s,
            again_deadline_s=source.planner.engine_wait_s,
            label=f"group {index} of iteration {iteration}",
            version=self.version,
        ) as session:
            answers = answers_of(source.environment)
            generate = GroupGenerate(session, seed, source.sampling, answers, prompt)
            max_tokens = source.sampling.max_tokens
            samples = await run_episode(
                config, source.environment, prompt, size, generate, max_tokens
            )
            samples = with_components(source.algorithm, samples)
            if config.data.teacher_column is not None:
                samples = with_teacher(samples, teacher_number(prompt, config))
            teachers = source.teachers
            if teachers is not None and teachers.is_session_needed(prompt):
                samples = await self._scored(teachers, admitted, samples, session)
                teachers = None
        generate.answers.expect(generate.num_trained)
        for notify in hook_points.generated:
            notify(session.lease)
        lengths = [sample.num_written for sample in samples]
        # what a planner fits speeds to
        shape = {"tokens": sum(lengths), "prompt": len(prompt.tokens), "lengths": lengths}
        lane = f"engine {session.lease.engine.name}"
        timeline = source.timeline
        timeline.complete(f"group {index}", start_s, now(), lane, iteration=iteration, **shape)
        start_s = now()
        generate.answers.check_seeds(config.run.seed, iteration, index)
        rewarded = score(source.rewards, prompt, samples, generate.counted, generate.answers)
        if teachers is None:
            group = await rewarded
        else:
            scored, group = await gather_both(self._scored(teachers, admitted, samples), rewarded)
            group = replace(group, samples=scored)
        timeline.complete(
            f"reward {index}",
            start_s,
            now(),
            "rewards",
            iteration=iteration,
            computed=group.computed,
        )
        return group, session.lease

    async def _scored(
        self,
        teachers: Teachers,
        admitted: Admitted,
        samples: list[Sample],
        session: GroupSession | None = None,
    ) -> list[Sample]:
        """Returns the samples of a group with what their teacher says of them."""
        index = admitted.index
        start_s = now()
        scored = await teachers.score(
            admitted.prompt,
            samples,
            iteration=self.number,
            label=f"group {index} of iteration {self.number}",
            session=session,
        )
        end_s = now()
        self.source.timeline.complete(
            f"score {index}", start_s, end_s, "teachers", iteration=self.number
        )
        return scored


def producer_on_engines(
    config: Config,
    pool: EnginePool,
    environment: Environment,
    rewards: RewardPool,
    buffer: RolloutBuffer,
    controller: ScheduleController,
    sampling: Sampling,
    timeline: Timeline,
    work: GroupCost,
    store_thread: Executor,
    features: Sequence[Feature] = (),
    *,
    streamed: Callable[..., Delivery] = Delivery,
    demonstrations: Demonstrations | None = None,
    teachers: Teachers | None = None,
) -> Producer:
    """Makes the producer whose groups engines write; see Producer and EngineGroups."""
    source = EngineGroups(
        config=config,
        pool=pool,
        environment=environment,
        rewards=rewards,
        controller=controller,
        sampling=sampling,
        timeline=timeline,
        work=work,
        teachers=teachers,
    )
    return Producer(
        config=config,
        source=source,
        buffer=buffer,
        work=work,
        store_thread=store_thread,
        features=features,
        streamed=streamed,
        demonstrations=demonstrations,
    )

"""Admission: which group goes next, when, and to which engine, by the schedule that the controller chooses for the iteration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pa_npu.config.schema import Config
from pa_npu.coordinator.episode import ScoredGroup
from pa_npu.coordinator.pacing import Pace
from pa_npu.coordinator.variants import Points
from pa_npu.data.prompts import Prompt
from pa_npu.dispatch.lengths import ResponseLengths
from pa_npu.dispatch.selection import EveryGroup
from pa_npu.engines.pool import EnginePool, Lease
from pa_npu.planning.iteration_model.cluster import GroupTiming
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.iteration_model.messages import GroupOutlook, IterationOutlook


@dataclass(frozen=True, eq=False)
class Admitted:
    """A prompt that has room on an engine. index: its dispatch index."""

    index: int
    prompt: Prompt
    lease: Lease


class Planner:
    """A run's knowledge of its prompts' lengths, from which each iteration's schedule is chosen."""

    def __init__(
        self,
        config: Config,
        pool: EnginePool,
        controller: ScheduleController,
        work: Callable[[int, Sequence[int]], float],
    ) -> None:
        self.wait_s = config.engine_wait_s
        self.num_samples = config.rollout.responses_per_prompt
        self._config = config
        self._pool = pool
        self._controller = controller
        self._work = work
        self._lengths = ResponseLengths(config.rollout.max_response_tokens)
        self._computed = self._written = (
            1.0  # work of what trainers have had, and as if it were prompts and what was written
        )

    def prepare(self, iteration: int, prompts: Sequence[Prompt]) -> None:
        """Choose the schedule of an iteration ahead of `pace`; none may begin or be learned from meanwhile."""
        self._controller.prepare(self._outlook(iteration, prompts))

    def pace(self, iteration: int, prompts: Sequence[Prompt]) -> Pace:
        """The schedule of an iteration that begins now."""
        schedule = self._controller.begin_iteration(self._outlook(iteration, prompts), iteration)
        return Pace(schedule, len(self._pool.engines))

    def tokens(self, prompt: Prompt) -> int:
        """Expected tokens of a group, prompts and responses."""
        return self.num_samples * (len(prompt.tokens) + round(self._lengths.mean(prompt)))

    def work(self, prompts: Sequence[Prompt]) -> float | None:
        """Expected work of training all groups of an iteration; None before any length was seen."""
        if not self._lengths.num_observed:
            return None
        expected = sum(
            self._work(len(prompt.tokens), [round(self._lengths.mean(prompt))] * self.num_samples) for prompt in prompts
        )
        return expected * self._computed / self._written

    def observe(self, timing: GroupTiming, iteration: int) -> None:
        """Tells the controller the seconds that a group took."""
        written = self._work(timing.prompt_tokens, timing.lengths)
        self._written += written
        self._computed += written if timing.computed is None else timing.work(self._work)
        self._controller.observe(timing, iteration)

    def learn(self, groups: Sequence[tuple[Prompt, Sequence[int]]]) -> None:
        """Response lengths of an iteration's groups, in order of dispatch."""
        self._lengths.observe(groups)

    def _outlook(self, iteration: int, prompts: Sequence[Prompt]) -> IterationOutlook:
        groups = [
            GroupOutlook(len(prompt.tokens), self._lengths.longest(prompt), self._lengths.mean(prompt))
            for prompt in prompts
        ]
        uses = self._pool.use()
        names = tuple(engine.name for engine in self._pool.engines)
        # trainers that are behind wait for no group: what counts is when the last one is there
        streams = self._config.streams(iteration) and not self._config.iterations_ahead
        streams = streams and not self._config.follows_work
        windows = {name: own for name in names if (own := uses[name].window) is not None}
        speeds = {name: uses[name].speed for name in names if uses[name].speed != 1.0}
        return IterationOutlook(groups, names, streams, windows, speeds)


class Admission:
    """One iteration's groups to engines, one after another. version: by which engines must write them; None: any."""

    def __init__(
        self,
        planner: Planner,
        pool: EnginePool,
        iteration: int,
        choice: EveryGroup[ScoredGroup],
        pace: Pace,
        version: int | None,
        points: Points,
    ) -> None:
        self._planner = planner
        self._pool = pool
        self._iteration = iteration
        self._choice = choice
        self._pace = pace
        self._version = version
        self._points = points
        self._lengths: dict[int, tuple[Prompt, list[int]]] = {}  # of all that was generated, by index

    async def next(self) -> Admitted | None:
        """The next group, when an engine has room for it; None when all have been dispatched that are needed."""
        if self._choice.must_wait:
            for tell in self._points.nothing_left:
                tell()
        if (number := await self._choice.next_index()) is None:
            return None
        # replacements come as they are needed, after the prompts that the iteration began with
        index = self._pace.index(number)
        prompt = self._choice.prompt(index)
        tokens = self._planner.tokens(prompt)
        for wait in self._points.before_admit:
            await wait()
        # every group in flight ends by its own deadline, and an engine that is gone is replaced by its own
        lease = await self._pool.admit(
            *(self._planner.num_samples, tokens, self._pace.window, self._planner.wait_s),
            version=self._version,
        )
        if (taken := self._pace.taken_by(lease.engine.name)) is not None:
            index, prompt = taken, self._choice.prompt(taken)
            lease.expect(self._planner.tokens(prompt))
        for tell_admitted in self._points.admitted:
            tell_admitted(lease)
        return Admitted(index, prompt, lease)

    def delivered(self, index: int, group: ScoredGroup, lease: Lease, scored_s: float, put_s: float) -> None:
        """A group has been scored, at scored_s, and what it released delivered, which took put_s. lease: closed."""
        lengths = group.lengths
        self._lengths[index] = group.prompt, lengths
        end_s = lease.start_s + lease.duration_s
        timing = GroupTiming(
            index=index,
            engine=lease.engine.name,
            start_s=lease.start_s,
            end_s=end_s,
            prompt_tokens=len(group.prompt.tokens),
            lengths=tuple(lengths),
            delivered_s=scored_s - end_s + put_s,
            trained=self._choice.trains(group),
            moved=lease.first is not lease,
            computed=group.computed,
        )
        self._planner.observe(timing, self._iteration)

    def end(self) -> None:
        """All groups have been delivered."""
        self._planner.learn([self._lengths[index] for index in sorted(self._lengths)])

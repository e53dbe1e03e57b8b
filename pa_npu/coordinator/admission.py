"""Admission: which group goes next, when, and to which engine, by the schedule that the controller chooses for the iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pa_npu.config.schema import Config
from pa_npu.control.freshness import iterations_ahead
from pa_npu.coordinator.episode import ScoredGroup
from pa_npu.coordinator.features import AdmissionPace, HookPoints
from pa_npu.coordinator.group_source import DeliveryTimes
from pa_npu.coordinator.updates import EveryGroup
from pa_npu.data.prompts import Prompt
from pa_npu.dispatch.assignment import GroupCost
from pa_npu.engines.pool import EnginePool, Lease
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.iteration_model.subjects import GroupOutlook, GroupTiming, IterationOutlook

Pair = tuple[float, float]
"""Lengths of a group: (mean of its responses, the longest), in tokens or as ratios. numpy takes
several times as long for two.
"""

# Groups that the baseline remembers, about: some iterations of usual size.
_MEMORY = 1000
# A line through fewer groups than this is noise.
_MIN_FOR_SLOPE = 16
# The ratio of a prompt that was not seen.
_NO_RATIO = (1.0, 1.0)
# Of the newest group in a prompt's ratio. One group of 8 has most of the information, and the
# policy moves between epochs.
_NEWEST = 0.5


@dataclass(frozen=True, eq=False)
class Admitted:
    """A prompt that has room on an engine. index: its dispatch index."""

    index: int
    prompt: Prompt
    lease: Lease


@dataclass(eq=False, repr=False)
class Planner:
    """A run's knowledge of its prompts' lengths, from which each iteration's schedule is chosen."""

    config: Config
    pool: EnginePool
    controller: ScheduleController
    work: GroupCost

    def __post_init__(self) -> None:
        self.num_samples = self.config.rollout.responses_per_prompt
        self.engine_wait_s = self.config.deadlines.engine_wait_s
        self.lengths = ResponseLengths(self.config.rollout.max_response_tokens)
        # work of what trainers have had, and as if it were prompts and what was written
        self._computed = self._written = 1.0

    def admission_pace(self, iteration: int, prompts: Sequence[Prompt]) -> AdmissionPace:
        """Returns the schedule of an iteration that begins."""
        schedule = self.controller.begin_iteration(self.outlook(iteration, prompts), iteration)
        return AdmissionPace(schedule, len(self.pool.engines))

    def tokens(self, prompt: Prompt) -> int:
        """Returns the expected tokens of a group, prompt and responses."""
        return self.num_samples * (len(prompt.tokens) + round(self.lengths.mean(prompt)))

    def expected_work(self, prompts: Sequence[Prompt]) -> float | None:
        """Returns the expected work of training all groups of an iteration; None before any length
        was seen.
        """
        if not self.lengths.num_observed:
            return None
        expected = sum(
            self.work(len(prompt.tokens), [round(self.lengths.mean(prompt))] * self.num_samples)
            for prompt in prompts
        )
        return expected * self._computed / self._written

    def observe(self, timing: GroupTiming, iteration: int) -> None:
        """Tells the controller the seconds that a group took."""
        written = self.work(timing.prompt_tokens, timing.lengths)
        self._written += written
        is_as_written = timing.computed is None and not timing.by_rule
        self._computed += written if is_as_written else timing.work(self.work)
        self.controller.observe(timing, iteration)

    def outlook(self, iteration: int, prompts: Sequence[Prompt]) -> IterationOutlook:
        groups = [
            GroupOutlook(
                len(prompt.tokens), self.lengths.longest(prompt), self.lengths.mean(prompt)
            )
            for prompt in prompts
        ]
        uses = self.pool.use()
        names = tuple(engine.name for engine in self.pool.engines)
        # trainers that are behind wait for no group: what counts is when the last one is there
        schedule = self.config.schedule
        publish = self.config.publish
        streams = (
            schedule.streams(iteration)
            and not iterations_ahead(schedule, publish)
            and not self.config.devices.follows_work
        )
        windows = {
            name: window for name in names if (window := uses[name].settings.window) is not None
        }
        speeds = {name: speed for name in names if (speed := uses[name].settings.speed) != 1.0}
        return IterationOutlook(groups, names, streams, windows, speeds)


@dataclass(eq=False, repr=False)
class Admission:
    """One iteration's groups to engines, one after another. version: by which engines must write
    them; None: any.
    """

    planner: Planner
    pool: EnginePool
    iteration: int
    choice: EveryGroup
    admission_pace: AdmissionPace
    version: int | None
    hook_points: HookPoints
    # of all that was generated, by index
    _lengths: dict[int, tuple[Prompt, list[int]]] = field(default_factory=dict, init=False)

    async def next(self) -> Admitted | None:
        """Waits until an engine has room for the next group, and returns it. Returns None when all
        groups that are needed have been dispatched.
        """
        if self.choice.must_wait:
            for notify in self.hook_points.nothing_left:
                notify()
        if (number := await self.choice.next_index()) is None:
            return None
        # replacements come as they are needed, after the prompts that the iteration began with
        index = self.admission_pace.index(number)
        prompt = self.choice.prompt(index)
        tokens = self.planner.tokens(prompt)
        for wait in self.hook_points.before_admit:
            await wait()
        # every group in flight ends by its own deadline, and an engine that is gone is replaced by
        # its own
        lease = await self.pool.admit(
            self.planner.num_samples,
            tokens,
            self.admission_pace.window,
            self.planner.engine_wait_s,
            version=self.version,
        )
        if (taken := self.admission_pace.taken_by(lease.engine.name)) is not None:
            index = taken
            prompt = self.choice.prompt(taken)
            lease.expect(self.planner.tokens(prompt))
        for notify_admitted in self.hook_points.admitted:
            notify_admitted(lease, index)
        return Admitted(index, prompt, lease)

    def delivered(self, index: int, group: ScoredGroup, lease: Lease, times: DeliveryTimes) -> None:
        """Learns from a group that is scored, and whose released groups are delivered. lease:
        closed.
        """
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
            delivered_s=times.scored_s - end_s + times.put_s,
            trained=self.choice.trains(group),
            moved=lease.first is not lease,
            computed=group.computed,
            by_rule=times.by_rule,
        )
        self.planner.observe(timing, self.iteration)

    def end(self) -> None:
        """Ends the iteration: all groups have been delivered."""
        self.planner.lengths.observe([self._lengths[index] for index in sorted(self._lengths)])


class ResponseLengths:
    """Predicts how many tokens the responses to a prompt will have, learned from the run's own
    groups.

    A group holds its room on an engine until its longest response ends, so groups are ordered by
    that. Engines are told the mean
    length: what a group will put on them.

    An estimate is a baseline for all prompts times a ratio of the prompt's own:

      baseline   least squares over the prompt's length, forgetting exponentially, so that it
                 follows lengths that grow in training
      ratio      exponential mean over the prompt's earlier groups of what was seen over the
                 baseline of that time, from 1

    Estimates steer when and where a group is generated, never what: seeds, and with order=prompt
    slots, follow from its index. So they are not part of a checkpoint; a resumed run learns them
    again.

    max_tokens: the length limit, and what is assumed before anything was seen.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._count = 0
        self._weight = 0.0
        # exponentially forgotten sums: x and x^2 of prompt lengths, y and x y of the pairs
        self._x = 0.0
        self._xx = 0.0
        self._y = (0.0, 0.0)
        self._xy = (0.0, 0.0)
        self._ratios: dict[int, Pair] = {}
        # by prompt and its length, until more is seen
        self._expected: dict[tuple[int, int], Pair] = {}

    @property
    def num_observed(self) -> int:
        """Returns the number of groups seen so far."""
        return self._count

    def mean(self, prompt: Prompt) -> float:
        """Returns the expected tokens of a response."""
        return self._expect(prompt)[0]

    def longest(self, prompt: Prompt) -> float:
        """Returns the expected tokens of the longest response of a group."""
        return self._expect(prompt)[1]

    def observe(self, groups: Sequence[tuple[Prompt, Sequence[int]]]) -> None:
        """Learns from the response lengths of an iteration's groups.

        All at once: those that finish first are short, and a baseline of them alone would make all
        others look long.
        """
        self._expected.clear()
        keep = 1.0 - 1.0 / _MEMORY
        pairs = [(sum(lengths) / len(lengths), float(max(lengths))) for _, lengths in groups]
        for (prompt, _), (mean, longest) in zip(groups, pairs, strict=True):
            x = float(len(prompt.tokens))
            self._count += 1
            self._weight = keep * self._weight + 1.0
            self._x = keep * self._x + x
            self._xx = keep * self._xx + x * x
            self._y = keep * self._y[0] + mean, keep * self._y[1] + longest
            self._xy = keep * self._xy[0] + x * mean, keep * self._xy[1] + x * longest
        for (prompt, _), (mean, longest) in zip(groups, pairs, strict=True):
            base = self._baseline(prompt)
            ratio = self._ratios.get(prompt.prompt_id, _NO_RATIO)
            self._ratios[prompt.prompt_id] = (
                ratio[0] + _NEWEST * (mean / base[0] - ratio[0]),
                ratio[1] + _NEWEST * (longest / base[1] - ratio[1]),
            )

    def _expect(self, prompt: Prompt) -> Pair:
        key = prompt.prompt_id, len(prompt.tokens)
        known = self._expected.get(key)
        if known is None:
            base = self._baseline(prompt)
            ratio = self._ratios.get(prompt.prompt_id, _NO_RATIO)
            known = self._expected[key] = (
                self._possible(base[0] * ratio[0]),
                self._possible(base[1] * ratio[1]),
            )
        return known

    def _possible(self, length: float) -> float:
        return min(max(length, 1.0), float(self._max_tokens))

    def _baseline(self, prompt: Prompt) -> Pair:
        if not self._count:
            return float(self._max_tokens), float(self._max_tokens)
        weight = self._weight
        mean_x = self._x / self._weight
        spread = self._xx / weight - mean_x**2
        if self._count < _MIN_FOR_SLOPE or spread < 1.0:
            return self._y[0] / weight, self._y[1] / weight

        def on_line(y: float, xy: float) -> float:
            mean_y = y / weight
            slope = (xy / weight - mean_x * mean_y) / spread
            # prompts far from the others' lengths are not extrapolated to nothing, nor beyond the
            # limit
            return min(
                max(mean_y + slope * (len(prompt.tokens) - mean_x), 0.25 * mean_y), 4.0 * mean_y
            )

        return on_line(self._y[0], self._xy[0]), on_line(self._y[1], self._xy[1])

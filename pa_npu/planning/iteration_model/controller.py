"""Chooses each iteration's schedule at its border, with what the run's own iterations have taught, and says how wrong it was.

    prepare           does the same before the border, while trainers still train, with what is
                      known by then
    begin_iteration   chooses by the predicted flow of the coming iteration (schedules.choose)
    observe           a group was generated
    end_iteration     speeds, shapes of groups and the border are learned; what was predicted is
                      compared with what was measured

A prediction is of the time until the last optimizer step, not until the last response. How far
predictions were off corrects the next one. With rollout.window=N windows are given; the order,
where schedule.dispatch leaves it open, and the prediction remain. Engines may have a window of
their own, and an expected speed, which counts until their groups have shown it
(rollout.engine_settings).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pa_npu.dispatch.assignment import GroupCost
from pa_npu.dispatch.schedule import EngineSpeed, Schedule
from pa_npu.planning.iteration_model.fit import EngineFit
from pa_npu.planning.iteration_model.schedules import Choice, choose, first_schedule, flow_of
from pa_npu.planning.iteration_model.subjects import (
    Cluster,
    GroupOutlook,
    GroupTiming,
    IterationOutlook,
    IterationTimes,
    Prediction,
    Rules,
    VirtualGroup,
    expected_lengths,
)

logger = logging.getLogger(__name__)

# Draws of the lengths to come, and groups of all of them together: the flow of a thousand takes a
# hundredth of a second.
_DRAWS, _GROUPS_DRAWN = 12, 8192
_NEW = 0.5  # weight of the last iteration in what is learned of trainers and border
# Lengths vary where longest responses differ by more than 2% of what was expected, or responses of
# a group by as much.
_VARIES = 0.02
# Iterations whose groups' shapes are remembered, and the least number of groups: few, so that
# lengths which grow in training and expectations that become better are followed.
_SHAPE_ITERATIONS, _LEAST_SHAPES = 4, 64
# One iteration that something else disturbed says little about the model.
_LARGEST_BIAS = 2.0
_LEAST_INFORMATIVE = 0.05


@dataclass
class _Running:
    """The iteration that goes on."""

    outlook: IterationOutlook
    schedule: Schedule
    predicted_s: float | None = None
    timings: list[GroupTiming] = field(default_factory=list)


class ScheduleController:
    """One per run. work: what training a group costs."""

    def __init__(self, rules: Rules, work: GroupCost) -> None:
        self._rules = rules
        self._learned = Learned(rules, work)
        self._last: dict[bool, Choice] = {}  # by streams
        self._running: dict[int, _Running] = {}  # by iteration
        self._prepared: _Running | None = None
        self._last_error: float | None = None

    def prepare(self, outlook: IterationOutlook) -> None:
        """Choose for the coming iteration before the one that runs is ended; with nothing else
        called meanwhile.
        """
        self._prepared = self._choose(outlook) if self._learned.enough and outlook.engines else None

    def begin_iteration(self, outlook: IterationOutlook, iteration: int = 0) -> Schedule:
        """The schedule of the coming iteration.

        The one before may go on; what was begun earlier and not ended is forgotten.
        """
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.outlook != outlook:
            known = self._learned.enough and outlook.engines
            prepared = (
                self._choose(outlook)
                if known
                else _Running(outlook, first_schedule(self._rules, outlook))
            )
        self._running = {
            number: running for number, running in self._running.items() if number == iteration - 1
        }
        self._running[iteration] = prepared
        return prepared.schedule

    def observe(self, timing: GroupTiming, iteration: int = 0) -> None:
        """A group of this iteration was generated and delivered."""
        if (running := self._running.get(iteration)) is not None:
            running.timings.append(timing)

    def end_iteration(self, times: IterationTimes, iteration: int = 0) -> Prediction:
        """This iteration has ended so. Raises ValueError when it was not begun."""
        running = self._running.pop(iteration, None)
        if running is None:
            raise ValueError(f"end_iteration of iteration {iteration} without begin_iteration")
        learned, outlook = self._learned, running.outlook
        self._last_error = None
        if running.predicted_s is not None and times.iteration_s > 0:
            self._last_error = running.predicted_s / times.iteration_s - 1.0
        learned.observe(outlook, running.timings, times)
        groups = learned.seen(outlook, running.timings) if running.predicted_s is not None else None
        if groups is not None:
            # with speeds that were learned from it too, so that this is the model's own error, and
            # none of an expectation
            flow_s = flow_of(
                learned.cluster(outlook), groups, running.schedule, streams=outlook.streams
            ).end_s
            learned.note_error(outlook.streams, flow_s, times.iteration_s - times.border_s)
        return Prediction(
            running.schedule.name, running.predicted_s, self._last_error, learned.numbers(outlook)
        )

    def speeds(self) -> tuple[EngineSpeed, float] | None:
        """An engine's, and a replica's seconds for a unit of work; None before they were learned."""
        return self._learned.speeds

    def _choose(self, outlook: IterationOutlook) -> _Running:
        learned, last = self._learned, self._last.get(outlook.streams)
        expected = learned.expected(outlook)
        draws = [expected]
        if learned.varies or learned.replaces:
            number = max(1, min(_DRAWS, _GROUPS_DRAWN // len(outlook.groups)))
            draws = [learned.draw(outlook, seed) for seed in range(number)]
        cluster, varies = learned.cluster(outlook), learned.varies
        chosen = choose(self._rules, cluster, outlook, expected, draws, varies=varies, last=last)
        predicted_s = learned.bias(outlook.streams) * chosen.end_s + learned.border_s
        if last is None or chosen.schedule.name != last.schedule.name:
            self._explain(outlook, chosen.schedule, predicted_s)
        self._last[outlook.streams] = chosen
        return _Running(outlook, chosen.schedule, predicted_s)

    def _explain(self, outlook: IterationOutlook, schedule: Schedule, predicted_s: float) -> None:
        learned = self._learned.numbers(outlook)
        logger.info(
            "schedule%s: %s, at most %d sequences per engine: %.2f s predicted, of which border "
            "%.2f s; a decode step takes %.2f ms and %.3f ms per sequence, trainers %.3f s a "
            "group%s",
            "" if outlook.streams else " of synchronous iterations",
            schedule.name,
            schedule.largest_window,
            predicted_s,
            self._learned.border_s,
            1000 * learned["decode_step_s"],
            1000 * learned["decode_sequence_s"],
            learned["train_group_s"],
            ""
            if self._last_error is None
            else f"; the last prediction was off by {self._last_error:+.1%}",
        )


class Learned:
    """Speeds, shapes of groups, the border, and how far predictions were off, of a run's iterations
    for the next.

    It is no part of a checkpoint: a resumed run learns again, in one iteration.
    """

    def __init__(self, rules: Rules, work: GroupCost) -> None:
        self._rules = rules
        self._work = work
        self._engines = EngineFit(rules.max_num_seqs)
        self._seconds_per_work: float | None = None
        # of what trainers compute to what was written (several turns, branches)
        self._work_ratio = 1.0
        self._step_s = self._delivery_s = 0.0
        self._informative = 1.0  # share of the groups that are trained (dynamic sampling)
        self._shapes: deque[tuple[float, ...]] = deque()  # lengths over the expected longest
        self._bias: dict[bool, float] = {}  # by streams: measured over predicted
        self.border_s = 0.0

    @property
    def enough(self) -> bool:
        """Whether an iteration can be predicted."""
        return (
            self._engines.pooled is not None
            and self._seconds_per_work is not None
            and bool(self._shapes)
        )

    @property
    def speeds(self) -> tuple[EngineSpeed, float] | None:
        """Pooled over engines, and seconds of a replica for a unit of work."""
        if self._engines.pooled is None or self._seconds_per_work is None:
            return None
        return self._engines.pooled, self._seconds_per_work

    @property
    def replaces(self) -> bool:
        """Whether groups are replaced by others, so that it is open how many an iteration takes."""
        return self._informative < 1.0

    @property
    def varies(self) -> bool:
        """Whether lengths differ from each other or from what was expected."""
        longest = np.array([max(shape) for shape in self._shapes])
        full = sum(len(shape) * max(shape) for shape in self._shapes)
        living = sum(map(sum, self._shapes)) / max(full, 1e-12)
        return bool(longest.std() > _VARIES * longest.mean() or living < 1.0 - _VARIES)

    def observe(
        self, outlook: IterationOutlook, timings: Sequence[GroupTiming], times: IterationTimes
    ) -> None:
        """An iteration that is complete."""
        self._observe_shapes(outlook, timings)
        self._engines.expect(outlook.speeds)
        self._engines.observe([timing for timing in timings if not timing.moved])
        trained = [timing for timing in timings if timing.trained]
        work = sum(timing.work(self._work) for timing in trained)
        if work > 0 and times.train_s > times.step_s:
            seconds = (times.train_s - times.step_s) * self._rules.replicas / work
            new = 1.0 if self._seconds_per_work is None else _NEW
            self._seconds_per_work = _mix(self._seconds_per_work or 0.0, seconds, new)
            self._work_ratio = work / sum(
                self._work(timing.prompt_tokens, timing.lengths) for timing in trained
            )
            self._step_s = _mix(self._step_s, times.step_s / self._rules.updates, new)
            self.border_s = _mix(self.border_s, times.border_s, new)
        if timings:
            self._delivery_s = float(np.median([timing.delivered_s for timing in timings]))
            self._informative = max(_LEAST_INFORMATIVE, len(trained) / len(timings))

    def _observe_shapes(self, outlook: IterationOutlook, timings: Sequence[GroupTiming]) -> None:
        groups = outlook.groups
        known = [t for t in timings if t.index < len(groups) and max(t.lengths, default=0) > 0]
        if not known:
            return
        expected = [max(1.0, groups[timing.index].longest) for timing in known]
        # nothing was known of the prompts; from now on at least the mean is
        if len(set(expected)) == 1:
            expected = [sum(max(timing.lengths) for timing in known) / len(known)] * len(known)
        for longest, timing in sorted(
            zip(expected, known, strict=True), key=lambda pair: pair[1].index
        ):
            self._shapes.append(tuple(length / longest for length in timing.lengths))
        while len(self._shapes) > max(_LEAST_SHAPES, _SHAPE_ITERATIONS * len(groups)):
            self._shapes.popleft()

    def note_error(self, streams: bool, predicted_s: float, measured_s: float) -> None:
        """Both without border, predicted with the lengths that it had.

        Later predictions are multiplied by their ratio.
        """
        ratio = min(max(measured_s / predicted_s, 1 / _LARGEST_BIAS), _LARGEST_BIAS)
        self._bias[streams] = _mix(self.bias(streams), ratio, _NEW)

    def bias(self, streams: bool) -> float:
        """Measured over predicted seconds of such iterations; 1 before there was one."""
        return self._bias.get(streams, 1.0)

    def cluster(self, outlook: IterationOutlook) -> Cluster:
        """Raises ValueError before anything was observed."""
        rules = self._rules
        self._engines.expect(outlook.speeds)
        return Cluster(
            {name: self._engines.speed(name) for name in outlook.engines},
            rules.max_num_seqs,
            rules.replicas,
            rules.order,
            rules.updates,
            self._step_s,
            self._delivery_s,
        )

    def numbers(self, outlook: IterationOutlook) -> dict[str, float]:
        """Prediction.learned."""
        if not self.enough or not outlook.engines:
            return {}
        speeds = [self._engines.speed(name) for name in outlook.engines]
        return {
            "decode_step_s": float(np.mean([speed.step_s for speed in speeds])),
            "decode_sequence_s": float(np.mean([speed.sequence_s for speed in speeds])),
            "prompt_token_s": float(np.mean([speed.prompt_token_s for speed in speeds])),
            "train_group_s": float(np.mean([group.train_s for group in self.expected(outlook)])),
        }

    def draw(self, outlook: IterationOutlook, number: int) -> list[VirtualGroup]:
        """The groups to come with shapes of groups that were seen, at random (`number` seeds it);
        replacements behind them.
        """
        rng = np.random.default_rng([17, number])
        groups: list[VirtualGroup] = []
        informative = 0
        while informative < len(outlook.groups):
            prompt = outlook.groups[len(groups) % len(outlook.groups)]
            shape = self._shapes[int(rng.integers(len(self._shapes)))]
            trained = self._informative >= 1.0 or bool(rng.random() < self._informative)
            groups.append(
                self._group(len(groups), prompt, [prompt.longest * part for part in shape], trained)
            )
            informative += trained
        return groups

    def expected(self, outlook: IterationOutlook) -> list[VirtualGroup]:
        """The groups to come as they are expected to be."""
        typical = float(np.mean([max(shape) for shape in self._shapes]))
        groups = []
        for index, prompt in enumerate(outlook.groups):
            mean = typical * min(prompt.mean, prompt.longest)
            lengths = expected_lengths(prompt.longest * typical, mean, self._rules.responses)
            groups.append(self._group(index, prompt, lengths, True))
        return groups

    def seen(
        self, outlook: IterationOutlook, timings: Sequence[GroupTiming]
    ) -> list[VirtualGroup] | None:
        """The groups of an iteration as they were; None where some are missing, or no training was
        seen yet.
        """
        by_index = sorted(timings, key=lambda timing: timing.index)
        complete = [timing.index for timing in by_index] == list(range(len(by_index)))
        num_trained = sum(timing.trained for timing in by_index)
        if self._seconds_per_work is None or not complete or num_trained != len(outlook.groups):
            return None
        groups = []
        for timing in by_index:
            prompt = GroupOutlook(
                timing.prompt_tokens, max(timing.lengths), sum(timing.lengths) / len(timing.lengths)
            )
            groups.append(self._group(timing.index, prompt, timing.lengths, timing.trained))
        return groups

    def _group(
        self, index: int, prompt: GroupOutlook, tokens: Sequence[float], trained: bool
    ) -> VirtualGroup:
        lengths = tuple(min(max(1.0, length), float(self._rules.max_tokens)) for length in tokens)
        work = self._work(prompt.prompt_tokens, [round(length) for length in lengths])
        in_flight = len(lengths) * (prompt.prompt_tokens + prompt.mean)
        seconds = (self._seconds_per_work or 0.0) * self._work_ratio * work
        return VirtualGroup(index, prompt.prompt_tokens, lengths, seconds, in_flight, trained)


def _mix(before: float, new: float, weight: float) -> float:
    return before + weight * (new - before)

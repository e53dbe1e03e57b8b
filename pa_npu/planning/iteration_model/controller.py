"""Chooses each iteration's schedule, learns from how the iteration went, and measures its error.

    prepare           chooses before the border, while trainers still train, with what is known by
                      then
    begin_iteration   chooses at the border, by the predicted flow of the coming iteration
                      (schedules.choose)
    observe           notes a group that was generated
    end_iteration     learns speeds, shapes of groups and the border's duration, and compares the
                      prediction with the measurement

A prediction is the time until the last optimizer step, not until the last response. The errors of
earlier predictions correct the next one.

With rollout.window=N the windows are fixed; the order, where schedule.dispatch leaves it open, is
still chosen, and the iteration predicted. rollout.engine_settings may give an engine a window, and
an expected speed, which counts until the engine's groups have shown its real one.
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
from pa_npu.planning.iteration_model.schedules import (
    Choice,
    choose,
    first_schedule,
    predict_schedule,
)
from pa_npu.planning.iteration_model.subjects import (
    GroupOutlook,
    GroupTiming,
    IterationOutlook,
    IterationTimes,
    Prediction,
    Rules,
    VirtualCluster,
    VirtualGroup,
    expected_lengths,
)

logger = logging.getLogger(__name__)

# The lengths to come are drawn so many times, with no more than so many groups in all draws
# together: the flow of a thousand groups takes a hundredth of a second.
_MAX_DRAWS = 12
_MAX_GROUPS_DRAWN = 8192
_NEW = 0.5  # weight of the last iteration in what is learned of trainers and border
# Lengths vary where longest responses differ by more than 2% of what was expected, or responses of
# a group by as much.
_VARIES = 0.02
# The shapes of the groups of so many iterations are remembered, or of so many groups where these
# are more. They are few, to follow lengths that grow in training and expectations that improve.
_SHAPE_ITERATIONS = 4
_MIN_SHAPES = 64
# A single iteration that something else disturbed must not change the predictions by more.
_MAX_BIAS = 2.0
_MIN_INFORMATIVE = 0.05


@dataclass
class _RunningPrediction:
    """An iteration that has begun and not ended."""

    outlook: IterationOutlook
    schedule: Schedule
    predicted_s: float | None = None
    timings: list[GroupTiming] = field(default_factory=list)


class ScheduleController:
    """Chooses the schedules of one run. `work` returns what training a group costs."""

    def __init__(self, rules: Rules, work: GroupCost) -> None:
        self._rules = rules
        self._learned = Learned(rules, work)
        self._last: dict[bool, Choice] = {}  # by streams
        self._running: dict[int, _RunningPrediction] = {}  # by iteration
        self._prepared: _RunningPrediction | None = None
        self._last_error: float | None = None

    def prepare(self, outlook: IterationOutlook) -> None:
        """Chooses the schedule of the coming iteration before the running one has ended.

        begin_iteration uses it if the outlook is still the same. No other method may run meanwhile.
        """
        self._prepared = None
        if self._learned.enough and outlook.engines:
            self._prepared = self._choose(outlook)

    def begin_iteration(self, outlook: IterationOutlook, iteration: int = 0) -> Schedule:
        """Returns the schedule of `iteration`, which begins now.

        The iteration before it may still run. Earlier ones that were not ended are forgotten.
        """
        running = self._prepared
        self._prepared = None
        if running is None or running.outlook != outlook:
            if self._learned.enough and outlook.engines:
                running = self._choose(outlook)
            else:
                running = _RunningPrediction(outlook, first_schedule(self._rules, outlook))
        before = self._running.get(iteration - 1)
        self._running = {iteration: running}
        if before is not None:
            self._running[iteration - 1] = before
        return running.schedule

    def observe(self, timing: GroupTiming, iteration: int = 0) -> None:
        """Notes a group of `iteration` that was generated and delivered."""
        running = self._running.get(iteration)
        if running is not None:
            running.timings.append(timing)

    def end_iteration(self, times: IterationTimes, iteration: int = 0) -> Prediction:
        """Learns from `iteration`, which has ended, and returns its prediction and that one's error.

        Raises ValueError when the iteration was not begun.
        """
        running = self._running.pop(iteration, None)
        if running is None:
            raise ValueError(f"end_iteration of iteration {iteration} without begin_iteration")
        learned = self._learned
        outlook = running.outlook
        self._last_error = None
        if running.predicted_s is not None and times.iteration_s > 0:
            self._last_error = running.predicted_s / times.iteration_s - 1.0
        learned.observe(outlook, running.timings, times)
        groups = None
        if running.predicted_s is not None:
            groups = learned.seen(outlook, running.timings)
        if groups is not None:
            # The speeds include what this iteration has shown, and the lengths are its real ones,
            # so the error is that of the model and not of an expectation.
            flow = predict_schedule(
                learned.cluster(outlook), groups, running.schedule, streams=outlook.streams
            )
            learned.note_error(outlook.streams, flow.end_s, times.iteration_s - times.border_s)
        return Prediction(
            schedule=running.schedule.name,
            predicted_s=running.predicted_s,
            error=self._last_error,
            learned=learned.numbers(outlook),
        )

    def speeds(self) -> tuple[EngineSpeed, float] | None:
        """Returns the speed of a usual engine, and a replica's seconds for a unit of work; None
        before both were learned.
        """
        return self._learned.speeds

    def _choose(self, outlook: IterationOutlook) -> _RunningPrediction:
        learned = self._learned
        last = self._last.get(outlook.streams)
        expected = learned.expected(outlook)
        draws = [expected]
        if learned.varies or learned.replaces:
            number = max(1, min(_MAX_DRAWS, _MAX_GROUPS_DRAWN // len(outlook.groups)))
            draws = [learned.draw(outlook, seed) for seed in range(number)]
        chosen = choose(
            self._rules,
            learned.cluster(outlook),
            outlook,
            expected,
            draws,
            varies=learned.varies,
            last=last,
        )
        predicted_s = learned.bias(outlook.streams) * chosen.end_s + learned.border_s
        if last is None or chosen.schedule.name != last.schedule.name:
            self._log_choice(outlook, chosen.schedule, predicted_s)
        self._last[outlook.streams] = chosen
        return _RunningPrediction(outlook, chosen.schedule, predicted_s)

    def _log_choice(
        self, outlook: IterationOutlook, schedule: Schedule, predicted_s: float
    ) -> None:
        learned = self._learned.numbers(outlook)
        error = ""
        if self._last_error is not None:
            error = f"; the last prediction was off by {self._last_error:+.1%}"
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
            error,
        )


class Learned:
    """Measurements of a run's iterations, for predicting the next: speeds, shapes of groups, the
    border's duration, and how far predictions were off.

    It is not part of a checkpoint: a resumed run learns it again, in one iteration.
    """

    def __init__(self, rules: Rules, work: GroupCost) -> None:
        self._rules = rules
        self._work = work
        self._engines = EngineFit(rules.max_num_seqs)
        self._seconds_per_work: float | None = None
        # work that trainers compute over work that was written (several turns, branches, groups
        # that are trained by rule)
        self._work_ratio = 1.0
        self._step_s = 0.0
        self._delivery_s = 0.0
        self._informative = 1.0  # share of the groups that are trained (dynamic sampling)
        # by group: lengths of its responses over the expected length of its longest
        self._shapes: deque[tuple[float, ...]] = deque()
        self._bias: dict[bool, float] = {}  # by streams: measured over predicted
        self.border_s = 0.0

    @property
    def enough(self) -> bool:
        """Returns whether an iteration can be predicted."""
        return (
            self._engines.pooled is not None
            and self._seconds_per_work is not None
            and bool(self._shapes)
        )

    @property
    def speeds(self) -> tuple[EngineSpeed, float] | None:
        """The speed of a usual engine, and a replica's seconds for a unit of work; None before both
        were learned.
        """
        if self._engines.pooled is None or self._seconds_per_work is None:
            return None
        return self._engines.pooled, self._seconds_per_work

    @property
    def replaces(self) -> bool:
        """Returns whether some groups are replaced by others, so that an iteration needs more of
        them.
        """
        return self._informative < 1.0

    @property
    def varies(self) -> bool:
        """Returns whether lengths differ from each other or from what was expected."""
        longest = np.array([max(shape) for shape in self._shapes])
        if longest.std() > _VARIES * longest.mean():
            return True
        tokens = sum(sum(shape) for shape in self._shapes)
        all_longest = sum(len(shape) * max(shape) for shape in self._shapes)
        return bool(tokens / max(all_longest, 1e-12) < 1.0 - _VARIES)

    def observe(
        self, outlook: IterationOutlook, timings: Sequence[GroupTiming], times: IterationTimes
    ) -> None:
        """Learns from an iteration that is complete."""
        self._observe_shapes(outlook, timings)
        self._engines.expect(outlook.speeds)
        self._engines.observe([timing for timing in timings if not timing.moved])
        trained = [timing for timing in timings if timing.trained]
        work = sum(timing.work(self._work) for timing in trained)
        written = sum(self._work(timing.prompt_tokens, timing.lengths) for timing in trained)
        if written > 0:
            self._work_ratio = work / written
        if work > 0 and times.train_s > times.step_s:
            seconds = (times.train_s - times.step_s) * self._rules.replicas / work
            weight = 1.0 if self._seconds_per_work is None else _NEW
            self._seconds_per_work = _mix(self._seconds_per_work or 0.0, seconds, weight)
            self._step_s = _mix(self._step_s, times.step_s / self._rules.updates, weight)
            self.border_s = _mix(self.border_s, times.border_s, weight)
        if timings:
            self._delivery_s = float(np.median([timing.delivered_s for timing in timings]))
            self._informative = max(_MIN_INFORMATIVE, len(trained) / len(timings))

    def _observe_shapes(self, outlook: IterationOutlook, timings: Sequence[GroupTiming]) -> None:
        groups = outlook.groups
        known = [t for t in timings if t.index < len(groups) and max(t.lengths, default=0) > 0]
        if not known:
            return
        known.sort(key=lambda timing: timing.index)
        expected = [max(1.0, groups[timing.index].longest) for timing in known]
        # Equal expectations mean that nothing was known of the prompts; the mean is known by now.
        if len(set(expected)) == 1:
            mean = sum(max(timing.lengths) for timing in known) / len(known)
            expected = [mean] * len(known)
        for longest, timing in zip(expected, known, strict=True):
            self._shapes.append(tuple(length / longest for length in timing.lengths))
        while len(self._shapes) > max(_MIN_SHAPES, _SHAPE_ITERATIONS * len(groups)):
            self._shapes.popleft()

    def note_error(self, streams: bool, predicted_s: float, measured_s: float) -> None:
        """Multiplies later predictions by the ratio of the measured and the predicted seconds, both
        without border, the latter predicted with the lengths that the iteration had.
        """
        ratio = min(max(measured_s / predicted_s, 1 / _MAX_BIAS), _MAX_BIAS)
        self._bias[streams] = _mix(self.bias(streams), ratio, _NEW)

    def bias(self, streams: bool) -> float:
        """Returns measured over predicted seconds of such iterations; 1 before there was one."""
        return self._bias.get(streams, 1.0)

    def cluster(self, outlook: IterationOutlook) -> VirtualCluster:
        """Returns engines and trainers with the speeds that were learned.

        Raises ValueError before anything was observed.
        """
        rules = self._rules
        self._engines.expect(outlook.speeds)
        return VirtualCluster(
            engines={name: self._engines.speed(name) for name in outlook.engines},
            max_num_seqs=rules.max_num_seqs,
            replicas=rules.replicas,
            order=rules.order,
            updates=rules.updates,
            step_s=self._step_s,
            delivery_s=self._delivery_s,
        )

    def numbers(self, outlook: IterationOutlook) -> dict[str, float]:
        """Returns Prediction.learned."""
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
        """Returns the groups to come, each with the shape of a group that was seen, drawn at random
        with the seed `number`; replacements follow them.
        """
        rng = np.random.default_rng([17, number])
        groups: list[VirtualGroup] = []
        num_trained = 0
        while num_trained < len(outlook.groups):
            prompt = outlook.groups[len(groups) % len(outlook.groups)]
            shape = self._shapes[int(rng.integers(len(self._shapes)))]
            trained = self._informative >= 1.0 or bool(rng.random() < self._informative)
            lengths = [prompt.longest * share for share in shape]
            groups.append(self._group(len(groups), prompt, lengths, trained))
            num_trained += trained
        return groups

    def expected(self, outlook: IterationOutlook) -> list[VirtualGroup]:
        """Returns the groups to come as they are expected to be."""
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
        """Returns the groups of an iteration as they were; None where some are missing, or no
        training was seen yet.
        """
        by_index = sorted(timings, key=lambda timing: timing.index)
        complete = [timing.index for timing in by_index] == list(range(len(by_index)))
        num_trained = sum(timing.trained for timing in by_index)
        if self._seconds_per_work is None or not complete or num_trained != len(outlook.groups):
            return None
        groups = []
        for timing in by_index:
            prompt = GroupOutlook(
                prompt_tokens=timing.prompt_tokens,
                longest=max(timing.lengths),
                mean=sum(timing.lengths) / len(timing.lengths),
            )
            groups.append(self._group(timing.index, prompt, timing.lengths, timing.trained))
        return groups

    def _group(
        self, index: int, prompt: GroupOutlook, tokens: Sequence[float], trained: bool
    ) -> VirtualGroup:
        lengths = tuple(min(max(1.0, length), float(self._rules.max_tokens)) for length in tokens)
        work = self._work(prompt.prompt_tokens, [round(length) for length in lengths])
        return VirtualGroup(
            index=index,
            prompt_tokens=prompt.prompt_tokens,
            lengths=lengths,
            train_s=(self._seconds_per_work or 0.0) * self._work_ratio * work,
            expected_tokens=len(lengths) * (prompt.prompt_tokens + prompt.mean),
            informative=trained,
        )


def _mix(before: float, new: float, weight: float) -> float:
    return before + weight * (new - before)

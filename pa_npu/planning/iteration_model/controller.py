"""Chooses each iteration's schedule at its border, with what the run's own iterations have taught, and says how wrong it was.

    begin_iteration   simulates the coming iteration under some candidates, with lengths drawn from what was seen, takes the best
    observe           a group was generated
    end_iteration     engines' and trainers' speeds, shapes of groups and the border are learned; the prediction is compared

The score of a candidate is the time until the last optimizer step, not until the last response. A candidate must be better by 1% to
replace the one before; where lengths vary the widest window with the usual order has 2% in advance, because an estimate that is a
little wrong costs least there. With rollout.window=N the windows are given, and order and prediction remain.

Predictions are multiplied by how much longer iterations of their kind took than was predicted, so that a kind of schedule which does
less well than the model believes is left.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from pa_npu.config.schema import Config
from pa_npu.dispatch.order import ORDERS, OrderName, dispatch_order
from pa_npu.dispatch.schedule import Schedule, same_windows
from pa_npu.planning.iteration_model.candidates import (
    SLACKS,
    Candidate,
    first_schedule,
    place_levels,
    turns_schedule,
    window_schedule,
)
from pa_npu.planning.iteration_model.cluster import Cluster, EngineSpeed, GroupTiming, VirtualGroup
from pa_npu.planning.iteration_model.fit import EngineFit
from pa_npu.planning.iteration_model.simulate import simulate

logger = logging.getLogger(__name__)

# Draws of the lengths to come. Choosing may take 1% of an iteration, at so many sequences per second of simulation.
_DRAWS = 12
_SHARE_OF_ITERATION = 0.01
_SEQUENCES_PER_S = 200_000
# Simulations under the first draw, about; and the candidates that are simulated under the others too.
_FIRST_RUNS = 24
_KEPT = 6
_NEW = 0.5  # weight of the last iteration in what is learned of trainers and border
_BETTER = 0.99
_USUAL_VARIES, _USUAL_EQUAL = 0.99, 0.998
# Lengths vary where longest responses differ by more than 2% of what was expected, or responses of a group by as much.
_VARIES = 0.02
_SHAPES = 512


@dataclass(frozen=True)
class GroupOutlook:
    """A prompt to come: its tokens, and the tokens expected of a group's longest response and of its mean one."""

    prompt_tokens: int
    longest: float
    mean: float


@dataclass(frozen=True)
class IterationOutlook:
    """groups by index; engines: names of those that serve; streams: trainers get groups as they complete."""

    groups: Sequence[GroupOutlook]
    engines: Sequence[str]
    streams: bool = True


@dataclass(frozen=True)
class IterationTimes:
    """What was measured at the border after an iteration, in seconds.

    iteration_s: from the first dispatch until the next could begin, evaluation left out. border_s: of it, from the trainers' being
    ready to publish to the end of the publish. train_s, step_s: of the trainers' report; training without waiting, and, of it, the
    optimizer's steps.
    """

    iteration_s: float
    border_s: float
    train_s: float
    step_s: float


@dataclass(frozen=True)
class Prediction:
    """schedule: the name of the one that was followed. predicted_s: what IterationTimes.iteration_s was thought to become; None
    in the first iteration. error: of it, relative: predicted / measured - 1."""

    schedule: str
    predicted_s: float | None
    error: float | None


@dataclass(frozen=True)
class Rules:
    """What the configuration leaves to choose, and the shape of the run."""

    window: Literal["auto"] | int
    dispatch: Literal["auto", "longest-first", "in-order"]
    responses: int
    max_num_seqs: int
    max_tokens: int
    replicas: int
    order: Literal["prompt", "completion"]
    updates: int

    @classmethod
    def of(cls, config: Config) -> Rules:
        rollout, schedule = config.rollout, config.schedule
        return cls(
            rollout.window,
            schedule.dispatch,
            rollout.responses_per_prompt,
            rollout.max_num_seqs,
            rollout.max_response_tokens,
            config.data_parallel,
            schedule.order,
            schedule.updates_per_iteration,
        )


@dataclass
class _Seen:
    """One iteration as it goes."""

    outlook: IterationOutlook
    candidate: Candidate
    schedule: Schedule
    simulated_s: float | None  # first dispatch to last step, as the simulation has it
    predicted_s: float | None
    timings: list[GroupTiming]


class ScheduleController:
    """Owns what is learned of a run's iterations. It is no part of a checkpoint: a resumed run learns again, in one iteration.

    work: what training a group costs, in any unit, from its prompt's and its responses' lengths (GroupWork).
    """

    def __init__(self, rules: Rules, work: Callable[[int, Sequence[int]], float]) -> None:
        self._rules = rules
        self._work = work
        self._fit = EngineFit(rules.max_num_seqs)
        self._seconds_per_work: float | None = None
        self._step_s = self._border_s = self._delivery_s = 0.0
        self._informative = 1.0
        self._iteration_s = 0.0  # of the last one
        self._shapes: deque[tuple[float, ...]] = deque(maxlen=_SHAPES)  # lengths over the expected longest
        self._bias: dict[tuple[bool, str], float] = {}  # (streams, kind) -> measured over predicted
        self._last: dict[bool, Candidate] = {}  # by streams
        self._seen: _Seen | None = None
        self._last_error: float | None = None

    def begin_iteration(self, outlook: IterationOutlook) -> Schedule:
        """The schedule of the coming iteration. Groups may complete, be observed, in any order."""
        if self._seen is not None:
            self._learn_lengths(self._seen)
        known = self._fit.known and self._seconds_per_work is not None and bool(self._shapes)
        self._seen = self._choose(outlook) if known else self._first(outlook)
        return self._seen.schedule

    def observe(self, timing: GroupTiming) -> None:
        """A group of the current iteration was generated and delivered."""
        if self._seen is not None:
            self._seen.timings.append(timing)

    def end_iteration(self, times: IterationTimes) -> Prediction:
        """The iteration that was begun last has ended so. Raises ValueError when none was begun."""
        seen = self._seen
        if seen is None:
            raise ValueError("end_iteration without begin_iteration")
        self._learn_lengths(seen)
        self._learn_speeds(seen, times)
        self._iteration_s = times.iteration_s
        error = None
        if seen.predicted_s is not None and times.iteration_s > 0:
            error = seen.predicted_s / times.iteration_s - 1.0
            self._learn_bias(seen, times)
        self._last_error = error
        self._seen = None
        return Prediction(seen.schedule.name, seen.predicted_s, error)

    # ------------------------------------------------------------------------------------------------------ learning

    def _learn_lengths(self, seen: _Seen) -> None:
        for timing in sorted(seen.timings, key=lambda timing: timing.index):
            if timing.index < len(seen.outlook.groups) and timing.lengths:
                expected = max(1.0, seen.outlook.groups[timing.index].longest)
                self._shapes.append(tuple(length / expected for length in timing.lengths))

    def _learn_speeds(self, seen: _Seen, times: IterationTimes) -> None:
        self._fit.observe(seen.timings)
        trained = [timing for timing in seen.timings if timing.trained]
        work = sum(self._work(timing.prompt_tokens, timing.lengths) for timing in trained)
        if work > 0 and times.train_s > times.step_s:
            seconds = (times.train_s - times.step_s) * self._rules.replicas / work
            first = self._seconds_per_work is None
            self._seconds_per_work = seconds if first else _mix(self._seconds_per_work or 0.0, seconds)
            self._step_s = times.step_s if first else _mix(self._step_s, times.step_s)
            self._border_s = times.border_s if first else _mix(self._border_s, times.border_s)
        if seen.timings:
            self._delivery_s = float(np.median([timing.delivered_s for timing in seen.timings]))
            self._informative = max(0.05, len(trained) / len(seen.timings))

    def _learn_bias(self, seen: _Seen, times: IterationTimes) -> None:
        if not seen.simulated_s:
            return
        key = (seen.outlook.streams, seen.candidate.kind)
        ratio = min(max((times.iteration_s - times.border_s) / seen.simulated_s, 0.5), 2.0)
        self._bias[key] = _mix(self._bias_of(*key), ratio)

    def _bias_of(self, streams: bool, kind: str) -> float:
        """Of a kind that was not tried yet, what others have: the model's own error, not that of the kind."""
        of_all = [bias for (streamed, _), bias in self._bias.items() if streamed == streams]
        return self._bias.get((streams, kind), sum(of_all) / len(of_all) if of_all else 1.0)

    # ------------------------------------------------------------------------------------------------------ choosing

    def _orders(self, streams: bool) -> tuple[OrderName, ...]:
        """Allowed orders of dispatch, the usual one first."""
        if self._rules.dispatch != "auto":
            return (self._rules.dispatch,)
        usual: OrderName = "in-order" if streams and self._rules.order == "prompt" else "longest-first"
        return (usual, *(name for name in ORDERS if name != usual))

    def _most_places(self, outlook: IterationOutlook, *, varies: bool) -> int:
        """Groups per engine of the widest window. A group holds its places until its longest response ends, so twice as many as
        the engine decodes together keep it full where lengths vary; what has no place waits in the engine."""
        share = math.ceil(len(outlook.groups) / max(1, len(outlook.engines)))
        held = self._rules.max_num_seqs * (2 if varies else 1) // self._rules.responses
        return max(1, min(share, held))

    def _first(self, outlook: IterationOutlook) -> _Seen:
        rules = self._rules
        # nothing is known of the engines' speed, but that they are as fast as each other
        cluster = self._cluster(outlook, {name: EngineSpeed(1.0, 0.0) for name in outlook.engines})
        longest = [group.longest for group in outlook.groups]
        order = self._orders(outlook.streams)[0]
        if rules.window == "auto":
            most = self._most_places(outlook, varies=False)
            schedule = first_schedule(cluster, longest, rules.responses, most, order)
        else:
            windows = same_windows(tuple(outlook.engines), rules.window)
            schedule = Schedule(_fixed(rules, order), tuple(dispatch_order(order, longest, rules.updates)), (windows,))
        return _Seen(outlook, Candidate("window", 0, order), schedule, None, None, [])

    def _cluster(self, outlook: IterationOutlook, speeds: dict[str, EngineSpeed]) -> Cluster:
        rules = self._rules
        return Cluster(
            speeds,
            rules.max_num_seqs,
            rules.replicas,
            rules.order,
            rules.updates,
            self._step_s / rules.updates,
            self._delivery_s,
        )

    def _choose(self, outlook: IterationOutlook) -> _Seen:
        rules, streams = self._rules, outlook.streams
        cluster = self._cluster(outlook, {name: self._fit.speed(name) for name in outlook.engines})
        varies = self._varies()
        num_sequences = max(1, len(outlook.groups) * rules.responses)
        runs = _SHARE_OF_ITERATION * self._iteration_s * _SEQUENCES_PER_S / num_sequences
        num_draws = max(1, min(_DRAWS, 1 + int((runs - _FIRST_RUNS) / (_KEPT + 1)))) if varies else 1
        draws = [self._draw(outlook, number if varies else None) for number in range(num_draws)]
        schedules = self._candidates(outlook, cluster, varies=varies)
        usual, last = next(iter(schedules)), self._last.get(streams)

        def ends_s(candidate: Candidate, some: Sequence[Sequence[VirtualGroup]]) -> list[float]:
            return [simulate(cluster, groups, schedules[candidate], streams=streams).end_s for groups in some]

        # under the first draw all windows in the usual order, then the other orders with the best of them; the better half of
        # these, and what there is, under the other draws too
        first: dict[Candidate, float] = {}
        for candidate in schedules:
            if candidate.order == usual.order:
                first[candidate] = self._bias_of(streams, candidate.kind) * ends_s(candidate, draws[:1])[0]
        best_places = [c.places for c in sorted(first, key=first.__getitem__) if c.kind == "window"][:3]
        for candidate in schedules:
            if candidate not in first and (candidate.places in best_places or candidate == last):
                first[candidate] = self._bias_of(streams, candidate.kind) * ends_s(candidate, draws[:1])[0]
        kept = dict.fromkeys([*sorted(first, key=first.__getitem__)[:_KEPT], usual])
        if last in first:
            kept[last] = None
        simulated = {
            candidate: (first[candidate] / self._bias_of(streams, candidate.kind) + sum(ends_s(candidate, draws[1:])))
            / len(draws)
            for candidate in kept
        }
        scores = {candidate: self._bias_of(streams, candidate.kind) * simulated[candidate] for candidate in kept}
        advantage = _USUAL_VARIES if varies else _USUAL_EQUAL
        chosen = min(scores, key=lambda candidate: scores[candidate] * (advantage if candidate == usual else 1.0))
        if last in scores and scores[chosen] > _BETTER * scores[last]:
            chosen = last
        if chosen != last:
            self._explain(chosen, schedules[chosen], cluster, scores, outlook)
        self._last[streams] = chosen
        predicted_s = scores[chosen] + self._border_s
        return _Seen(outlook, chosen, schedules[chosen], simulated[chosen], predicted_s, [])

    def _candidates(self, outlook: IterationOutlook, cluster: Cluster, *, varies: bool) -> dict[Candidate, Schedule]:
        """The usual one first: the widest window, the usual order."""
        rules, orders = self._rules, self._orders(outlook.streams)
        longest = [group.longest for group in outlook.groups]
        if rules.window != "auto":
            schedules = {}
            for order in orders if varies else orders[:1]:
                indices = tuple(dispatch_order(order, longest, rules.updates))
                windows = (same_windows(tuple(outlook.engines), rules.window),)
                candidate = Candidate("window", rules.window // rules.responses, order)
                schedules[candidate] = Schedule(_fixed(rules, order), indices, windows)
            return schedules
        most = self._most_places(outlook, varies=varies)
        share = math.ceil(len(outlook.groups) / max(1, len(outlook.engines)))
        candidates = [
            Candidate("window", places, order)
            for order in (orders if varies else orders[:1])
            for places in place_levels(share, most)
        ]
        found = {c: window_schedule(c, cluster, longest, rules.responses) for c in candidates}
        if outlook.streams and rules.updates == 1 and (rules.dispatch == "auto" or not varies):
            expected = self._draw(outlook, None)
            places = self._most_places(outlook, varies=False)
            for candidate in (Candidate("turns", places, orders[0], slack) for slack in SLACKS):
                found[candidate] = turns_schedule(candidate, cluster, expected, rules.responses)
        return found

    def _varies(self) -> bool:
        longest = np.array([max(shape) for shape in self._shapes])
        full = sum(len(shape) * max(shape) for shape in self._shapes)
        living = sum(map(sum, self._shapes)) / max(full, 1e-12)
        return bool(longest.std() > _VARIES * longest.mean() or living < 1.0 - _VARIES)

    def _draw(self, outlook: IterationOutlook, number: int | None) -> list[VirtualGroup]:
        """The groups to come, and replacements. number: with the shapes of groups seen, at random; None: with the mean shape."""
        rng = np.random.default_rng([17, number or 0])
        groups: list[VirtualGroup] = []
        wanted = len(outlook.groups)
        typical = max(float(np.mean([max(shape) for shape in self._shapes])), 1e-9)
        informative = 0
        while informative < wanted:
            index = len(groups)
            prompt = outlook.groups[index % wanted]
            if number is None:
                # responses of the expected longest's mean shape, the longest as long as groups of this expectation are
                ratio = prompt.mean / max(prompt.longest, 1e-9)
                share = min(1.0, max(ratio, 1e-3))
                longest = prompt.longest * typical
                rest = self._rules.responses - 1
                others = max(1.0, (longest * share * (rest + 1) - longest) / rest) if rest else longest
                lengths: tuple[float, ...] = (longest, *(min(others, longest),) * rest)
                keeps = True
            else:
                shape = self._shapes[int(rng.integers(len(self._shapes)))]
                lengths = tuple(max(1.0, prompt.longest * part) for part in shape)
                keeps = bool(rng.random() < self._informative)
            groups.append(self._virtual(index, prompt, lengths, keeps))
            informative += keeps
        if len(groups) > wanted and informative:  # a replacement is the group of another prompt
            groups = [replace(group, index=index) for index, group in enumerate(groups)]
        return groups

    def _virtual(
        self, index: int, prompt: GroupOutlook, lengths: tuple[float, ...], informative: bool
    ) -> VirtualGroup:
        lengths = tuple(min(length, float(self._rules.max_tokens)) for length in lengths)
        work = self._work(prompt.prompt_tokens, [max(1, round(length)) for length in lengths])
        expected = len(lengths) * (prompt.prompt_tokens + prompt.mean)
        seconds = (self._seconds_per_work or 0.0) * work
        return VirtualGroup(index, prompt.prompt_tokens, lengths, seconds, expected, informative)

    def _explain(
        self,
        chosen: Candidate,
        schedule: Schedule,
        cluster: Cluster,
        scores: dict[Candidate, float],
        outlook: IterationOutlook,
    ) -> None:
        others = sorted((score, c.name) for c, score in scores.items() if c.kind != chosen.kind or c.places != chosen.places)
        speeds = list(cluster.engines.values())
        step_ms = 1000 * sum(speed.step_s for speed in speeds) / len(speeds)
        sequence_ms = 1000 * sum(speed.sequence_s for speed in speeds) / len(speeds)
        logger.info(
            "schedule: %s (at most %d sequences per engine%s): %.2f s predicted with a border of %.2f s%s; a step takes %.2f ms and "
            "%.3f ms per sequence, trainers %.3f s a group%s",
            schedule.name,
            schedule.largest_window,
            "" if outlook.streams else ", synchronous",
            scores[chosen] + self._border_s,
            self._border_s,
            f", next best {others[0][0] + self._border_s:.2f} s with {others[0][1]}" if others else "",
            step_ms,
            sequence_ms,
            sum(group.train_s for group in self._draw(outlook, None)) / max(1, len(outlook.groups)),
            "" if self._last_error is None else f"; the last prediction was off by {self._last_error:+.1%}",
        )


def _fixed(rules: Rules, order: OrderName) -> str:
    return f"window {rules.window}, {order}"


def _mix(before: float, new: float) -> float:
    return before + _NEW * (new - before)

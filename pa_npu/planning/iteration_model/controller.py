"""Chooses each iteration's schedule at its border, with what the run's own iterations have taught, and says how wrong it was.

    prepare           does the same before the border, while trainers still train, with what is known by then
    begin_iteration   simulates the coming iteration under some candidates, with lengths drawn from what was seen, takes the best
    observe           a group was generated
    end_iteration     speeds, shapes of groups and the border are learned; what was predicted is compared with what was measured

A candidate's score is the time until the last optimizer step, not until the last response. It must be better by 1% to replace
the one before; where lengths vary the widest window in the usual order has 1% in advance, because wrong estimates cost least
there. With rollout.window=N windows are given; the order, where schedule.dispatch leaves it open, and the prediction remain.
Engines may have a window of their own, and an expected speed, which counts until their groups have shown it
(rollout.engine_settings).
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pa_npu.dispatch.order import ORDERS, OrderName, dispatch_order
from pa_npu.dispatch.roles import Speeds
from pa_npu.dispatch.schedule import Schedule, same_windows, with_own_windows
from pa_npu.planning.iteration_model.candidates import (
    MATCHED_SLACKS,
    SLACKS,
    Candidate,
    FirstEngines,
    first_schedule,
    matched_schedule,
    place_levels,
    turns_schedule,
    window_schedule,
)
from pa_npu.planning.iteration_model.changes import gain_s
from pa_npu.planning.iteration_model.cluster import Cluster, GroupTiming, VirtualGroup
from pa_npu.planning.iteration_model.learned import Learned
from pa_npu.planning.iteration_model.matched import ENDS, unequal
from pa_npu.planning.iteration_model.messages import IterationOutlook, IterationTimes, Prediction, Rules
from pa_npu.planning.iteration_model.part import Part, cost, halves, part_of, whole
from pa_npu.planning.iteration_model.simulate import Outcome, simulate

logger = logging.getLogger(__name__)

# Draws of the lengths to come, and on a part. Choosing may take 1% of an iteration, at so many sequences per second of simulation;
# what it takes for one draw may be more, as long as it is no more than 3%, or 20 ms.
_DRAWS, _DRAWS_OF_PART = 12, 3
_SHARE_OF_ITERATION, _MOST_OF_ITERATION = 0.01, 0.03
_SEQUENCES_PER_S = 200_000
_ALWAYS_S = 0.02
# Fewer simulations than these choose nothing.
_LEAST_RUNS = 3
# Simulations under the first draw, about; and the candidates that are simulated under the others too.
_FIRST_RUNS = 24
_KEPT = 6
# Windows, the best in the usual order, with which the other orders are tried.
_WINDOWS_WITH_ALL_ORDERS = 3
# Windows, the widest, with which schedules for engines of unequal speed are made.
_MATCHED_WINDOWS = 2
_BETTER = 0.99
_USUAL_VARIES, _USUAL_EQUAL = 0.99, 0.998


@dataclass
class _Running:
    """The iteration that goes on."""

    outlook: IterationOutlook
    candidate: Candidate
    schedule: Schedule
    part: Part | None = None  # on which it was tried, and how it looked there
    tried: Schedule | None = None
    predicted_s: float | None = None
    timings: list[GroupTiming] = field(default_factory=list)


class ScheduleController:
    """One per run. work: what training a group costs, in any unit, from its prompt's and its responses' lengths (GroupWork)."""

    def __init__(self, rules: Rules, work: Callable[[int, Sequence[int]], float]) -> None:
        self._rules = rules
        self._learned = Learned(rules, work)
        self._last: dict[bool, Candidate] = {}  # by streams
        self._running: dict[int, _Running] = {}  # by iteration
        self._prepared: _Running | None = None
        self._last_error: float | None = None

    def prepare(self, outlook: IterationOutlook) -> None:
        """Choose for the coming iteration before the one that runs is ended; with nothing else called meanwhile."""
        self._prepared = self._choose(outlook) if self._learned.enough and outlook.engines else None

    def begin_iteration(self, outlook: IterationOutlook, iteration: int = 0) -> Schedule:
        """The schedule of the coming iteration. The one before may go on; what was begun earlier and not ended is forgotten."""
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.outlook != outlook:
            prepared = self._choose(outlook) if self._learned.enough and outlook.engines else self._first(outlook)
        self._running = {number: running for number, running in self._running.items() if number == iteration - 1}
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
        self._learned.observe(running.outlook, running.timings, times)
        self._last_error = None
        if running.predicted_s is not None and times.iteration_s > 0:
            self._last_error = running.predicted_s / times.iteration_s - 1.0
        hindsight_s = self._hindsight_s(running)
        if hindsight_s:
            measured_s = times.iteration_s - times.border_s
            self._learned.note_error(running.outlook.streams, running.candidate.kind, hindsight_s, measured_s)
        some = running.part.outlook if running.part is not None else running.outlook
        return Prediction(running.schedule.name, running.predicted_s, self._last_error, self._learned.numbers(some))

    def speeds(self) -> tuple[Speeds, float] | None:
        """An engine's, and a replica's seconds for a unit of work; None before they were learned."""
        return self._learned.speeds

    def _hindsight_s(self, running: _Running) -> float | None:
        """The iteration simulated with the lengths that it had, and with speeds that were learned from it too: what then differs
        from what was measured is the model's own error, not that of an expectation. None where it is too dear."""
        groups = self._learned.seen(running.outlook, running.timings)
        if not self._learned.enough or groups is None or not running.outlook.engines:
            return None
        part, schedule = running.part, running.tried
        if part is None or schedule is None:  # it was chosen with nothing known
            part, schedule = whole(running.outlook, self._rules), running.schedule
            if self._cost(part.outlook) > self._budget(_MOST_OF_ITERATION):
                return None
        some = part.of(groups)
        if some is None:
            return None
        cluster = part.cluster(self._learned.cluster(running.outlook))
        outcome = simulate(cluster, some, schedule, streams=running.outlook.streams)
        # what was chosen with nothing known was followed in turns
        return outcome.end_s - (self._gain_s(cluster, some, outcome) if running.part is not None else 0.0)

    def _gain_s(self, cluster: Cluster, groups: Sequence[VirtualGroup], turns: Outcome) -> float:
        return gain_s(cluster, groups, turns, self._rules.units, self._rules.replicas)

    def _first(self, outlook: IterationOutlook) -> _Running:
        rules, order = self._rules, self._orders(outlook.streams)[0]
        longest = [group.longest for group in outlook.groups]
        if rules.window == "auto":
            most = self._most_places(whole(outlook, rules).share, varies=False)
            room = max(1, rules.max_num_seqs // rules.responses)
            expected = FirstEngines(outlook.engines, outlook.speeds, room)
            schedule = first_schedule(expected, longest, rules.responses, most, order, rules.updates)
        else:
            schedule = self._fixed(outlook, rules.window, order)
        schedule = with_own_windows(schedule, outlook.windows)
        return _Running(outlook, Candidate("window", 0, order), schedule)

    def _choose(self, outlook: IterationOutlook) -> _Running:
        learned, streams = self._learned, outlook.streams
        everything = learned.cluster(outlook)
        part = self._part(outlook, everything)
        cluster = part.cluster(everything)
        runs = int(self._budget(_MOST_OF_ITERATION) / self._cost(part.outlook))
        last = self._last.get(streams)
        if runs < _LEAST_RUNS:
            widest = self._most_places(part.share, varies=learned.varies)
            same = last or Candidate("window", widest, self._orders(streams)[0])
            return _Running(outlook, same, self._made(same, whole(outlook, self._rules), everything))
        schedules = self._candidates(part, cluster, runs)
        usual = next(iter(schedules))
        draws = self._draws(part)

        def run(candidate: Candidate, some: Sequence[Sequence[VirtualGroup]]) -> list[float]:
            return [simulate(cluster, groups, schedules[candidate], streams=streams).end_s for groups in some]

        def biased(candidate: Candidate, end_s: float) -> float:
            return learned.bias(streams, candidate.kind) * end_s

        # under the first draw all windows in the usual order, then the other orders with the best of them; the best of these,
        # and what there is, under the other draws too
        told = (usual, last)
        first = {c: run(c, draws[:1]) for c in _some([c for c in schedules if c.order == usual.order], runs, told)}
        ranked = sorted(first, key=lambda c: biased(c, first[c][0]))
        places = [c.places for c in ranked if c.kind == "window"][:_WINDOWS_WITH_ALL_ORDERS]
        further = [
            c for c in schedules if c not in first and c.order != usual.order and (c.places in places or c == last)
        ]
        first |= {c: run(c, draws[:1]) for c in _some(further, runs - len(first), told)}
        kept: list[Candidate] = sorted(first, key=lambda c: biased(c, first[c][0]))[:_KEPT]
        kept += [c for c in (usual, last) if c is not None and c in first and c not in kept]
        # the whole ends when the last of its parts does, and draws are parts
        together: Callable[[Sequence[float]], float] = statistics.fmean if part.is_whole else max
        simulated = {c: together([*first[c], *run(c, draws[1:])]) for c in kept}
        scores = {c: biased(c, end_s) for c, end_s in simulated.items()}

        advance = _USUAL_VARIES if learned.varies else _USUAL_EQUAL
        chosen = min(scores, key=lambda c: scores[c] * (advance if c == usual else 1.0))
        if last is not None and last in scores and scores[chosen] > _BETTER * scores[last]:
            chosen = last
        if chosen != last:
            self._explain(part.outlook, schedules[chosen], chosen, scores)
        self._last[streams] = chosen
        tried = schedules[chosen]
        schedule = tried
        if not part.is_whole:
            end = tried.reach.end if tried.reach is not None else None
            schedule = self._made(chosen, whole(outlook, self._rules), everything, end=end)
        predicted_s = scores[chosen] + learned.border_s
        if self._rules.units:
            outcome = simulate(cluster, draws[0], tried, streams=streams)
            predicted_s -= biased(chosen, self._gain_s(cluster, draws[0], outcome))
        return _Running(outlook, chosen, schedule, part, tried, predicted_s)

    def _budget(self, share: float) -> float:
        """Sequences that may be simulated at a border, for this share of an iteration."""
        return max(_ALWAYS_S, share * self._learned.iteration_s) * _SEQUENCES_PER_S

    def _cost(self, outlook: IterationOutlook, parts: int = 1) -> float:
        """Estimate the cost of one simulation of it, or of one of so many parts, in sequences."""
        groups = len(outlook.groups) * self._learned.groups_per_trained / parts
        return max(1.0, cost(groups, self._rules.responses, len(outlook.engines) / parts))

    def _part(self, outlook: IterationOutlook, cluster: Cluster) -> Part:
        """All of it where one draw is not too dear; else the largest half, quarter, ... with which several are not."""
        runs = _FIRST_RUNS
        if self._matches(cluster):
            runs += _MATCHED_WINDOWS * len(MATCHED_SLACKS) * len(ENDS)
        if runs * self._cost(outlook) <= self._budget(_MOST_OF_ITERATION):
            return whole(outlook, self._rules)
        runs += (_KEPT + 1) * (_DRAWS_OF_PART - 1)
        for half in range(1, halves(outlook, self._rules) + 1):
            if runs * self._cost(outlook, 2**half) <= self._budget(_SHARE_OF_ITERATION):
                return part_of(outlook, cluster, self._rules, 2**half)
        most = halves(outlook, self._rules)
        return part_of(outlook, cluster, self._rules, 2**most) if most else whole(outlook, self._rules)

    def _draws(self, part: Part) -> list[list[VirtualGroup]]:
        if not self._learned.varies and not self._learned.replaces:
            return [self._expected(part)]
        num_sequences = max(1, len(part.outlook.groups) * self._rules.responses)
        runs = _SHARE_OF_ITERATION * self._learned.iteration_s * _SEQUENCES_PER_S / num_sequences
        number = max(1, min(_DRAWS, 1 + int((runs - _FIRST_RUNS) / (_KEPT + 1))))
        if not part.is_whole:
            most = self._budget(_MOST_OF_ITERATION) / self._cost(part.outlook)
            number = max(number, min(_DRAWS_OF_PART, 1 + int((most - _FIRST_RUNS) / (_KEPT + 1))))
        return [part.scaled(self._learned.draw(part.outlook, seed)) for seed in range(number)]

    def _expected(self, part: Part) -> list[VirtualGroup]:
        return part.scaled(self._learned.expected(part.outlook))

    def _candidates(self, part: Part, cluster: Cluster, runs: int) -> dict[Candidate, Schedule]:
        """The usual one first: the widest window in the usual order. runs: simulations that there are for all of it."""
        rules, varies, streams = self._rules, self._learned.varies, part.outlook.streams
        orders = self._orders(streams)
        # on few engines chance decides which group meets a slow one, where only its length and the engine's speed should
        by_chance = not part.is_whole and unequal(cluster)
        if not varies or by_chance:
            orders = orders[:1]
        if rules.window != "auto":
            levels = [rules.window // rules.responses]
        else:
            levels = self._within_reach(place_levels(part.share, self._most_places(part.share, varies=varies)), streams)
        windows = [Candidate("window", places, order) for order in orders for places in levels]
        found = {c: self._made(c, part, cluster) for c in windows}
        if self._matches(cluster):
            widest = [c for c in windows if c.order == orders[0]][:_MATCHED_WINDOWS]
            made = [replace(c, kind="matched", slack=slack) for c in widest for slack in MATCHED_SLACKS]
            for c in made[: max(0, runs - _FIRST_RUNS) // len(ENDS)]:  # each is looked for with as many simulations
                found[c] = self._made(c, part, cluster)
        if (
            not by_chance
            and rules.window == "auto"
            and streams
            and rules.updates == 1
            and (rules.dispatch == "auto" or not varies)
        ):
            places = self._most_places(part.share, varies=False)
            turns = [Candidate("turns", places, orders[0], slack) for slack in SLACKS]
            found |= {c: self._made(c, part, cluster) for c in turns}
        return found

    def _matches(self, cluster: Cluster) -> bool:
        """Whether engines are of unequal speed and what lengths are expected is of use."""
        rules = self._rules
        return rules.updates == 1 and rules.dispatch != "in-order" and self._learned.varies and unequal(cluster)

    def _made(self, candidate: Candidate, part: Part, cluster: Cluster, end: float | None = None) -> Schedule:
        """The schedule of a candidate. end: as `matched` has it."""
        rules, outlook = self._rules, part.outlook
        longest = [group.longest for group in outlook.groups]
        if candidate.kind == "turns":
            found = turns_schedule(candidate, cluster, self._expected(part), rules.responses)
        elif candidate.kind == "matched":
            usual = self._made(replace(candidate, kind="window", slack=1.0), part, cluster)
            found = matched_schedule(candidate, cluster, self._expected(part), usual.windows[0], end)
        elif rules.window != "auto":
            found = self._fixed(outlook, rules.window, candidate.order)
        else:
            most = self._most_places(part.share, varies=self._learned.varies)
            found = window_schedule(candidate, cluster, longest, most, rules.responses)
        return with_own_windows(found, outlook.windows)

    def _within_reach(self, levels: list[int], streams: bool) -> list[int]:
        """Not less than half of the last window: what a step takes with far fewer sequences than were seen is extrapolated, and one
        iteration that something disturbed can make small windows look free. The next border can go on from there."""
        last = self._last.get(streams)
        if last is None or last.kind != "window":
            return levels
        return [places for places in levels if 2 * places >= last.places] or levels[:1]

    def _orders(self, streams: bool) -> tuple[OrderName, ...]:
        """List the orders that schedule.dispatch allows, the usual one first."""
        if self._rules.dispatch != "auto":
            return (self._rules.dispatch,)
        usual: OrderName = "in-order" if streams and self._rules.order == "prompt" else "longest-first"
        return (usual, *(name for name in ORDERS if name != usual))

    def _most_places(self, share: int, *, varies: bool) -> int:
        """Groups per engine of the widest window, of `share` in an iteration. A group holds its places until its longest response
        ends, so twice as many as decode together keep an engine full where lengths vary; what has no place waits in the engine."""
        held = self._rules.max_num_seqs * (2 if varies else 1) // self._rules.responses
        return max(1, min(share, held))

    def _fixed(self, outlook: IterationOutlook, window: int, order: OrderName) -> Schedule:
        indices = dispatch_order(order, [group.longest for group in outlook.groups], self._rules.updates)
        return Schedule(f"window {window}, {order}", tuple(indices), (same_windows(outlook.engines, window),))

    def _explain(
        self, outlook: IterationOutlook, schedule: Schedule, chosen: Candidate, scores: dict[Candidate, float]
    ) -> None:
        others = [c for c in scores if (c.kind, c.places) != (chosen.kind, chosen.places)]
        second = min(others, key=scores.__getitem__, default=None)
        learned, border_s = self._learned.numbers(outlook), self._learned.border_s
        logger.info(
            "schedule%s: %s, at most %d sequences per engine: %.2f s predicted, of which border %.2f s%s; a decode step takes "
            "%.2f ms and %.3f ms per sequence, trainers %.3f s a group%s",
            "" if outlook.streams else " of synchronous iterations",
            schedule.name,
            schedule.largest_window,
            scores[chosen] + border_s,
            border_s,
            f" ({scores[second] + border_s:.2f} s with {second.name})" if second is not None else "",
            1000 * learned["decode_step_s"],
            1000 * learned["decode_sequence_s"],
            learned["train_group_s"],
            "" if self._last_error is None else f"; the last prediction was off by {self._last_error:+.1%}",
        )


def _some(candidates: Sequence[Candidate], count: int, required: Sequence[Candidate | None]) -> list[Candidate]:
    """Returns at most `count` candidates: all of `required`, and an even selection of the rest."""
    if len(candidates) <= count:
        return list(candidates)
    kept = [candidate for candidate in candidates if candidate in required][: max(0, count)]
    others, left = [c for c in candidates if c not in kept], max(0, count - len(kept))
    return kept + [others[int((number + 0.5) * len(others) / left)] for number in range(left)]

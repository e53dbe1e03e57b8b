"""The few schedules that a border chooses among, and the choice: the one whose predicted flow ends first.

windows       as many groups per engine as there is room for, half and a quarter of that. Groups go
              longest first where engines are the slower side, shortest first where trainers are,
              and in order where trainers take them by index
turns         where engines are of one speed: groups begin one after another, as late as they can
              (flow.backwards_turns)
slower ones   where engines are of unequal speed and lengths vary: longest first, but a slower
              engine takes only what it is expected to end in time (Reach). No schedule ends before
              `bound_s`, for which the end is planned
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pa_npu.config.words import counted
from pa_npu.dispatch.schedule import (
    OrderName,
    Reach,
    Schedule,
    Windows,
    dispatch_order,
    same_windows,
    with_own_windows,
)
from pa_npu.planning.iteration_model.flow import (
    EQUAL_SPEED,
    Flow,
    backwards_turns,
    predicted,
    unequal,
)
from pa_npu.planning.iteration_model.subjects import Cluster, IterationOutlook, Rules, VirtualGroup

# Of the widest window, where lengths vary.
_SHARES = (1.0, 0.5, 0.25)
# Trainers are the slower side from this share of the engines' time on.
_TRAINERS_BOUND = 0.9
# Trainers are taken to need so much of their time when turns are made, but for one engine whose
# groups are of one length: which engine has how many groups is not known beforehand, and engines
# that stay a little ahead keep trainers busy.
_SLACK = 0.95
# For engines of unequal speed: the window, of the widest; the planned end over the bound; and by
# how many standard deviations of groups' longest responses over what was expected slower ones are
# taken to need longer. In virtual time, on four clusters of four and eight engines, these were
# within 1.4% of the best of 18 such choices on three, and within 6% on one.
_UNEQUAL_WINDOW, _UNEQUAL_END, _UNEQUAL_DEVIATIONS = 0.75, 1.1, 2.0
# The schedule before is kept, and the widest window taken, where another is predicted to be better
# by less. Turns have to be so much better where lengths vary: made for what is expected, they can
# take a third longer when a long response comes late.
_BETTER, _TURNS_BETTER = 0.99, 0.97
# In the first iteration engines that have room for nearly half of their share get what they have
# room for; and windows of fewer groups than this are not halved, for half of a small window costs
# much.
_NEARLY_ALL = 0.8
_LEAST_TO_HALVE = 4


@dataclass(frozen=True)
class Choice:
    """The schedule that is predicted to end first, and its seconds without border. places: groups
    per engine.
    """

    schedule: Schedule
    places: int
    end_s: float


def choose(
    rules: Rules,
    cluster: Cluster,
    outlook: IterationOutlook,
    expected: Sequence[VirtualGroup],
    draws: Sequence[Sequence[VirtualGroup]],
    *,
    varies: bool,
    last: Choice | None = None,
) -> Choice:
    """Choose for an iteration of the groups that are expected.

    Args:
        rules, cluster, outlook: what is given, measured and to come.
        expected: the groups to come, each as it is expected.
        draws: the groups to come as they may become, on which schedules are compared; replacements
        behind them.
        varies: whether lengths differ from each other or from what was expected.
        last: the choice before, which is kept where nothing is better by 1%.
    """
    found = _candidates(
        rules, cluster, outlook, expected, _spread(expected, draws) if varies else None
    )
    if last is not None:
        # what a step takes with far fewer sequences than were seen is extrapolated: one disturbed
        # iteration can make small windows look free, and the next border can go on from there
        found = [each for each in found if 2 * each[1] >= last.places] or found[:1]
    choices = []
    for schedule, places in found:
        ends_s = [
            flow_of(cluster, groups, schedule, streams=outlook.streams).end_s for groups in draws
        ]
        choices.append(Choice(schedule, places, statistics.fmean(ends_s)))

    def handicapped_s(choice: Choice) -> float:
        if choice is choices[0]:
            return choice.end_s * _BETTER
        return choice.end_s / _TURNS_BETTER if varies and choice.schedule.turns else choice.end_s

    chosen = min(choices, key=handicapped_s)
    if last is not None:
        kept = next(
            (choice for choice in choices if choice.schedule.name == last.schedule.name), chosen
        )
        chosen = kept if chosen.end_s > _BETTER * kept.end_s else chosen
    return chosen


def flow_of(
    cluster: Cluster, groups: Sequence[VirtualGroup], schedule: Schedule, *, streams: bool
) -> Flow:
    """Predict an iteration of these groups, in order of dispatch; those beyond the schedule's order
    follow as they are.
    """
    order = [*schedule.order, *range(len(schedule.order), len(groups))]
    size, windows = len(groups[0].lengths), schedule.windows[0]
    places = sum(max(1, windows.of(name) // size) for name in cluster.engines)
    return predicted(
        cluster, [groups[index] for index in order], places, schedule.turns, streams=streams
    )


def _candidates(
    rules: Rules,
    cluster: Cluster,
    outlook: IterationOutlook,
    expected: Sequence[VirtualGroup],
    spread: float | None,
) -> list[tuple[Schedule, int]]:
    """(schedule, groups per engine), the usual one first. spread: of lengths over what is expected;
    None where none varies.
    """
    varies = spread is not None
    longest = [group.longest for group in expected]
    most = most_places(rules, outlook, varies=varies)
    streams, alike = outlook.streams, not unequal(cluster)

    def made(places: int, order: OrderName) -> Schedule:
        indices = tuple(dispatch_order(order, longest, rules.updates))
        at = {
            n: 1.0 / (s.step_s + s.sequence_s * places * rules.responses)
            for n, s in cluster.engines.items()
        }
        windows = windows_by_speed(at, places, most, rules.responses)
        schedule = Schedule(_name(places, order), indices, (windows,))
        return with_own_windows(schedule, outlook.windows)

    order = _order(rules, cluster, expected, most, streams, varies)
    if not alike and spread is not None and rules.updates == 1 and order != "in-order":
        places = (
            math.ceil(_UNEQUAL_WINDOW * most)
            if rules.window == "auto"
            else rules.window // rules.responses
        )
        usual = made(places, "longest-first")
        if rules.window != "auto":
            usual = fixed_schedule(rules, outlook, rules.window, "longest-first")
        return [(_with_reach(cluster, expected, usual, 1.0 + _UNEQUAL_DEVIATIONS * spread), places)]
    if rules.window != "auto":
        return [
            (fixed_schedule(rules, outlook, rules.window, order), rules.window // rules.responses)
        ]
    shares = _SHARES if varies and streams else _SHARES[:1]
    found = [
        (made(places, order), places)
        for places in dict.fromkeys(math.ceil(share * most) for share in shares)
    ]
    if streams and alike and rules.updates == 1 and (rules.dispatch == "auto" or not varies):
        places = most_places(rules, outlook, varies=False)
        slack = 1.0 if len(cluster.engines) == 1 and not varies else _SLACK
        indices, turns = backwards_turns(cluster, expected, places * len(cluster.engines), slack)
        name = _name(places, f"one after another at {slack:.0%} of the trainers' time")
        windows = (same_windows(outlook.engines, places * rules.responses),)
        found.append(
            (with_own_windows(Schedule(name, indices, windows, turns), outlook.windows), places)
        )
    return found


def _order(
    rules: Rules,
    cluster: Cluster,
    expected: Sequence[VirtualGroup],
    most: int,
    streams: bool,
    varies: bool,
) -> OrderName:
    if rules.dispatch != "auto":
        return rules.dispatch
    if streams and rules.order == "prompt":
        return "in-order"
    falling = sorted(expected, key=lambda group: -group.longest)
    generate_s = predicted(cluster, falling, most * len(cluster.engines)).generated_s
    train_s = sum(group.train_s for group in expected) / cluster.replicas
    return (
        "shortest-first"
        if streams and varies and train_s > _TRAINERS_BOUND * generate_s
        else "longest-first"
    )


def _name(places: int, how: str) -> str:
    return f"{counted(places, 'group')} per engine, {how}"


def most_places(rules: Rules, outlook: IterationOutlook, *, varies: bool) -> int:
    """Groups per engine of the widest window. A group holds its places until its longest response
    ends, so twice as many as decode together keep an engine full where lengths vary; what has no
    place waits in the engine."""
    share = math.ceil(len(outlook.groups) / max(1, len(outlook.engines)))
    held = rules.max_num_seqs * (2 if varies else 1) // rules.responses
    return max(1, min(share, held))


def windows_by_speed(
    speeds: Mapping[str, float], places: int, most: int, group_sequences: int, from_group: int = 0
) -> Windows:
    """`places` groups per engine on average, in proportion to engines' speeds, and no more than
    `most` on any.
    """
    mean = sum(speeds.values()) / max(1, len(speeds))
    if not speeds or max(speeds.values()) < EQUAL_SPEED * min(speeds.values()):
        return same_windows(tuple(speeds), places * group_sequences, from_group)
    groups = {
        name: min(most, max(1, round(places * speed / mean))) for name, speed in speeds.items()
    }
    sequences = {name: count * group_sequences for name, count in groups.items()}
    return Windows(sequences, places * group_sequences, from_group)


def fixed_schedule(
    rules: Rules, outlook: IterationOutlook, window: int, order: OrderName
) -> Schedule:
    """One window for all engines (rollout.window)."""
    indices = dispatch_order(order, [group.longest for group in outlook.groups], rules.updates)
    schedule = Schedule(
        f"window {window}, {order}", tuple(indices), (same_windows(outlook.engines, window),)
    )
    return with_own_windows(schedule, outlook.windows)


def first_schedule(rules: Rules, outlook: IterationOutlook) -> Schedule:
    """For the first iteration, of which nothing was seen: two waves where the engines have room for
    one, and at first half of that.

    What a step takes alone and what each sequence adds are told apart by two levels of sequences in
    flight.
    """
    in_order = outlook.streams and rules.order == "prompt"
    order: OrderName = (
        rules.dispatch if rules.dispatch != "auto" else "in-order" if in_order else "longest-first"
    )
    if rules.window != "auto":
        return fixed_schedule(rules, outlook, rules.window, order)
    indices = dispatch_order(order, [group.longest for group in outlook.groups], rules.updates)
    num_engines, most = max(1, len(outlook.engines)), most_places(rules, outlook, varies=False)
    places = math.ceil(len(indices) / num_engines / 2)
    places = max(1, most if places >= _NEARLY_ALL * most else places)
    half = math.ceil(places / 2) if places >= _LEAST_TO_HALVE else places
    room = max(1, rules.max_num_seqs // rules.responses)
    speeds = {name: outlook.speeds.get(name, 1.0) for name in outlook.engines}
    windows = (
        windows_by_speed(speeds, half, room, rules.responses),
        windows_by_speed(
            speeds, places, room, rules.responses, min(len(indices) // 2, 2 * half * num_engines)
        ),
    )
    return with_own_windows(
        Schedule(f"{half}, then {_name(places, order)}", tuple(indices), windows), outlook.windows
    )


def _spread(expected: Sequence[VirtualGroup], draws: Sequence[Sequence[VirtualGroup]]) -> float:
    """The standard deviation of groups' longest responses over what is expected of them."""
    ratios = [
        drawn.longest / group.longest
        for groups in draws
        for drawn, group in zip(groups, expected, strict=False)
    ]
    return statistics.pstdev(ratios)


def _with_reach(
    cluster: Cluster, expected: Sequence[VirtualGroup], schedule: Schedule, longer: float
) -> Schedule:
    """`schedule`, whose order is longest first, with what slower engines take, each so much longer
    than is expected.
    """
    size, lengths = len(expected[0].lengths), tuple(group.longest for group in expected)
    sequences = {
        name: min(schedule.windows[0].of(name), cluster.max_num_seqs) for name in cluster.engines
    }
    places = {name: max(1, count // size) for name, count in sequences.items()}
    token_s = {n: s.step_s + s.sequence_s * places[n] * size for n, s in cluster.engines.items()}
    slower = {n: longer * s for n, s in token_s.items() if s >= EQUAL_SPEED * min(token_s.values())}
    end_s = _UNEQUAL_END * bound_s(
        lengths, {name: (token_s[name], places[name]) for name in places}
    )
    name = f"{schedule.name}, slower engines what they end in time"
    return Schedule(name, schedule.order, schedule.windows, reach=Reach(lengths, slower, end_s))


def bound_s(lengths: Sequence[float], places: Mapping[str, tuple[float, int]]) -> float:
    """No schedule is shorter (Horvath, Lam and Sethi 1977, J. ACM 24): for every k, the k longest
    groups over the k fastest places.

    lengths: of groups, in tokens. places: by engine, (seconds per token, how many there are).
    """
    speeds = sorted(
        (1 / token_s for token_s, count in places.values() for _ in range(count)), reverse=True
    )
    longest = sorted(lengths, reverse=True)
    work, rates = list(itertools.accumulate(longest)), list(itertools.accumulate(speeds))
    most = min(len(work), len(rates))
    partial = [tokens / rate for tokens, rate in zip(work[:most], rates[:most], strict=True)]
    return max([*partial, work[-1] / rates[-1]])

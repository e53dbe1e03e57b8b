"""Chooses an iteration's schedule: of a few, the one whose predicted flow ends first.

windows       as many groups per engine as there is room for, half of that, and a quarter. Groups go
              longest first where engines are the slower side, shortest first where trainers are,
              and in order where trainers take them by index.
turns         for engines of equal speed: groups begin one after another, as late as they can
              (flow.backwards_turns).
reach         for engines of unequal speed and lengths that vary: longest first, but a slower engine
              takes only what it is expected to end in time (SlowEngineLimit). The planned end is a
              multiple of `bound_s`, before which no schedule ends.
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
    Schedule,
    SlowEngineLimit,
    Windows,
    dispatch_order,
    same_windows,
    with_fixed_windows,
)
from pa_npu.planning.iteration_model.flow import (
    EQUAL_SPEED,
    Flow,
    backwards_turns,
    predict_flow,
    unequal,
)
from pa_npu.planning.iteration_model.subjects import (
    IterationOutlook,
    Rules,
    VirtualCluster,
    VirtualGroup,
)

# Windows that are compared where lengths vary, as shares of the widest one.
_SHARES = (1.0, 0.5, 0.25)
# Trainers are the slower side if they need at least this share of the engines' time.
_TRAINERS_BOUND = 0.9
# The share of their time that trainers are assumed to need when turns are made. Which engine has
# how many groups is not known beforehand, and engines that stay a little ahead keep trainers busy.
# A single engine whose groups are of one length needs no such reserve.
_SLACK = 0.95
# For engines of unequal speed: the window, as a share of the widest; the planned end over the
# bound; and the reserve of slower engines, in standard deviations of the groups' longest responses
# over the expected ones. In virtual time, on four clusters of four and eight engines, these were
# within 1.4% of the best of 18 such choices on three, and within 6% on one.
_UNEQUAL_WINDOW = 0.75
_UNEQUAL_END = 1.1
_UNEQUAL_DEVIATIONS = 2.0
# The previous schedule, or else the widest window, stays unless another is predicted to take less
# than this share of its time.
_BETTER = 0.99
# The same for turns where lengths vary: made for expected lengths, turns can take a third longer
# when a long response comes late.
_TURNS_BETTER = 0.97
# In the first iteration an engine gets all places that it has room for if half of its share needs
# nearly all of them.
_NEARLY_ALL = 0.8
# A window of fewer groups is not halved in the first iteration, since half of a small window is
# slow.
_MIN_TO_HALVE = 4


@dataclass(frozen=True)
class Choice:
    """The schedule that is predicted to end first.

    places: groups in flight per engine.
    end_s: predicted seconds of the iteration, without border.
    """

    schedule: Schedule
    places: int
    end_s: float


def choose(
    rules: Rules,
    cluster: VirtualCluster,
    outlook: IterationOutlook,
    expected: Sequence[VirtualGroup],
    draws: Sequence[Sequence[VirtualGroup]],
    *,
    varies: bool,
    last: Choice | None = None,
) -> Choice:
    """Chooses the schedule of an iteration.

    Args:
        rules: what the configuration allows.
        cluster: the speeds that were measured.
        outlook: the iteration to come.
        expected: the groups to come, each as it is expected.
        draws: the groups to come as they may become, on which schedules are compared; replacements
            follow them.
        varies: whether lengths differ from each other or from what was expected.
        last: the previous choice, which stays unless another is better by 1%.
    """
    spread = _spread(expected, draws) if varies else None
    candidates = _candidates(rules, cluster, outlook, expected, spread)
    if last is not None:
        # The duration of a step with far fewer sequences than were seen is extrapolated. One
        # disturbed iteration could make small windows look free, and the next border go on from
        # there; so a window is at most halved.
        near = [(schedule, places) for schedule, places in candidates if 2 * places >= last.places]
        candidates = near or candidates[:1]
    choices = []
    for schedule, places in candidates:
        ends_s = [
            predict_schedule(cluster, groups, schedule, streams=outlook.streams).end_s
            for groups in draws
        ]
        choices.append(Choice(schedule, places, statistics.fmean(ends_s)))

    def handicapped_s(choice: Choice) -> float:
        if choice is choices[0]:
            return choice.end_s * _BETTER
        if varies and choice.schedule.turns:
            return choice.end_s / _TURNS_BETTER
        return choice.end_s

    chosen = min(choices, key=handicapped_s)
    if last is None:
        return chosen
    for choice in choices:
        if choice.schedule.name == last.schedule.name:
            return choice if chosen.end_s > _BETTER * choice.end_s else chosen
    return chosen


def predict_schedule(
    cluster: VirtualCluster, groups: Sequence[VirtualGroup], schedule: Schedule, *, streams: bool
) -> Flow:
    """Returns the flow of these groups, given by index; groups beyond the schedule's order follow
    it as they are.
    """
    order = [*schedule.order, *range(len(schedule.order), len(groups))]
    size = len(groups[0].lengths)
    windows = schedule.windows[0]
    places = sum(max(1, windows.on_engine(name) // size) for name in cluster.engines)
    return predict_flow(
        cluster, [groups[index] for index in order], places, schedule.turns, streams=streams
    )


def _candidates(
    rules: Rules,
    cluster: VirtualCluster,
    outlook: IterationOutlook,
    expected: Sequence[VirtualGroup],
    spread: float | None,
) -> list[tuple[Schedule, int]]:
    """Returns (schedule, groups per engine) of each candidate, the usual one first.

    spread: of lengths over the expected ones; None where lengths do not vary.
    """
    varies = spread is not None
    equal = not unequal(cluster)
    widest = max_places(rules, outlook, varies=varies)
    order = _order(rules, cluster, expected, widest, outlook.streams, varies)

    if not equal and spread is not None and rules.updates == 1 and order != "in-order":
        if rules.window == "auto":
            places = math.ceil(_UNEQUAL_WINDOW * widest)
            plain = _windowed(
                rules, cluster, outlook, expected, places, "longest-first", max_groups=widest
            )
        else:
            places = rules.window // rules.responses
            plain = fixed_schedule(rules, outlook, rules.window, "longest-first")
        reserve = 1.0 + _UNEQUAL_DEVIATIONS * spread
        return [(_with_reach(cluster, expected, plain, reserve), places)]
    if rules.window != "auto":
        schedule = fixed_schedule(rules, outlook, rules.window, order)
        return [(schedule, rules.window // rules.responses)]

    candidates = []
    shares = _SHARES if varies and outlook.streams else _SHARES[:1]
    for places in dict.fromkeys(math.ceil(share * widest) for share in shares):
        schedule = _windowed(rules, cluster, outlook, expected, places, order, max_groups=widest)
        candidates.append((schedule, places))
    may_take_turns = rules.dispatch == "auto" or not varies
    if outlook.streams and equal and rules.updates == 1 and may_take_turns:
        candidates.append(_in_turns(rules, cluster, outlook, expected, varies))
    return candidates


def _windowed(
    rules: Rules,
    cluster: VirtualCluster,
    outlook: IterationOutlook,
    expected: Sequence[VirtualGroup],
    places: int,
    order: OrderName,
    *,
    max_groups: int,
) -> Schedule:
    """Returns the schedule with `places` groups per engine on average, faster engines having more,
    but none more than `max_groups`.
    """
    indices = dispatch_order(order, [group.longest for group in expected], rules.updates)
    speeds = {
        name: 1.0 / (speed.step_s + speed.sequence_s * places * rules.responses)
        for name, speed in cluster.engines.items()
    }
    windows = windows_by_speed(speeds, places, max_groups, rules.responses)
    schedule = Schedule(name=_name(places, order), order=tuple(indices), windows=(windows,))
    return with_fixed_windows(schedule, outlook.windows)


def _in_turns(
    rules: Rules,
    cluster: VirtualCluster,
    outlook: IterationOutlook,
    expected: Sequence[VirtualGroup],
    varies: bool,
) -> tuple[Schedule, int]:
    """Returns the schedule in which groups begin one after another, and its groups per engine."""
    places = max_places(rules, outlook, varies=False)
    slack = 1.0 if len(cluster.engines) == 1 and not varies else _SLACK
    indices, turns = backwards_turns(cluster, expected, places * len(cluster.engines), slack)
    schedule = Schedule(
        name=_name(places, f"one after another at {slack:.0%} of the trainers' time"),
        order=indices,
        windows=(same_windows(outlook.engines, places * rules.responses),),
        turns=turns,
    )
    return with_fixed_windows(schedule, outlook.windows), places


def _order(
    rules: Rules,
    cluster: VirtualCluster,
    expected: Sequence[VirtualGroup],
    places: int,
    streams: bool,
    varies: bool,
) -> OrderName:
    if rules.dispatch != "auto":
        return rules.dispatch
    if streams and rules.order == "prompt":
        return "in-order"
    falling = sorted(expected, key=lambda group: -group.longest)
    generate_s = predict_flow(cluster, falling, places * len(cluster.engines)).generated_s
    train_s = sum(group.train_s for group in expected) / cluster.replicas
    if streams and varies and train_s > _TRAINERS_BOUND * generate_s:
        return "shortest-first"
    return "longest-first"


def _name(places: int, order: str) -> str:
    return f"{counted(places, 'group')} per engine, {order}"


def max_places(rules: Rules, outlook: IterationOutlook, *, varies: bool) -> int:
    """Returns the groups per engine of the widest window.

    A group holds its places until its longest response ends. So where lengths vary, twice as many
    places as decode together keep an engine full; sequences that do not decode wait in the engine.
    """
    share = math.ceil(len(outlook.groups) / max(1, len(outlook.engines)))
    sequences = 2 * rules.max_num_seqs if varies else rules.max_num_seqs
    return max(1, min(share, sequences // rules.responses))


def windows_by_speed(
    speeds: Mapping[str, float],
    places: int,
    max_groups: int,
    group_sequences: int,
    from_group: int = 0,
) -> Windows:
    """Returns windows of `places` groups per engine on average, in proportion to the engines'
    speeds, and of no more than `max_groups` on any.
    """
    if not speeds or max(speeds.values()) < EQUAL_SPEED * min(speeds.values()):
        return same_windows(tuple(speeds), places * group_sequences, from_group)
    mean = sum(speeds.values()) / len(speeds)
    sequences = {}
    for name, speed in speeds.items():
        groups = min(max_groups, max(1, round(places * speed / mean)))
        sequences[name] = groups * group_sequences
    return Windows(sequences, others=places * group_sequences, from_group=from_group)


def fixed_schedule(
    rules: Rules, outlook: IterationOutlook, window: int, order: OrderName
) -> Schedule:
    """Returns the schedule with one window for all engines (rollout.window)."""
    indices = dispatch_order(order, [group.longest for group in outlook.groups], rules.updates)
    schedule = Schedule(
        name=f"window {window}, {order}",
        order=tuple(indices),
        windows=(same_windows(outlook.engines, window),),
    )
    return with_fixed_windows(schedule, outlook.windows)


def first_schedule(rules: Rules, outlook: IterationOutlook) -> Schedule:
    """Returns the schedule of the first iteration, before anything was measured.

    Two waves where the engines have room for half of their share, and at first half of that window:
    two levels of sequences in flight show what a step takes alone, and what each sequence adds.
    """
    order: OrderName = "longest-first"
    if rules.dispatch != "auto":
        order = rules.dispatch
    elif outlook.streams and rules.order == "prompt":
        order = "in-order"
    if rules.window != "auto":
        return fixed_schedule(rules, outlook, rules.window, order)

    indices = dispatch_order(order, [group.longest for group in outlook.groups], rules.updates)
    num_engines = max(1, len(outlook.engines))
    widest = max_places(rules, outlook, varies=False)
    places = math.ceil(len(indices) / num_engines / 2)
    if places >= _NEARLY_ALL * widest:
        places = widest
    places = max(1, places)
    half = math.ceil(places / 2) if places >= _MIN_TO_HALVE else places

    room = max(1, rules.max_num_seqs // rules.responses)
    speeds = {name: outlook.speeds.get(name, 1.0) for name in outlook.engines}
    first_groups = min(len(indices) // 2, 2 * half * num_engines)
    windows = (
        windows_by_speed(speeds, half, room, rules.responses),
        windows_by_speed(speeds, places, room, rules.responses, from_group=first_groups),
    )
    schedule = Schedule(f"{half}, then {_name(places, order)}", tuple(indices), windows)
    return with_fixed_windows(schedule, outlook.windows)


def _spread(expected: Sequence[VirtualGroup], draws: Sequence[Sequence[VirtualGroup]]) -> float:
    """Returns the standard deviation of groups' longest responses over the expected ones."""
    ratios: list[float] = []
    for groups in draws:
        pairs = zip(groups, expected, strict=False)
        ratios += [drawn.longest / group.longest for drawn, group in pairs]
    return statistics.pstdev(ratios)


def _with_reach(
    cluster: VirtualCluster,
    expected: Sequence[VirtualGroup],
    schedule: Schedule,
    reserve: float,
) -> Schedule:
    """Returns `schedule`, whose order is longest first, with a limit for slow engines: slower
    engines take only groups that they end in time even if these take `reserve` times as long as
    expected.
    """
    size = len(expected[0].lengths)
    lengths = tuple(group.longest for group in expected)
    token_s: dict[str, float] = {}
    places: dict[str, tuple[float, int]] = {}
    for name, speed in cluster.engines.items():
        sequences = min(schedule.windows[0].on_engine(name), cluster.max_num_seqs)
        groups = max(1, sequences // size)
        token_s[name] = speed.step_s + speed.sequence_s * groups * size
        places[name] = (token_s[name], groups)
    fastest_s = min(token_s.values())
    slower = {
        name: reserve * seconds
        for name, seconds in token_s.items()
        if seconds >= EQUAL_SPEED * fastest_s
    }
    return Schedule(
        name=f"{schedule.name}, slower engines what they end in time",
        order=schedule.order,
        windows=schedule.windows,
        slow_engine_limit=SlowEngineLimit(
            lengths, slower, end_s=_UNEQUAL_END * bound_s(lengths, places)
        ),
    )


def bound_s(lengths: Sequence[float], places: Mapping[str, tuple[float, int]]) -> float:
    """Returns seconds that no schedule can undercut: for every k, the k longest groups over the k
    fastest places (Horvath, Lam and Sethi 1977, J. ACM 24).

    lengths: tokens of each group's longest response.
    places: by engine, (seconds per token, number of places).
    """
    speeds: list[float] = []
    for token_s, count in places.values():
        speeds += [1 / token_s] * count
    work = list(itertools.accumulate(sorted(lengths, reverse=True)))
    rates = list(itertools.accumulate(sorted(speeds, reverse=True)))
    partial = [tokens / rate for tokens, rate in zip(work, rates, strict=False)]
    return max([*partial, work[-1] / rates[-1]])

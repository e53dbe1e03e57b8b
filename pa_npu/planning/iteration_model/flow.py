"""Predicts how an iteration goes, group by group, with all engines as one pool.

    predict_flow      groups start when they may and a place is free; each decodes as many steps as
                      its longest response has; then trainers train what is delivered
    backwards_turns   the same in reversed time, which lets each group start as late as it can

With n sequences on m engines a decode step takes  step_s + sequence_s * n / m  seconds. One
response of a group is as long as its longest, and the others are alike. It is left open which
engine has a group, so that the prediction of a thousand groups takes some ten milliseconds.

Backwards in time trainers emit a group whenever they have "trained" it, an engine takes it at once
and runs its decode steps; read forwards this is a schedule that ends with the iteration. Letting
each group start as early as it can in reversed time is optimal on one engine where lengths are
equal: a later start leaves more steps to do and helps no other group. With unequal lengths the
order of emission matters too: longest first, so that forwards the longest are trained last and
trainers have others meanwhile.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pa_npu.dispatch.schedule import DispatchTurn, turn_s
from pa_npu.planning.iteration_model.subjects import VirtualCluster, VirtualGroup

EQUAL_SPEED = 1.1
"""Engines whose speeds differ by a smaller factor count as equal."""
_MAX_KINDS = 4  # of engines of unequal speed


@dataclass(frozen=True)
class Flow:
    """A predicted iteration. Seconds count from the first dispatch.

    starts_s, ends_s: by group, in the order in which they were given.
    dispatched_s: when the last group has been given to an engine.
    busy_s: mean over engines of the time in which they have something in flight.
    end_s: when the last optimizer step is done.
    """

    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]
    dispatched_s: float
    busy_s: float
    end_s: float

    @property
    def generated_s(self) -> float:
        """Returns when the last response is there."""
        return max(self.ends_s)


def predict_flow(
    cluster: VirtualCluster,
    groups: Sequence[VirtualGroup],
    places: int,
    turns: Sequence[DispatchTurn] = (),
    *,
    streams: bool = True,
) -> Flow:
    """Returns the iteration in which groups go in this order, with at most `places` of them in
    flight on all engines together.
    """
    engines = len(cluster.engines)

    def ready_s(number: int, completed_s: Sequence[float]) -> float:
        return turn_s(turns, number, completed_s, engines)

    starts_s, ends_s, busy_s = _flow(cluster, groups, places, ready_s)
    if turns:
        dispatched_s = max(starts_s)
    elif len(groups) > places:  # a group with a place is dispatched, and may wait in the engine
        dispatched_s = sorted(ends_s)[-places - 1]
    else:
        dispatched_s = 0.0
    return Flow(
        starts_s=tuple(starts_s),
        ends_s=tuple(ends_s),
        dispatched_s=dispatched_s,
        busy_s=busy_s,
        end_s=_trained_s(cluster, groups, ends_s, streams),
    )


def _trained_s(
    cluster: VirtualCluster, groups: Sequence[VirtualGroup], ends_s: Sequence[float], streams: bool
) -> float:
    """Returns when the last optimizer step is done. Replicas wait for each other at each step."""
    arriving = [
        (end_s + cluster.delivery_s, group)
        for end_s, group in zip(ends_s, groups, strict=True)
        if group.informative
    ]
    by_index = cluster.order == "prompt"
    if by_index:
        arriving.sort(key=lambda arrival: arrival[1].index)
    else:
        arriving.sort(key=lambda arrival: arrival[0])
    last_s = 0.0 if streams else max(at_s for at_s, _ in arriving)
    share = len(arriving) // cluster.updates
    for start in range(0, share * cluster.updates, share):
        part = arriving[start : start + share]
        if not streams and not by_index:
            part.sort(key=lambda arrival: -arrival[1].train_s)
        free_s = [last_s] * cluster.replicas  # by replica, or else a heap
        for number, (at_s, group) in enumerate(part):
            if by_index:
                replica = number % cluster.replicas
                free_s[replica] = max(free_s[replica], at_s) + group.train_s
            else:
                heapq.heapreplace(free_s, max(free_s[0], at_s) + group.train_s)
        last_s = max(free_s) + cluster.step_s
    return last_s


def backwards_turns(
    cluster: VirtualCluster, groups: Sequence[VirtualGroup], places: int, slack: float
) -> tuple[tuple[int, ...], tuple[DispatchTurn, ...]]:
    """Returns (order, turns) for expected groups.

    A turn is a number of completions, which come when the engines are ready even if these are
    slower or faster than was predicted, and seconds after the last of them.

    Args:
        places: groups that may be in flight, on all engines together.
        slack: the share of their time that trainers are assumed to need, so that engines stay a
            little ahead of them.
    """
    emitted = _emissions(cluster, groups, slack)
    backwards = [groups[index] for _, index in emitted]
    started_s, ended_s, _ = _flow(cluster, backwards, places, lambda number, _: emitted[number][0])
    last_s = max(ended_s)
    completions_s = [last_s - at_s for at_s in reversed(started_s)]  # forwards, rising
    order: list[int] = []
    turns: list[DispatchTurn] = []
    num_completed = 0
    for number in sorted(range(len(emitted)), key=ended_s.__getitem__, reverse=True):
        at_s = last_s - ended_s[number]
        while num_completed < len(completions_s) and completions_s[num_completed] <= at_s + 1e-9:
            num_completed += 1
        order.append(emitted[number][1])
        completed_s = completions_s[num_completed - 1] if num_completed else 0.0
        turns.append(DispatchTurn(after=num_completed, delay_s=at_s - completed_s))
    return tuple(order), tuple(turns)


def _flow(
    cluster: VirtualCluster,
    groups: Sequence[VirtualGroup],
    places: int,
    ready_s: Callable[[int, Sequence[float]], float],
) -> tuple[list[float], list[float], float]:
    """Returns (starts, ends, Flow.busy_s). `ready_s` returns when the group of a number may start,
    given when others ended so far.
    """
    kinds = _kinds(cluster)
    engines = len(cluster.engines)
    room = engines * cluster.max_num_seqs
    # prompt tokens of each group per decode step, as if they were spread over its steps
    prompt_per_step = [group.prompt_tokens / group.longest for group in groups]
    now_s = 0.0
    clock = 0.0  # in decode steps
    busy_s = 0.0
    living = 0  # sequences
    in_flight = 0  # groups
    prompts = 0.0  # sum of prompt_per_step over the groups in flight
    number = 0  # of the next group
    # A heap of (clock, group, change of `living`); a change of 0 stands for the group's last
    # sequence, with which the group ends.
    ends: list[tuple[float, int, int]] = []
    starts_s = [0.0] * len(groups)
    ends_s = [0.0] * len(groups)
    completed_s: list[float] = []
    while len(completed_s) < len(groups):
        busy = max(1, min(engines, in_flight))
        step_s = engines / sum(
            count / max(a + b * living / busy + p * prompts / busy, 1e-12)
            for a, b, p, count in kinds
        )
        next_end_s = now_s + (ends[0][0] - clock) * step_s if ends else math.inf
        start_s = math.inf
        # sequences beyond those that decode together would wait in the engine's queue
        has_room = not ends or (
            number < len(groups) and living + len(groups[number].lengths) <= room
        )
        if number < len(groups) and in_flight < places and has_room:
            start_s = max(now_s, ready_s(number, completed_s))
        busy_s += (min(start_s, next_end_s) - now_s) * min(1.0, in_flight / engines)

        if start_s <= next_end_s:
            group = groups[number]
            if ends:
                clock += (start_s - now_s) / step_s
            now_s = start_s
            starts_s[number] = start_s
            heapq.heappush(ends, (clock + group.longest, number, 0))
            num_shorter = len(group.lengths) - 1
            if num_shorter:
                mean_shorter = (sum(group.lengths) - group.longest) / num_shorter
                heapq.heappush(ends, (clock + mean_shorter, number, -num_shorter))
            living += len(group.lengths)
            in_flight += 1
            prompts += prompt_per_step[number]
            number += 1
            continue

        clock, ended, change = heapq.heappop(ends)
        now_s = next_end_s
        if change:
            living += change
            continue
        living -= 1
        ends_s[ended] = now_s
        completed_s.append(now_s)
        in_flight -= 1
        prompts -= prompt_per_step[ended]
    return starts_s, ends_s, busy_s


def _kinds(cluster: VirtualCluster) -> list[tuple[float, float, float, int]]:
    """Returns (a, b, p, number of engines) of each kind of engine.

    Equal engines are one kind; unequal ones are divided into a few kinds, each with its mean speed.
    """
    ranked = sorted((s.step_s, s.sequence_s, s.prompt_token_s) for s in cluster.engines.values())
    size = -(-len(ranked) // _MAX_KINDS) if unequal(cluster) else len(ranked)
    kinds = []
    for start in range(0, len(ranked), size):
        part = ranked[start : start + size]
        a, b, p = [sum(column) / len(part) for column in zip(*part, strict=True)]
        kinds.append((a, b, p, len(part)))
    return kinds


def unequal(cluster: VirtualCluster) -> bool:
    """Returns whether a group takes longer on some engines than on others."""
    steps = [speed.step_s + speed.sequence_s for speed in cluster.engines.values()]
    return len(steps) > 1 and max(steps) >= EQUAL_SPEED * min(steps)


def _emissions(
    cluster: VirtualCluster, groups: Sequence[VirtualGroup], slack: float
) -> list[tuple[float, int]]:
    """Returns (time, index), rising: when trainers emit which group in reversed time."""
    # Forwards replicas take their slots in turn, so backwards the last slots come first.
    if cluster.order == "prompt":
        indices = list(reversed(range(len(groups))))
    else:
        indices = sorted(range(len(groups)), key=lambda index: (-groups[index].longest, -index))
    # (busy until, replica), a heap unless replicas go by index
    replicas = [(0.0, replica) for replica in range(cluster.replicas)]
    emitted = []
    for index in indices:
        seconds = slack * groups[index].train_s
        if cluster.order == "prompt":
            replica = index % cluster.replicas
            until_s = replicas[replica][0] + seconds
            replicas[replica] = until_s, replica
        else:
            until_s = replicas[0][0] + seconds
            heapq.heapreplace(replicas, (until_s, replicas[0][1]))
        emitted.append((until_s, index))
    return sorted(emitted)

"""Predicts how an iteration goes, group by group, with all engines as one pool; and finds turns by running it backwards.

    flow        groups start when they may and a place is free; each decodes as many steps as its
                longest response has
    predicted   the flow of a schedule, and when trainers have trained what it delivers
    turns       the flow of reversed time: each group starts as late as it can

With n sequences on m engines a decode step takes  step_s + sequence_s * n / m  seconds. Of a group one response is as long as its
longest and the others are alike. Which engine has it is left out, so that a thousand groups take
some ten milliseconds.

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

from pa_npu.dispatch.schedule import Turn, turn_s
from pa_npu.planning.iteration_model.subjects import Cluster, VirtualGroup

# Engines whose speeds differ by less are equal; of others as many kinds are told apart.
EQUAL_SPEED = 1.1
_MOST_KINDS = 4


@dataclass(frozen=True)
class Flow:
    """Seconds from the first dispatch, of each group in the order in which they were given; one
    begins when its engine has room.

    dispatched_s: when the last group has been given to an engine. busy_s: mean over engines of the
    time in which they have something in flight. end_s: when the last optimizer step is done.
    """

    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]
    dispatched_s: float
    busy_s: float
    end_s: float

    @property
    def generated_s(self) -> float:
        """The last response is there."""
        return max(self.ends_s)


def predicted(
    cluster: Cluster,
    groups: Sequence[VirtualGroup],
    places: int,
    turns: Sequence[Turn] = (),
    *,
    streams: bool = True,
) -> Flow:
    """The iteration in which groups go in this order, with `places` of them in flight on all
    engines together.
    """
    engines = len(cluster.engines)
    starts_s, ends_s, busy_s = _flow(
        cluster, groups, places, lambda number, ended_s: turn_s(turns, number, ended_s, engines)
    )
    dispatched_s = max(starts_s)
    if not turns:  # what has a place and no room waits in the engine's queue
        dispatched_s = sorted(ends_s)[-places - 1] if len(groups) > places else 0.0
    return Flow(
        tuple(starts_s),
        tuple(ends_s),
        dispatched_s,
        busy_s,
        _trained_s(cluster, groups, ends_s, streams),
    )


def _trained_s(
    cluster: Cluster, groups: Sequence[VirtualGroup], ends_s: Sequence[float], streams: bool
) -> float:
    """When the last optimizer step is done. Replicas wait for each other at each."""
    arriving = [
        (end_s + cluster.delivery_s, group)
        for end_s, group in zip(ends_s, groups, strict=True)
        if group.informative
    ]
    by_index = cluster.order == "prompt"
    arriving.sort(key=lambda each: each[1].index if by_index else each[0])
    last_s = 0.0 if streams else max(end_s for end_s, _ in arriving)
    share = len(arriving) // cluster.updates
    for start in range(0, share * cluster.updates, share):
        free = [last_s] * cluster.replicas  # a heap, but by index
        part = arriving[start : start + share]
        if not streams and not by_index:
            part.sort(key=lambda each: -each[1].train_s)
        for number, (at_s, group) in enumerate(part):
            if by_index:
                replica = number % cluster.replicas
                free[replica] = max(free[replica], at_s) + group.train_s
            else:
                heapq.heapreplace(free, max(free[0], at_s) + group.train_s)
        last_s = max(free) + cluster.step_s
    return last_s


def backwards_turns(
    cluster: Cluster, groups: Sequence[VirtualGroup], places: int, slack: float
) -> tuple[tuple[int, ...], tuple[Turn, ...]]:
    """(order, turns) for expected groups.

    places: groups that may be in flight, on all engines together. slack: trainers are taken to need
    this share of their time, so that engines stay a little ahead of them. Turns are in completions,
    which follow the engines when these are slower or faster than was thought, and in seconds after
    them.
    """
    emitted = _emissions(cluster, groups, slack)
    backwards = [groups[index] for _, index in emitted]
    started_s, ended_s, _ = _flow(cluster, backwards, places, lambda number, _: emitted[number][0])
    last_s = max(ended_s)
    completions_s = [last_s - at_s for at_s in reversed(started_s)]  # forwards, rising
    order: list[int] = []
    turns: list[Turn] = []
    before = 0
    for number in sorted(range(len(emitted)), key=ended_s.__getitem__, reverse=True):
        at_s = last_s - ended_s[number]
        while before < len(completions_s) and completions_s[before] <= at_s + 1e-9:
            before += 1
        order.append(emitted[number][1])
        turns.append(Turn(before, at_s - (completions_s[before - 1] if before else 0.0)))
    return tuple(order), tuple(turns)


def _flow(
    cluster: Cluster,
    groups: Sequence[VirtualGroup],
    places: int,
    ready_s: Callable[[int, Sequence[float]], float],
) -> tuple[list[float], list[float], float]:
    """(starts, ends) of the groups, and Flow.busy_s. ready_s: when a group may start, given when
    others ended so far.
    """
    kinds, engines = _kinds(cluster), len(cluster.engines)
    room = engines * cluster.max_num_seqs
    # per step, as if it were spread over them
    prompt_of = [group.prompt_tokens / group.longest for group in groups]
    now_s = clock = prompts = busy_s = 0.0
    living = in_flight = number = 0
    # (clock, group, less so many sequences; 0: its last one)
    ends: list[tuple[float, int, int]] = []
    starts_s, ends_s = [0.0] * len(groups), [0.0] * len(groups)
    completed_s: list[float] = []
    while len(completed_s) < len(groups):
        busy = max(1, min(engines, in_flight))
        step_s = engines / sum(
            count / max(a + b * living / busy + p * prompts / busy, 1e-12)
            for a, b, p, count in kinds
        )
        next_end_s = now_s + (ends[0][0] - clock) * step_s if ends else math.inf
        start_s = math.inf
        # beyond what decodes together an engine has a queue of its own
        if (
            number < len(groups)
            and in_flight < places
            and (not ends or living + len(groups[number].lengths) <= room)
        ):
            start_s = max(now_s, ready_s(number, completed_s))
        busy_s += (min(start_s, next_end_s) - now_s) * min(1.0, in_flight / engines)
        if start_s <= next_end_s:
            group = groups[number]
            clock += (start_s - now_s) / step_s if ends else 0.0
            now_s = starts_s[number] = start_s
            others = len(group.lengths) - 1
            heapq.heappush(ends, (clock + group.longest, number, 0))
            if others:
                heapq.heappush(
                    ends, (clock + (sum(group.lengths) - group.longest) / others, number, -others)
                )
            living, in_flight, prompts = (
                living + others + 1,
                in_flight + 1,
                prompts + prompt_of[number],
            )
            number += 1
            continue
        clock, ended, sequences = heapq.heappop(ends)
        now_s, living = next_end_s, living + (sequences or -1)
        if not sequences:
            ends_s[ended] = now_s
            completed_s.append(now_s)
            in_flight, prompts = in_flight - 1, prompts - prompt_of[ended]
    return starts_s, ends_s, busy_s


def _kinds(cluster: Cluster) -> list[tuple[float, float, float, int]]:
    """Engines that are equal, or of many nearly so, counted together: (a, b, p, how many)."""
    ranked = sorted((s.step_s, s.sequence_s, s.prompt_token_s) for s in cluster.engines.values())
    size = -(-len(ranked) // _MOST_KINDS) if unequal(cluster) else len(ranked)
    parts = [ranked[start : start + size] for start in range(0, len(ranked), size)]
    return [
        (*(sum(column) / len(part) for column in zip(*part, strict=True)), len(part))
        for part in parts
    ]


def unequal(cluster: Cluster) -> bool:
    """Whether a group takes longer on some engines than on others."""
    steps = [speed.step_s + speed.sequence_s for speed in cluster.engines.values()]
    return len(steps) > 1 and max(steps) >= EQUAL_SPEED * min(steps)


def _emissions(
    cluster: Cluster, groups: Sequence[VirtualGroup], slack: float
) -> list[tuple[float, int]]:
    """(time, index), rising: when reversed trainers emit which group."""
    # replicas take their slots in turn, so the last slots come out first
    if cluster.order == "prompt":
        indices = list(reversed(range(len(groups))))
    else:
        indices = sorted(range(len(groups)), key=lambda index: (-groups[index].longest, -index))
    # busy until then, of which the first is free first
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

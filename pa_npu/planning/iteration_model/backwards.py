"""Schedules by running an iteration backwards: each group starts as late as it can.

Backwards in time trainers emit a group whenever they have "trained" it, an engine takes it at once and runs its decode steps;
read forwards this is a schedule that ends with the iteration. Letting each group start as early as it can in reversed time is
optimal on one engine where lengths are equal: a later start leaves more steps to do and helps no other group. With unequal lengths
the order of emission matters too: longest first, so that forwards the longest are trained last and trainers have others meanwhile.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from pa_npu.dispatch.schedule import Turn
from pa_npu.planning.iteration_model.cluster import Cluster, VirtualGroup

# Of engines, as the turns are computed for them.
_MOST_KINDS = 32


def backwards_turns(
    cluster: Cluster, groups: Sequence[VirtualGroup], places: int, slack: float
) -> tuple[tuple[int, ...], tuple[Turn, ...]]:
    """(order, turns) for expected groups, on all engines as one pool; fractions of a millisecond for a hundred groups.

    places: groups that may be in flight, on all engines together. slack: trainers are taken to need this share of their time, so
    that engines stay a little ahead of them. Turns are in completions, which follow the engines when these are slower or faster
    than was thought, and in seconds after them.
    """
    steps = [group.longest for group in groups]
    # what a group adds to each step while it is in flight: its living sequences, and its share of the prompts
    speeds = list(cluster.engines.values())
    mean_living = sum(sum(group.lengths) for group in groups) / sum(steps)
    mean_prompt = sum(group.prompt_tokens / group.longest for group in groups) / len(groups)
    rates = _kinds([(s.step_s, s.sequence_s * mean_living + s.prompt_token_s * mean_prompt) for s in speeds])

    emitted = _emissions(cluster, groups, slack)
    now_s = clock = 0.0
    ends: list[tuple[float, int]] = []
    started_s: list[float] = []
    ended: list[tuple[float, int]] = []
    number = 0
    while len(ended) < len(groups):
        per_engine = max(1.0, len(ends) / len(speeds))
        step_s = len(speeds) / sum(count / max(a + b * per_engine, 1e-12) for a, b, count in rates)
        next_end_s = now_s + (ends[0][0] - clock) * step_s if ends else math.inf
        if number < len(emitted) and len(ends) < places and max(now_s, emitted[number][0]) <= next_end_s:
            at_s = max(now_s, emitted[number][0])
            clock += (at_s - now_s) / step_s if ends else 0.0
            now_s = at_s
            heapq.heappush(ends, (clock + steps[emitted[number][1]], emitted[number][1]))
            started_s.append(now_s)
            number += 1
        else:
            now_s, clock = next_end_s, ends[0][0]
            ended.append((now_s, heapq.heappop(ends)[1]))
    completions_s = [now_s - at_s for at_s in reversed(started_s)]  # forwards, rising
    order: list[int] = []
    turns: list[Turn] = []
    before = 0
    for ended_s, index in reversed(ended):
        at_s = now_s - ended_s
        while before < len(completions_s) and completions_s[before] <= at_s + 1e-9:
            before += 1
        order.append(index)
        turns.append(Turn(before, at_s - (completions_s[before - 1] if before else 0.0)))
    return tuple(order), tuple(turns)


def _kinds(rates: Sequence[tuple[float, float]]) -> list[tuple[float, float, int]]:
    """Engines that are equal, or in a large cluster nearly so, counted together: (a, b, how many)."""
    size = -(-len(rates) // _MOST_KINDS)
    ranked = sorted(rates)
    parts = [ranked[start : start + size] for start in range(0, len(ranked), size)]
    means = [(sum(a for a, _ in part) / len(part), sum(b for _, b in part) / len(part), len(part)) for part in parts]
    if len({(a, b) for a, b in rates}) == 1:
        return [(*rates[0], len(rates))]
    return means


def _emissions(cluster: Cluster, groups: Sequence[VirtualGroup], slack: float) -> list[tuple[float, int]]:
    """(time, index), rising: when reversed trainers emit which group."""
    if cluster.order == "prompt":  # replicas take their slots in turn, so the last slots come out first
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

"""Schedules for engines of unequal speed: longest first, but slower engines take only what they end in time.

With one order for all engines a slow one gets long groups too, and the iteration waits for it. Here the fastest engines take the
longest group that is left, and each slower one the longest that is expected to end there by the planned end (Reach).
The end that is planned with is the earliest that holds when the iteration is simulated with the groups that are expected, looked
for from the bound upwards. No schedule is shorter than the bound (Horvath, Lam and Sethi 1977, J. ACM 24): for every k, the k
longest groups over the k fastest places.

Lengths are not known exactly, so the controller also tries what follows if slower engines need more time than expected.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pa_npu.dispatch.schedule import Reach, Schedule
from pa_npu.planning.iteration_model.cluster import Cluster, VirtualGroup
from pa_npu.planning.iteration_model.simulate import simulate

# Engines whose speeds differ by less are equal.
EQUAL_SPEED = 1.1
# The planned end over the bound: longest first ends at twice it at the latest (Gonzalez, Ibarra and Sahni 1977, SIAM J. Comput. 6).
ENDS = (1.0, 1.03, 1.06, 1.1, 1.15, 1.3, 1.6, 2.0)
_HOLDS = 1.01


def unequal(cluster: Cluster) -> bool:
    """Whether a group takes longer on some engines than on others."""
    steps = [speed.step_s + speed.sequence_s for speed in cluster.engines.values()]
    return len(steps) > 1 and max(steps) >= EQUAL_SPEED * min(steps)


def matched(
    cluster: Cluster, expected: Sequence[VirtualGroup], schedule: Schedule, slack: float, end: float | None = None
) -> Schedule:
    """`schedule`, whose order is longest first, with what slower engines take. slack: the part of the time that these are taken to
    have, as groups may become longer than expected. end: the planned one over the bound; None: it is looked for."""
    lengths = [group.longest for group in sorted(expected, key=lambda group: group.index)]
    places = {name: _places(cluster, schedule, name, expected) for name in cluster.engines}
    token_s = {name: _token_s(cluster, name, count, expected) for name, count in places.items()}
    fastest_s = min(token_s.values())
    slower = {name: seconds / slack for name, seconds in token_s.items() if seconds >= EQUAL_SPEED * fastest_s}
    bound = bound_s(lengths, {name: (token_s[name], count) for name, count in places.items()})
    if end is not None:
        return replace(schedule, reach=Reach(tuple(lengths), slower, end * bound, end))
    best, best_s = schedule, math.inf
    for factor in ENDS:
        planned = replace(schedule, reach=Reach(tuple(lengths), slower, factor * bound, factor))
        generated_s = simulate(cluster, expected, planned).generated_s
        if generated_s < best_s:
            best, best_s = planned, generated_s
        if best_s <= _HOLDS * factor * bound:
            break
    return best


def bound_s(lengths: Sequence[float], places: Mapping[str, tuple[float, int]]) -> float:
    """No schedule is shorter. lengths: of jobs, in tokens. places: by engine, (seconds per token, how many there are)."""
    speeds = sorted((1 / token_s for token_s, count in places.values() for _ in range(count)), reverse=True)
    longest = sorted(lengths, reverse=True)
    work, rates = list(itertools.accumulate(longest)), list(itertools.accumulate(speeds))
    most = min(len(work), len(rates))
    partial = [tokens / rate for tokens, rate in zip(work[:most], rates[:most], strict=True)]
    return max([*partial, work[-1] / rates[-1]])


def _places(cluster: Cluster, schedule: Schedule, engine: str, expected: Sequence[VirtualGroup]) -> int:
    sequences = min(schedule.windows[0].of(engine), cluster.max_num_seqs)
    return max(1, sequences // len(expected[0].lengths))


def _token_s(cluster: Cluster, engine: str, places: int, expected: Sequence[VirtualGroup]) -> float:
    """Seconds per token of a sequence on an engine whose places are full."""
    speed = cluster.engines[engine]
    return speed.step_s + speed.sequence_s * places * len(expected[0].lengths)

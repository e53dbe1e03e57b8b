"""When engines stop decoding and their devices begin to train, in an iteration in which every device does both.

All devices decode. When what is left fits on fewer engines, the engines of a unit hand their
sequences on, and its replicas train finished groups; the last units follow when the last response
is there. `rest_of` predicts the end of the iteration, in virtual time, under a rule that keeps at
most so many sequences on an engine; `decoding_units` tries a family of such rules at a completion,
and says how many units should decode from now on. A simulator runs the same code
(tools/simulate_roles.py).

In the prediction engines are one pool: with n sequences on m of them a decode step takes  step_s + sequence_s * n / m  seconds. Its
error is corrected at every completion, since only the change that is due now is ever made.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pa_npu.config.schema import Config
from pa_npu.dispatch.assignment import common_end_s
from pa_npu.dispatch.schedule import EngineSpeed

# Rules tried: sequences per engine, between what engines have now and the most that they may have;
# and how many units, of all, change together, since every change makes the others compute the moved
# sequences' tokens once more.
_LEVELS = 10
_TOGETHER = (0.0, 0.125, 0.25)
# A change has to pay by this much of what is left, or the device decodes on: predictions of lengths
# are no better.
_LEAST_GAIN = 0.01


@dataclass(frozen=True)
class Unit:
    """Devices that change their role together. engines: their indices."""

    engines: tuple[int, ...]
    replicas: tuple[int, ...]


def units_of(config: Config) -> list[Unit]:
    """The finest parts of the run of which one can train while the others decode."""
    mesh = config.mesh
    joined = [
        {mesh.place(rank).replica for rank in config.ranks_beside(index)}
        for index in range(config.rollout.engines)
    ]
    together = [
        *joined,
        *({mesh.place(rank).replica for rank in group} for group in mesh.shard_groups()),
    ]
    together += [
        {mesh.place(rank).replica for rank in group}
        for group in mesh.groups("expert_tensor", "expert")
    ]
    parts = [{replica} for replica in range(mesh.data)]
    for one in together:
        touched = [part for part in parts if part & one]
        parts = [part for part in parts if not part & one] + [set().union(*touched)]
    return [
        Unit(
            tuple(index for index, replicas in enumerate(joined) if replicas & part),
            tuple(sorted(part)),
        )
        for part in sorted(parts, key=min)
    ]


@dataclass(frozen=True)
class Rest:
    """The rest of an iteration.

    remaining: tokens to come of each living sequence [sequences]. group: its group's number
    [sequences]. written: its tokens so far, with the prompt, which another engine would have to
    compute [sequences]. decoding: units that decode. engines, replicas: of a unit. trains_s: what
    training each group takes a replica [groups]. ready_s: the same of finished groups that no
    replica has.
    free_s: for each replica that trains, when it will have done what it has. most: sequences on an
    engine. parts: in how many the last groups may be trained, by as many replicas. change_s:
    seconds of a change of roles.
    """

    remaining: npt.NDArray[np.float64]
    group: npt.NDArray[np.int64]
    written: npt.NDArray[np.float64]
    decoding: int
    engines: float
    replicas: float
    trains_s: npt.NDArray[np.float64]
    ready_s: Sequence[float]
    free_s: Sequence[float]
    most: int
    parts: int = 1
    change_s: float = 0.0


@dataclass(frozen=True)
class Rule:
    """Keep at most so many sequences on an engine, and change as many units at a time. sequences 0:
    in turns, nobody changes.
    """

    sequences: float
    together: int = 1


TURNS = Rule(0.0)


def units_by(rule: Rule, rest: Rest, sequences: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Units that decode while so many sequences are living; never more with fewer sequences."""
    if not rule.sequences:
        return np.full(len(sequences), float(rest.decoding))
    needed = np.ceil(sequences / (rule.sequences * rest.engines))
    changed = np.floor((rest.decoding - needed) / rule.together) * rule.together
    return np.asarray(np.maximum(1.0, np.minimum(rest.decoding, rest.decoding - changed)))


def rest_of(rest: Rest, rule: Rule, speed: EngineSpeed) -> float:
    """Seconds from now until all of the iteration is trained, by this rule."""
    order = np.argsort(rest.remaining, kind="stable")
    ends = rest.remaining[order]
    living = np.arange(len(ends), 0, -1, dtype=float)
    units = units_by(rule, rest, living)
    steps = np.diff(ends, prepend=0.0)
    seconds = steps * (speed.step_s + speed.sequence_s * living / (units * rest.engines))
    # units that change as each of these begins
    left = -np.diff(units, prepend=float(rest.decoding))
    moving = np.flatnonzero(left)
    if len(moving):
        # a mover has been decoded for as long as those before it
        tokens = rest.written.mean() + np.concatenate([[0.0], ends[:-1]])[moving]
        share = left[moving] / (units[moving] + left[moving])
        seconds[moving] += (
            speed.prompt_token_s * share * living[moving] * tokens / (units[moving] * rest.engines)
        )
    clock = np.cumsum(seconds)
    begins = clock - seconds
    ready = np.full(len(rest.trains_s), 0.0)
    np.maximum.at(ready, rest.group[order], clock)
    decoded = float(clock[-1]) if len(clock) else 0.0
    per_unit = max(1, round(rest.replicas))
    free = list(rest.free_s)
    for index in moving:
        free += [float(begins[index]) + rest.change_s] * (per_unit * round(float(left[index])))
    last = round(float(units[-1])) if len(units) else rest.decoding
    free += [decoded + rest.change_s] * (per_unit * last)
    arriving = sorted(
        [(0.0, cost) for cost in rest.ready_s]
        + list(zip(ready.tolist(), rest.trains_s.tolist(), strict=True))
    )
    return max(decoded, trained_s(arriving, free, rest.parts))


def trained_s(arriving: Sequence[tuple[float, float]], free: list[float], parts: int = 1) -> float:
    """When the last of the groups (ready at, takes) is trained: whoever is free first takes the
    longest that is there.

    parts: when the last has arrived, replicas share what is left, each group in so many parts at
    most.
    """
    heapq.heapify(free)
    waiting: list[float] = []
    number, here, end = 0, 0.0, 0.0  # here: when the last of what waits arrived
    while number < len(arriving) or waiting:
        at = max(here, heapq.heappop(free))
        if not waiting:
            at = here = max(at, arriving[number][0])
        while number < len(arriving) and arriving[number][0] <= at:
            heapq.heappush(waiting, -arriving[number][1])
            number += 1
        if parts > 1 and number == len(arriving):
            shared = common_end_s([max(here, one) for one in (at, *free)], -sum(waiting))
            return max(end, shared, at - min(waiting) / parts)
        at -= heapq.heappop(waiting)
        end = max(end, at)
        heapq.heappush(free, at)
    return end


def rules_for(rest: Rest) -> list[Rule]:
    """The family that is tried, in turns first."""
    now = max(1.0, len(rest.remaining) / (rest.decoding * rest.engines))
    if rest.decoding < 2 or not len(rest.remaining):
        return [TURNS]
    levels = np.unique(np.geomspace(min(1.0, now), max(now, rest.most), _LEVELS))
    together = sorted({max(1, int(part * rest.decoding)) for part in _TOGETHER})
    return [TURNS, *(Rule(float(level), count) for level in levels for count in together)]


def decoding_units(rest: Rest, speed: EngineSpeed) -> tuple[int, float, float]:
    """(units that decode from now on, seconds until the end by the best rule, seconds in turns)."""
    rules = rules_for(rest)
    ends = {rule: rest_of(rest, rule, speed) for rule in rules}
    best, turns_s = min(rules, key=ends.__getitem__), ends[TURNS]
    if ends[best] > (1.0 - _LEAST_GAIN) * turns_s:
        return rest.decoding, turns_s, turns_s
    now = units_by(best, rest, np.asarray([float(len(rest.remaining))]))
    return int(now[0]), ends[best], turns_s

"""Decides how many devices decode and how many train, in an iteration whose devices do both.

At first all devices decode. When the sequences that are left fit on fewer engines, the engines of a
unit move theirs to the others, and its replicas train finished groups. The last units follow when
the last response is there.

predict_end_s    predicts the end of the iteration, in virtual time, under a rule that limits the
                 sequences on an engine
decoding_units   tries a family of such rules at a completion, and returns how many units should
                 decode from now on

A simulator runs the same code (tools/simulate_roles.py). In the prediction engines are one pool:
with n sequences on m of them a decode step takes  step_s + sequence_s * n / m  seconds. Its error
is corrected at every completion, since only the change that is due now is ever made.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pa_npu.config.schema import Config
from pa_npu.dispatch.assignment import common_end_s
from pa_npu.dispatch.schedule import EngineSpeed

# Limits of sequences per engine that are tried, between the present number and the largest.
_NUM_LIMITS = 10
# Shares of the decoding units that may change together. Every change makes the other engines
# compute the tokens of the moved sequences once more.
_TOGETHER = (0.0, 0.125, 0.25)
# A change has to save this share of the time that is left, or the device decodes on. Predictions of
# lengths are not more exact.
_MIN_GAIN = 0.01


@dataclass(frozen=True)
class RoleUnit:
    """Devices that change their role together: indices of their engines and of their replicas."""

    engines: tuple[int, ...]
    replicas: tuple[int, ...]


def role_units(config: Config) -> list[RoleUnit]:
    """Returns the smallest parts of the run of which one can train while the others decode.

    Replicas belong together that share an engine, shards of weights, or experts.
    """
    mesh = config.mesh

    def replicas_of(ranks: Iterable[int]) -> set[int]:
        return {mesh.place(rank).replica for rank in ranks}

    engine_replicas = [
        replicas_of(config.devices.ranks_beside(index)) for index in range(config.rollout.engines)
    ]
    bound = list(engine_replicas)
    bound += [replicas_of(ranks) for ranks in mesh.shard_groups()]
    bound += [replicas_of(ranks) for ranks in mesh.groups("expert_tensor", "expert")]

    parts = [{replica} for replica in range(mesh.data)]
    for replicas in bound:
        touched = [part for part in parts if part & replicas]
        parts = [part for part in parts if not part & replicas]
        parts.append(set().union(*touched))

    units = []
    for part in sorted(parts, key=min):
        engines = [index for index, replicas in enumerate(engine_replicas) if replicas & part]
        units.append(RoleUnit(engines=tuple(engines), replicas=tuple(sorted(part))))
    return units


@dataclass(frozen=True)
class Rest:
    """The rest of an iteration.

    remaining: [sequences] tokens to come of each living sequence.
    group: [sequences] number of its group.
    written: [sequences] its tokens so far, prompt included, which another engine would have to
        compute.
    decoding: units that decode.
    engines, replicas: numbers for each unit.
    trains_s: [groups] seconds that a replica takes for each group of living sequences.
    ready_s: the same for finished groups that no replica has.
    free_s: for each replica that trains, when it will have trained what it has.
    max_sequences: on an engine.
    parts: largest number of parts in which the last groups may be trained, by as many replicas.
    change_s: seconds of a change of roles.
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
    max_sequences: int
    parts: int = 1
    change_s: float = 0.0


@dataclass(frozen=True)
class Rule:
    """A rule that keeps at most `sequences` on an engine, and changes `together` units at a time.

    With sequences=0 no unit changes before all sequences have ended (in turns).
    """

    sequences: float
    together: int = 1


TURNS = Rule(0.0)


def units_by(rule: Rule, rest: Rest, sequences: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns how many units decode while so many sequences live; never more with fewer."""
    if not rule.sequences:
        return np.full(len(sequences), float(rest.decoding))
    needed = np.ceil(sequences / (rule.sequences * rest.engines))
    changed = np.floor((rest.decoding - needed) / rule.together) * rule.together
    return np.asarray(np.maximum(1.0, np.minimum(rest.decoding, rest.decoding - changed)))


def predict_end_s(rest: Rest, rule: Rule, speed: EngineSpeed) -> float:
    """Returns the seconds from now until all of the iteration is trained, under this rule."""
    order = np.argsort(rest.remaining, kind="stable")
    ends = rest.remaining[order]
    living = np.arange(len(ends), 0, -1, dtype=float)
    units = units_by(rule, rest, living)
    steps = np.diff(ends, prepend=0.0)
    seconds = steps * (speed.step_s + speed.sequence_s * living / (units * rest.engines))
    # units that change as each interval between two ends begins
    left = -np.diff(units, prepend=float(rest.decoding))
    moving = np.flatnonzero(left)
    if len(moving):
        # a sequence that moves has been decoded until the end before
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
    num_last = round(float(units[-1])) if len(units) else rest.decoding
    free += [decoded + rest.change_s] * (per_unit * num_last)
    arriving = [(0.0, seconds) for seconds in rest.ready_s]
    arriving += zip(ready.tolist(), rest.trains_s.tolist(), strict=True)
    arriving.sort()
    return max(decoded, trained_s(arriving, free, rest.parts))


def trained_s(arriving: Sequence[tuple[float, float]], free: list[float], parts: int = 1) -> float:
    """Returns when the last group is trained. The replica that is free first takes the longest
    group that is there.

    Args:
        arriving: (time at which it is ready, seconds that it takes) of each group, by rising time.
        free: when each replica is free; becomes a heap.
        parts: once the last group has arrived, replicas share what is left, each group in at most
            so many parts.
    """
    heapq.heapify(free)
    waiting: list[float] = []  # a heap of negative durations, the longest first
    number = 0  # of the next group to arrive
    here = 0.0  # when the last group that waits arrived
    end = 0.0
    while number < len(arriving) or waiting:
        at = max(here, heapq.heappop(free))
        if not waiting:
            at = here = max(at, arriving[number][0])
        while number < len(arriving) and arriving[number][0] <= at:
            heapq.heappush(waiting, -arriving[number][1])
            number += 1
        if parts > 1 and number == len(arriving):
            free_s = [max(here, replica_s) for replica_s in (at, *free)]
            shared = common_end_s(free_s, -sum(waiting))
            return max(end, shared, at - min(waiting) / parts)
        at -= heapq.heappop(waiting)
        end = max(end, at)
        heapq.heappush(free, at)
    return end


def rules_for(rest: Rest) -> list[Rule]:
    """Returns the rules that are tried, TURNS first."""
    if rest.decoding < 2 or not len(rest.remaining):
        return [TURNS]
    present = max(1.0, len(rest.remaining) / (rest.decoding * rest.engines))
    largest = max(present, rest.max_sequences)
    limits = np.unique(np.geomspace(min(1.0, present), largest, _NUM_LIMITS))
    counts = sorted({max(1, int(share * rest.decoding)) for share in _TOGETHER})
    rules = itertools.product(limits.tolist(), counts)
    return [TURNS, *(Rule(sequences=limit, together=count) for limit, count in rules)]


def decoding_units(rest: Rest, speed: EngineSpeed) -> tuple[int, float, float]:
    """Returns (units that decode from now on, seconds until the end by the best rule, seconds until
    the end in turns).
    """
    rules = rules_for(rest)
    ends = {rule: predict_end_s(rest, rule, speed) for rule in rules}
    best = min(rules, key=ends.__getitem__)
    turns_s = ends[TURNS]
    if ends[best] > (1.0 - _MIN_GAIN) * turns_s:
        return rest.decoding, turns_s, turns_s
    units = units_by(best, rest, np.asarray([float(len(rest.remaining))]))
    return int(units[0]), ends[best], turns_s

"""Decides how many devices decode and how many train, in an iteration whose devices do both.

At first all devices decode. When the sequences that are left fit on fewer engines, the engines of a
unit move theirs to the others, and its replicas train finished groups. The last units follow when
the last response is there.

predict          predicts the end of the iteration, in virtual time, under a rule that limits the
                 sequences on an engine
decoding_units   tries a family of such rules at a completion, and returns how many units should
                 decode from now on

A simulator runs the same code (tools/simulate_roles.py). In the prediction engines are one pool:
with n sequences on m of them a decode step takes  step_s + sequence_s * n / m  seconds. Its error
is corrected at every completion, since only the change that is due now is ever made.

Turns are the rule, and a change is the exception: it is made only if it gains with the lengths that
are expected, and also if they are shorter or longer by what earlier predictions were off.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

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
# A change has to save this share of the time that is left, or the device decodes on.
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
class Owned:
    """A group of schedule.order=prompt: the replica that its index gives it to."""

    replica: int
    index: int


@dataclass(frozen=True)
class Owners:
    """The replicas of groups whose index decides who trains them. A replica trains its groups by
    rising index, whatever the arrival, so a group that is late holds up those behind it.

    living, ready: of each group of Rest.trains_s and of Rest.ready_s.
    free: the replica of each number of Rest.free_s.
    changing: the replicas of each decoding unit, in the order in which units would change.
    """

    living: Sequence[Owned]
    ready: Sequence[Owned]
    free: Sequence[int]
    changing: Sequence[Sequence[int]]


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
    slower: what multiplies the seconds of decoding once a unit has changed, beyond the model: what
        moves cost, and what a device that trains takes from one that decodes.
    spread: relative error of earlier predictions of the decoding to come.
    owners: who trains which group, where its index decides it; None where any replica may.
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
    slower: float = 1.0
    spread: float = 0.0
    owners: Owners | None = None


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


class Predicted(NamedTuple):
    """Seconds from now until all of the iteration is trained, and until its last response."""

    end_s: float
    decoded_s: float


def predict(rest: Rest, rule: Rule, speed: EngineSpeed) -> Predicted:
    """Predicts the rest of an iteration under this rule."""
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
        seconds[moving[0] :] *= rest.slower
    clock = np.cumsum(seconds)
    begins = clock - seconds
    ready = np.full(len(rest.trains_s), 0.0)
    np.maximum.at(ready, rest.group[order], clock)
    decoded = float(clock[-1]) if len(clock) else 0.0
    # when units are free: those that change, and then those that decode to the end
    changes = [(float(begins[index]), round(float(left[index]))) for index in moving]
    changes.append((decoded, round(float(units[-1])) if len(units) else rest.decoding))
    free_s = [at_s + rest.change_s for at_s, count in changes for _ in range(count)]
    if rest.owners is not None:
        trained = _owned_trained_s(rest, rest.owners, ready.tolist(), free_s)
        return Predicted(max(decoded, trained), decoded)
    per_unit = max(1, round(rest.replicas))
    free = list(rest.free_s)
    for at_s in free_s:
        free += [at_s] * per_unit
    arriving = [(0.0, seconds) for seconds in rest.ready_s]
    arriving += zip(ready.tolist(), rest.trains_s.tolist(), strict=True)
    arriving.sort()
    return Predicted(max(decoded, trained_s(arriving, free, rest.parts)), decoded)


def _owned_trained_s(
    rest: Rest, owners: Owners, ready_at_s: Sequence[float], unit_free_s: Sequence[float]
) -> float:
    """Returns when the last group is trained, each by its own replica.

    Args:
        ready_at_s: when each group of living sequences is complete.
        unit_free_s: when each decoding unit is free, in the order of `owners.changing`.
    """
    queues: dict[int, list[tuple[int, float, float]]] = defaultdict(list)
    for owned, seconds in zip(owners.ready, rest.ready_s, strict=True):
        queues[owned.replica].append((owned.index, 0.0, seconds))
    living = zip(owners.living, ready_at_s, rest.trains_s.tolist(), strict=True)
    for owned, at_s, seconds in living:
        queues[owned.replica].append((owned.index, at_s, seconds))
    free = dict(zip(owners.free, rest.free_s, strict=True))
    for replicas, at_s in zip(owners.changing, unit_free_s, strict=True):
        free |= dict.fromkeys(replicas, at_s)
    end_s = 0.0
    for replica, queue in queues.items():
        clock_s = free[replica]
        for _, at_s, seconds in sorted(queue):
            clock_s = max(clock_s, at_s) + seconds
        end_s = max(end_s, clock_s)
    return end_s


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


class Decision(NamedTuple):
    """Units that decode from now on. Seconds until the end of the iteration by this decision and in
    turns, and until its last response by this decision.
    """

    units: int
    end_s: float
    turns_s: float
    decoded_s: float


def decoding_units(rest: Rest, speed: EngineSpeed) -> Decision:
    """Decides how many units decode from now on."""
    turns = predict(rest, TURNS, speed)
    stay = Decision(rest.decoding, turns.end_s, turns.end_s, turns.decoded_s)
    enough_s = (1.0 - _MIN_GAIN) * turns.end_s
    if _least_end_s(rest, turns, speed) > enough_s:
        return stay
    ends = {rule: predict(rest, rule, speed) for rule in rules_for(rest)[1:]}
    best = min(ends, key=ends.__getitem__, default=TURNS)
    if best is TURNS or ends[best].end_s > enough_s:
        return stay
    units = int(units_by(best, rest, np.asarray([float(len(rest.remaining))]))[0])
    if units < rest.decoding and not _is_clear(rest, best, speed):
        return stay
    return Decision(units, ends[best].end_s, turns.end_s, ends[best].decoded_s)


def _least_end_s(rest: Rest, turns: Predicted, speed: EngineSpeed) -> float:
    """Returns seconds that no rule can be below: the work that is left, decoded by as few engines
    as a step allows, divided among all units; and one group after all decoding.
    """
    per_unit = max(1, round(rest.replicas))
    units = rest.decoding + len(rest.free_s) / per_unit
    decoding_s = speed.step_s * float(rest.remaining.max(initial=0.0))
    decoding_s += speed.sequence_s * float(rest.remaining.sum()) / max(rest.engines, 1e-9)
    training_s = (float(rest.trains_s.sum()) + sum(rest.ready_s) + sum(rest.free_s)) / per_unit
    last_s = float(rest.trains_s.min(initial=np.inf)) / rest.parts if len(rest.trains_s) else 0.0
    return max((decoding_s + training_s) / units, turns.decoded_s + last_s)


def _is_clear(rest: Rest, rule: Rule, speed: EngineSpeed) -> bool:
    """Returns whether the rule gains also if all that is left is shorter, or longer, by `spread`."""
    for factor in (1.0 - rest.spread, 1.0 + rest.spread):
        varied = replace(rest, remaining=np.maximum(0.0, factor * rest.remaining))
        turns_s = predict(varied, TURNS, speed).end_s
        if predict(varied, rule, speed).end_s > (1.0 - _MIN_GAIN) * turns_s:
            return False
    return True

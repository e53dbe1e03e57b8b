"""The handful of schedules that a border chooses among: constant windows by orders of dispatch, and turns found backwards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pa_npu.config.words import counted
from pa_npu.dispatch.order import OrderName, dispatch_order
from pa_npu.dispatch.schedule import Schedule, Windows, same_windows
from pa_npu.planning.iteration_model.backwards import backwards_turns
from pa_npu.planning.iteration_model.cluster import Cluster, VirtualGroup
from pa_npu.planning.iteration_model.matched import EQUAL_SPEED, matched

_SHARES_OF_ALL = (1.0, 0.75, 0.5, 0.375, 0.25)
_WAVES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
# In the first iteration engines that have room for nearly half of their share get what they have room for; and windows of fewer
# groups than this are not halved, for half of a small window costs much.
_NEARLY_ALL = 0.8
_LEAST_TO_HALVE = 4
# Trainers are taken to need so much of their time, when turns are made: engines that stay a little ahead keep them busy.
SLACKS = (1.0, 0.95, 0.85)
# Slower engines are taken to have so much of the time that is left: groups may become longer than expected.
MATCHED_SLACKS = (1.0, 0.8, 0.65)


@dataclass(frozen=True)
class Candidate:
    """kind and places (groups in flight per engine) are the same from border to border, whatever the lengths are."""

    kind: Literal["window", "turns", "matched"]
    places: int
    order: OrderName
    slack: float = 1.0

    @property
    def name(self) -> str:
        how = {
            "window": self.order,
            "turns": f"one after another at {self.slack:.0%} of the trainers' time",
            "matched": f"longest-first, slower engines in {self.slack:.0%} of the time left",
        }[self.kind]
        return f"{counted(self.places, 'group')} per engine, {how}"


def place_levels(share: int, most: int) -> list[int]:
    """Groups in flight per engine worth trying, falling: shares of the most, and what cuts an engine's share into even waves."""
    levels = {max(1, math.ceil(most * part)) for part in _SHARES_OF_ALL}
    levels |= {places for waves in _WAVES if (places := math.ceil(share / waves)) <= most}
    return sorted(levels, reverse=True)


def constant_windows(cluster: Cluster, places: int, most: int, group_sequences: int) -> Windows:
    """`places` groups per engine on average, more on faster engines, so that all take the same time for a group.

    No engine has more than `most`.
    """
    speeds = cluster.engines
    at = {
        name: speed.step_s + speed.sequence_s * places * group_sequences + speed.prompt_token_s
        for name, speed in speeds.items()
    }
    if not at or min(at.values()) <= 0 or max(at.values()) < EQUAL_SPEED * min(at.values()):
        return same_windows(tuple(speeds), places * group_sequences)
    total, rate = places * len(at), sum(1 / step_s for step_s in at.values())
    groups = {name: min(most, max(1, round(total / step_s / rate))) for name, step_s in at.items()}
    return Windows({name: count * group_sequences for name, count in groups.items()}, places * group_sequences)


def window_schedule(
    candidate: Candidate, cluster: Cluster, expected_longest: Sequence[float], most: int, group_sequences: int
) -> Schedule:
    """A constant window; replicas' shares of an iteration are ordered each by itself."""
    indices = dispatch_order(candidate.order, expected_longest, cluster.updates)
    if candidate.places == most:  # as much as there is room for, on every engine
        windows = same_windows(tuple(cluster.engines), most * group_sequences)
    else:
        windows = constant_windows(cluster, candidate.places, most, group_sequences)
    return Schedule(candidate.name, tuple(indices), (windows,))


def matched_schedule(
    candidate: Candidate,
    cluster: Cluster,
    expected: Sequence[VirtualGroup],
    windows: Windows,
    end: float | None = None,
) -> Schedule:
    """For engines of unequal speed; `windows` as they would be without it. end: as `matched` has it."""
    order = dispatch_order("longest-first", [group.longest for group in expected])
    return matched(cluster, expected, Schedule(candidate.name, tuple(order), (windows,)), candidate.slack, end)


def turns_schedule(
    candidate: Candidate, cluster: Cluster, expected: Sequence[VirtualGroup], group_sequences: int
) -> Schedule:
    """Turns that end the iteration early if lengths and speeds are as expected."""
    places = candidate.places * len(cluster.engines)
    order, turns = backwards_turns(cluster, expected, places, candidate.slack)
    windows = constant_windows(cluster, candidate.places, candidate.places, group_sequences)
    return Schedule(candidate.name, order, (windows,), turns)


@dataclass(frozen=True)
class FirstEngines:
    """Engines of which nothing was measured yet. speeds: expected, of those that differ from an engine of 1. room: groups
    that each has room for."""

    names: Sequence[str]
    speeds: Mapping[str, float]
    room: int

    def windows(self, places: int, group_sequences: int, from_group: int = 0) -> Windows:
        """`places` groups per engine on average, in proportion to their speeds."""
        mean = sum(self.speeds.get(name, 1.0) for name in self.names) / max(1, len(self.names))
        if all(self.speeds.get(name, 1.0) == mean for name in self.names):
            return same_windows(self.names, places * group_sequences, from_group)
        groups = {name: round(places * self.speeds.get(name, 1.0) / mean) for name in self.names}
        sequences = {name: min(self.room, max(1, count)) * group_sequences for name, count in groups.items()}
        return Windows(sequences, places * group_sequences, from_group)


def first_schedule(
    engines: FirstEngines,
    expected_longest: Sequence[float],
    group_sequences: int,
    most: int,
    order: OrderName,
    updates: int,
) -> Schedule:
    """For the first iteration, of which nothing was seen: two waves where the engines have room for one, and at first half of that.

    What a step takes alone and what each sequence adds are told apart by two levels of sequences in flight.
    """
    indices = dispatch_order(order, expected_longest, updates)
    num_engines = max(1, len(engines.names))
    places = math.ceil(len(indices) / num_engines / 2)
    places = max(1, most if places >= _NEARLY_ALL * most else places)
    half = math.ceil(places / 2) if places >= _LEAST_TO_HALVE else places
    from_group = min(len(indices) // 2, 2 * half * num_engines)
    windows = (
        engines.windows(half, group_sequences),
        engines.windows(places, group_sequences, from_group),
    )
    return Schedule(f"{half}, then {counted(places, 'group')} per engine, {order}", tuple(indices), windows)

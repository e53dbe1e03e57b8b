"""An iteration's schedule: in which order its groups go out, how many at a time on each engine, and when.

A schedule is decided at the border, before the first group (pa_npu/planning/iteration_model), and
followed by the coordinator and, in virtual time, by the model that it was chosen with: both through
Dispatching, which has no clock and waits for nothing.

Three things keep groups from going out at once:

  order     the permutation of the iteration's indices in which they go, by the expected length of a
            group's longest response, until which it holds its room on an engine (dispatch_order)
  windows   sequences that an engine may have in flight, which may change with the number of groups
            dispatched so far
  turns     "not before so many groups are complete, and so many seconds after the last of these":
            with equal lengths all groups that begin together end together, so they begin one after
            another, as fast as trainers will take them

What is sampled follows from a group's index, so a schedule changes times and, with
schedule.order=completion, slots, never a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

OrderName = Literal["longest-first", "shortest-first", "in-order"]
ORDERS: dict[OrderName, float] = {"longest-first": -1.0, "shortest-first": 1.0, "in-order": 0.0}
"""By name, what an expected length counts in it."""


def dispatch_order(name: OrderName, expected: Sequence[float], shares: int = 1) -> list[int]:
    """A permutation of the indices of `expected` (lengths in tokens), within each of `shares` equal
    parts of the sequence.

    longest-first   Engines end early: Graham 1969 (SIAM J. Appl. Math. 17), no list of jobs on m
                    equal machines ends later than 4/3 - 1/(3m) of the best one when the jobs come
                    by falling length. Trainers begin late.
    shortest-first  Trainers begin early and the longest groups are the last: where trainers are the
                    slower side.
    in-order        As the prompts come: where trainers take groups by their index
                    (schedule.order=prompt).

    Groups that share an optimizer step should not be those of one length, so each step's share is
    ordered by itself. Equal lengths keep their order.
    """
    sign, size = ORDERS[name], len(expected) // shares
    return [
        index
        for start in range(0, size * shares, size)
        for index in sorted(range(start, start + size), key=lambda index: sign * expected[index])
    ]


@dataclass(frozen=True)
class EngineSpeed:
    """A decode step with n sequences takes step_s + sequence_s * n seconds; a group's prompt once
    prompt_token_s per token.

    Nothing decodes while a prompt is computed. The prompt is computed once for all responses of its
    group (prefix sharing).
    """

    step_s: float
    sequence_s: float
    prompt_token_s: float = 0.0

    def scaled(self, factor: float) -> EngineSpeed:
        return EngineSpeed(
            factor * self.step_s, factor * self.sequence_s, factor * self.prompt_token_s
        )


@dataclass(frozen=True)
class Windows:
    """Sequences in flight per engine, for groups from the from_group-th dispatched on; `others`:
    engines that are not named.
    """

    sequences: Mapping[str, int]
    others: int
    from_group: int = 0

    def of(self, engine: str) -> int:
        return self.sequences.get(engine, self.others)


@dataclass(frozen=True)
class Turn:
    """When a group may go: delay_s after the `after`-th completion, or, with after=0, after the
    iteration's beginning.
    """

    after: int
    delay_s: float


@dataclass(frozen=True)
class Reach:
    """Which of the groups that are left an engine takes, where engines are of unequal speed.

    lengths: tokens expected of each group's longest response, by its index. token_s: seconds per
    token of the engines that take only what they are expected to end by end_s, seconds from the
    iteration's beginning. Engines that are not named take the next in order.
    """

    lengths: tuple[float, ...]
    token_s: Mapping[str, float]
    end_s: float

    def place(self, engine: str, left: Sequence[int], now_s: float) -> int:
        """Place in `left`, indices in order of dispatch, of the first group that ends in time; of
        the shortest where none does.
        """
        seconds = self.token_s.get(engine)
        if seconds is None:
            return 0
        limit = (self.end_s - now_s) / seconds
        fits = (place for place, index in enumerate(left) if self.lengths[index] <= limit)
        return next(fits, min(range(len(left)), key=lambda place: self.lengths[left[place]]))


@dataclass(frozen=True)
class Schedule:
    """order: indices in order of dispatch. windows: by rising from_group, the first from 0. turns:
    of the first groups in order.

    name: what the log and the record call it. Groups beyond `order` (replacements) follow it as
    they come, without turns.
    reach: which of the groups that are left an engine takes, where that is not the next in order.
    """

    name: str
    order: tuple[int, ...]
    windows: tuple[Windows, ...]
    turns: tuple[Turn, ...] = ()
    reach: Reach | None = None

    @property
    def largest_window(self) -> int:
        """The most sequences that an engine may have in flight at any time."""
        return max(max((*windows.sequences.values(), windows.others)) for windows in self.windows)


def turn_s(
    turns: Sequence[Turn], number: int, completed_s: Sequence[float], num_engines: int
) -> float:
    """When the turn of the number-th group comes: a time, which may be past, or inf: not before
    another completes.

    completed_s: when others have, rising. Where fewer groups than engines are in flight the next
    one goes whatever its turn: an engine that stands idle is never of use, and a plan that was
    wrong about its speed can so not stop the iteration.
    """
    if number >= len(turns) or number - len(completed_s) < num_engines:
        return 0.0
    turn = turns[number]
    if len(completed_s) < turn.after:
        return math.inf
    return turn.delay_s + (completed_s[turn.after - 1] if turn.after else 0.0)


@dataclass
class Dispatching:
    """One iteration's progress against its schedule. Seconds count from the iteration's beginning.

    num_engines: that serve and take groups by their windows.
    """

    schedule: Schedule
    num_engines: int
    num_dispatched: int = 0
    _completed_s: list[float] = field(default_factory=list)
    _level: int = 0  # of the windows in force

    def dispatched(self) -> None:
        """The next group has been given to an engine."""
        self.num_dispatched += 1
        windows = self.schedule.windows
        while (
            self._level + 1 < len(windows)
            and windows[self._level + 1].from_group <= self.num_dispatched
        ):
            self._level += 1

    def completed(self, at_s: float) -> None:
        """A group's last response is there."""
        self._completed_s.append(at_s)

    def ready_at(self) -> float:
        """When the next group may go, if an engine has room: a time, which may be past, or inf: not
        before another completes.
        """
        return turn_s(self.schedule.turns, self.num_dispatched, self._completed_s, self.num_engines)

    def window(self, engine: str) -> int:
        """Sequences that the engine may have in flight with the next group."""
        return self.schedule.windows[self._level].of(engine)


class Load(Protocol):
    """An engine's load in flight: sequences, and the tokens that are expected of them."""

    @property
    def in_flight_sequences(self) -> int: ...

    @property
    def in_flight_tokens(self) -> float: ...


def engine_with_room(
    loads: Mapping[str, Load],
    sequences: int,
    window: Callable[[str], int],
) -> str | None:
    """The engine for `sequences` more: among those with room the one with the fewest tokens in
    flight for its window.

    An engine with twice the window is one that is twice as fast, so it is as full with twice the
    tokens. An idle engine takes anything, so that a group larger than the window still runs. None:
    no engine has room.

    """
    best, least = None, math.inf
    for name, load in loads.items():
        limit = window(name)
        if load.in_flight_sequences and load.in_flight_sequences + sequences > limit:
            continue
        fill = load.in_flight_tokens / max(1, limit)
        if fill < least:
            best, least = name, fill
    return best


def with_own_windows(schedule: Schedule, own: Mapping[str, int]) -> Schedule:
    """The same, but for engines with windows of their own, which have these."""
    if not own:
        return schedule
    windows = tuple(
        replace(windows, sequences={**windows.sequences, **own}) for windows in schedule.windows
    )
    return replace(schedule, windows=windows)


def same_windows(engines: Sequence[str], sequences: int, from_group: int = 0) -> Windows:
    """One window for all engines."""
    return Windows(dict.fromkeys(engines, sequences), sequences, from_group)

"""An iteration's schedule: the order of its groups, how many are in flight, and when each goes.

A schedule is decided at the border, before the first group (pa_npu/planning/iteration_model). The
coordinator follows it, and so does, in virtual time, the model that it was chosen with: both
through Dispatching, which has no clock and waits for nothing.

A schedule has three parts:

  order     the permutation of the iteration's indices in which groups go out, by the expected
            length of a group's longest response, until which it holds its room on an engine
            (dispatch_order)
  windows   sequences that an engine may have in flight; they may change with the number of groups
            dispatched so far
  turns     for each group, how many others must be complete before it, and how many seconds ago.
            With equal lengths all groups that begin together end together, so they begin one after
            another, as fast as trainers will take them.

The samples follow from a group's index, so a schedule changes times and, with
schedule.order=completion, slots, but never a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

OrderName = Literal["longest-first", "shortest-first", "in-order"]
ORDERS: dict[OrderName, float] = {"longest-first": -1.0, "shortest-first": 1.0, "in-order": 0.0}
"""The factor of an expected length in the sorting key of each order."""


def dispatch_order(name: OrderName, expected: Sequence[float], shares: int = 1) -> list[int]:
    """Returns a permutation of the indices of `expected` (lengths in tokens), within each of
    `shares` equal parts of the sequence.

    longest-first   Engines end early: with jobs by falling length no list schedule on m equal
                    machines takes more than 4/3 - 1/(3m) of the best one (Graham 1969, SIAM J.
                    Appl. Math. 17). Trainers begin late.
    shortest-first  Trainers begin early, and the longest groups come last; for runs in which
                    trainers are the slower side.
    in-order        As the prompts come; for trainers that take groups by their index
                    (schedule.order=prompt).

    Groups that share an optimizer step should not all be of one length, so each step's share is
    ordered by itself. Equal lengths keep their order.
    """
    sign = ORDERS[name]
    size = len(expected) // shares
    order: list[int] = []
    for start in range(0, size * shares, size):
        order += sorted(range(start, start + size), key=lambda index: sign * expected[index])
    return order


@dataclass(frozen=True)
class EngineSpeed:
    """The speed of an engine: a decode step with n sequences takes step_s + sequence_s * n seconds,
    and a prompt takes prompt_token_s per token.

    Nothing decodes while a prompt is computed. A prompt is computed once for all responses of its
    group (prefix sharing).
    """

    step_s: float
    sequence_s: float
    prompt_token_s: float = 0.0

    def scaled(self, factor: float) -> EngineSpeed:
        """Returns the speed of an engine whose seconds are `factor` times as many."""
        return EngineSpeed(
            step_s=factor * self.step_s,
            sequence_s=factor * self.sequence_s,
            prompt_token_s=factor * self.prompt_token_s,
        )


@dataclass(frozen=True)
class Windows:
    """Sequences that engines may have in flight.

    sequences: by engine.
    others: for engines that are not named.
    from_group: number of groups dispatched from which on these windows hold.
    """

    sequences: Mapping[str, int]
    others: int
    from_group: int = 0

    def on_engine(self, name: str) -> int:
        """Returns the window of the engine `name`, in sequences."""
        return self.sequences.get(name, self.others)


@dataclass(frozen=True)
class DispatchTurn:
    """When a group may go: delay_s after the `after`-th completion, or, with after=0, after the
    iteration's beginning.
    """

    after: int
    delay_s: float


@dataclass(frozen=True)
class SlowEngineLimit:
    """Limits the groups that slower engines take to those that they are expected to end in time.

    lengths: by group's index, expected tokens of its longest response.
    token_s: seconds per token of each slower engine. Other engines take the next group in order.
    end_s: the time in question, in seconds from the iteration's beginning.
    """

    lengths: tuple[float, ...]
    token_s: Mapping[str, float]
    end_s: float

    def place(self, engine: str, left: Sequence[int], now_s: float) -> int:
        """Returns the place in `left`, indices in order of dispatch, of the first group that ends
        in time, or of the shortest group where none does.
        """
        seconds = self.token_s.get(engine)
        if seconds is None:
            return 0
        limit = (self.end_s - now_s) / seconds
        for place, index in enumerate(left):
            if self.lengths[index] <= limit:
                return place
        return min(range(len(left)), key=lambda place: self.lengths[left[place]])


@dataclass(frozen=True)
class Schedule:
    """When the groups of an iteration go to which engine.

    name: the name in logs and records.
    order: indices in order of dispatch. Groups beyond it (replacements) follow as they come.
    windows: by rising from_group, the first from 0.
    turns: for the first groups in order; those beyond them have none.
    slow_engine_limit: the groups that slower engines take; None where every engine takes the next
    in order.
    """

    name: str
    order: tuple[int, ...]
    windows: tuple[Windows, ...]
    turns: tuple[DispatchTurn, ...] = ()
    slow_engine_limit: SlowEngineLimit | None = None

    @property
    def largest_window(self) -> int:
        """The largest number of sequences that an engine may have in flight at any time."""
        return max(max([windows.others, *windows.sequences.values()]) for windows in self.windows)


def turn_s(
    turns: Sequence[DispatchTurn], number: int, completed_s: Sequence[float], num_engines: int
) -> float:
    """Returns when the turn of the number-th group comes: a time, which may be past, or inf where
    another group must complete first.

    While fewer groups than engines are in flight the next one goes whatever its turn. An idle
    engine is never of use, and so a plan that was wrong about speeds cannot stop the iteration.

    completed_s: when groups have completed, rising.
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

    num_engines: engines that serve, and take groups by their windows.
    """

    schedule: Schedule
    num_engines: int
    num_dispatched: int = 0
    _completed_s: list[float] = field(default_factory=list)
    _windows_index: int = 0  # which of schedule.windows is in force

    def note_dispatched(self) -> None:
        """Notes that the next group has been given to an engine."""
        self.num_dispatched += 1
        windows = self.schedule.windows
        while (
            self._windows_index + 1 < len(windows)
            and windows[self._windows_index + 1].from_group <= self.num_dispatched
        ):
            self._windows_index += 1

    def note_completed(self, at_s: float) -> None:
        """Notes that a group's last response is there."""
        self._completed_s.append(at_s)

    def ready_at(self) -> float:
        """Returns when the next group may go if an engine has room: a time, which may be past, or
        inf where another group must complete first.
        """
        return turn_s(self.schedule.turns, self.num_dispatched, self._completed_s, self.num_engines)

    def window(self, engine: str) -> int:
        """Returns the sequences that the engine may have in flight with the next group."""
        return self.schedule.windows[self._windows_index].on_engine(engine)


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
    """Returns the engine for `sequences` more: among those with room the one with the fewest tokens
    in flight for its window; None where no engine has room.

    An engine with twice the window is twice as fast, so twice the tokens make it as full. An idle
    engine takes anything, so that a group larger than the window still runs.
    """
    emptiest = None
    min_fill = math.inf
    for name, load in loads.items():
        limit = window(name)
        if load.in_flight_sequences and load.in_flight_sequences + sequences > limit:
            continue
        fill = load.in_flight_tokens / max(1, limit)
        if fill < min_fill:
            emptiest = name
            min_fill = fill
    return emptiest


def with_fixed_windows(schedule: Schedule, fixed: Mapping[str, int]) -> Schedule:
    """Returns the schedule with the windows in `fixed` for the engines that these name."""
    if not fixed:
        return schedule
    windows = tuple(
        replace(windows, sequences={**windows.sequences, **fixed}) for windows in schedule.windows
    )
    return replace(schedule, windows=windows)


def same_windows(engines: Sequence[str], sequences: int, from_group: int = 0) -> Windows:
    """Returns windows of `sequences` for all engines."""
    return Windows(dict.fromkeys(engines, sequences), sequences, from_group)

"""Which engines' devices decode and which train now: the one place that knows it, for pool, fleet and roles.

    decodes ──move──> moves ──train──> trains        a device inside an iteration
       ^                                  │
       └───────────── decode_all ─────────┘          when the next iteration begins

A device is named by its engine's seat: the engine's index, which its successor has too. Where engines
can sleep a device that trains is also lent: the trainer has its memory alone, until the next publish
takes it back, and no engine may start there meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum, auto


class DeviceRole(Enum):
    """What a device that has an engine on it does."""

    DECODES = auto()
    MOVES = auto()
    """Its engine takes nothing more and hands on what it has."""
    TRAINS = auto()


class DeviceRoles:
    """The roles of a run's devices. on_change: called when engines may take work that could not."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._roles: dict[int, DeviceRole] = {}  # of seats that do not decode
        self._all_written = False
        self._lent: set[int] = set()

    def decode_all(self) -> None:
        """An iteration begins, in which all devices decode."""
        self._roles.clear()
        self._all_written = False
        self._on_change()

    def move(self, seats: Collection[int]) -> None:
        """The engines with these seats hand on what they have."""
        self._roles |= {seat: DeviceRole.MOVES for seat in seats}
        self._on_change()

    def train(self, seats: Collection[int]) -> None:
        """The devices of these seats train: their engines have nothing in flight."""
        self._roles |= {seat: DeviceRole.TRAINS for seat in seats}

    def all_written(self) -> None:
        """No group of the iteration is left to write; an engine that is awake takes what comes."""
        self._all_written = True
        self._on_change()

    def trains(self, seats: Collection[int]) -> bool:
        """Whether all devices of these seats train."""
        return all(self._roles.get(seat) is DeviceRole.TRAINS for seat in seats)

    def takes_work(self, seat: int | None) -> bool:
        """Whether an engine with this seat may be given groups. None: it has no seat."""
        return self._all_written or seat not in self._roles

    @property
    def any_lent(self) -> bool:
        """Whether a trainer has a device alone."""
        return bool(self._lent)

    def is_lent(self, seat: int) -> bool:
        """Whether a trainer has the device of this seat alone."""
        return seat in self._lent

    def lend(self, seats: Collection[int]) -> set[int]:
        """Lends these devices to their trainers; returns those that were not lent before."""
        added = set(seats) - self._lent
        self._lent |= added
        return added

    def take_back(self) -> set[int]:
        """No device is lent any more; returns those that were."""
        returned, self._lent = self._lent, set()
        return returned

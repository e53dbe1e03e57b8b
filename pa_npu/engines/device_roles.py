"""The roles of devices: which engines' devices decode and which train; pool, membership and roles ask here.

    decodes ──move──> moves ──train──> trains        a device inside an iteration
       ^                                  │
       └───────────── decode_all ─────────┘          when the next iteration begins

A device is named by the index of its engine, which the engine's successor has too. If engines can
sleep, a device that trains is also lent: the trainer has its memory alone until the next publish
takes it back, and no engine may start there meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum, auto


class DeviceRole(Enum):
    """The role of a device that has an engine on it."""

    DECODES = auto()
    MOVES = auto()
    """Its engine takes nothing more and hands on what it has."""
    TRAINS = auto()


class DeviceRoles:
    """The roles of a run's devices. on_change: called when engines may take work that could not."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._roles: dict[int, DeviceRole] = {}  # of engines whose devices do not decode
        self._all_written = False
        self._lent: set[int] = set()

    def decode_all(self) -> None:
        """Lets all devices decode, at the beginning of an iteration."""
        self._roles.clear()
        self._all_written = False
        self._on_change()

    def move(self, engine_indices: Collection[int]) -> None:
        """Marks these engines: they get no new groups, and their sequences move to other engines."""
        self._roles |= {engine_index: DeviceRole.MOVES for engine_index in engine_indices}
        self._on_change()

    def train(self, engine_indices: Collection[int]) -> None:
        """Marks these devices as training: their engines have nothing in flight."""
        self._roles |= {engine_index: DeviceRole.TRAINS for engine_index in engine_indices}

    def all_written(self) -> None:
        """Notes that the iteration's groups are written: any engine that is awake takes requests."""
        self._all_written = True
        self._on_change()

    def trains(self, engine_indices: Collection[int]) -> bool:
        """Returns whether all of these devices train."""
        return all(
            self._roles.get(engine_index) is DeviceRole.TRAINS for engine_index in engine_indices
        )

    def takes_work(self, engine_index: int | None) -> bool:
        """Returns whether the engine may be given groups. None: its device never trains."""
        return self._all_written or engine_index not in self._roles

    @property
    def any_lent(self) -> bool:
        """Returns whether a trainer has a device alone."""
        return bool(self._lent)

    def is_lent(self, engine_index: int) -> bool:
        """Returns whether a trainer has the device of this engine alone."""
        return engine_index in self._lent

    def lend(self, engine_indices: Collection[int]) -> set[int]:
        """Lends these devices to their trainers; returns those that were not lent before."""
        added = set(engine_indices) - self._lent
        self._lent |= added
        return added

    def return_all(self) -> set[int]:
        """Ends every loan of a device to a trainer, and returns the devices that were lent."""
        returned, self._lent = self._lent, set()
        return returned

"""Which engines' devices decode and which train now: the one place that knows it, for pool, membership and roles.

    decodes ──move──> moves ──train──> trains        a device inside an iteration
       ^                                  │
       └───────────── decode_all ─────────┘          when the next iteration begins

A device is named by its engine's engine_index: the engine's index, which its successor has too.
Where engines can sleep a device that trains is also lent: the trainer has its memory alone, until
the next publish takes it back, and no engine may start there meanwhile.
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
        self._roles: dict[int, DeviceRole] = {}  # of engine_indices that do not decode
        self._all_written = False
        self._lent: set[int] = set()

    def decode_all(self) -> None:
        """An iteration begins, in which all devices decode."""
        self._roles.clear()
        self._all_written = False
        self._on_change()

    def move(self, engine_indices: Collection[int]) -> None:
        """The engines with these engine_indices hand on what they have."""
        self._roles |= {engine_index: DeviceRole.MOVES for engine_index in engine_indices}
        self._on_change()

    def train(self, engine_indices: Collection[int]) -> None:
        """The devices of these engine_indices train: their engines have nothing in flight."""
        self._roles |= {engine_index: DeviceRole.TRAINS for engine_index in engine_indices}

    def all_written(self) -> None:
        """No group of the iteration is left to write; an engine that is awake takes what comes."""
        self._all_written = True
        self._on_change()

    def trains(self, engine_indices: Collection[int]) -> bool:
        """Whether all devices of these engine_indices train."""
        return all(
            self._roles.get(engine_index) is DeviceRole.TRAINS for engine_index in engine_indices
        )

    def takes_work(self, engine_index: int | None) -> bool:
        """Whether an engine with this engine_index may be given groups. None: it has no
        engine_index.
        """
        return self._all_written or engine_index not in self._roles

    @property
    def any_lent(self) -> bool:
        """Whether a trainer has a device alone."""
        return bool(self._lent)

    def is_lent(self, engine_index: int) -> bool:
        """Whether a trainer has the device of this engine_index alone."""
        return engine_index in self._lent

    def lend(self, engine_indices: Collection[int]) -> set[int]:
        """Lends these devices to their trainers; returns those that were not lent before."""
        added = set(engine_indices) - self._lent
        self._lent |= added
        return added

    def return_all(self) -> set[int]:
        """No device is lent any more; returns those that were."""
        returned, self._lent = self._lent, set()
        return returned

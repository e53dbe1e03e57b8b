"""The named points of producing an iteration, which a feature overrides where it takes part; the producer has them in a table.

A run that does not use a feature has no object of it: assembly.py decides, and nothing on the main path asks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pa_npu.coordinator.episode import ScoredGroup
from pa_npu.engines.pool import Lease
from pa_npu.samples.group import Group


class Variant:
    """A feature's part in producing. Every point of this class does nothing."""

    async def before_admit(self) -> None:
        """Before a group asks for room on an engine; a wait holds back all further groups, and needs an end of its own."""

    def admitted(self, lease: Lease) -> None:
        """A group has room on an engine."""

    def nothing_left(self) -> None:
        """No group can be admitted before another one is scored, or none is left."""

    def generated(self, lease: Lease) -> None:
        """All samples of a group are there; `lease` is the one under which it ended."""

    def scored(self, index: int, group: ScoredGroup) -> None:
        """A group has its rewards, whether it is trained or not."""

    def delivered(self, group: Group, scored: ScoredGroup) -> None:
        """A group is in the buffer."""

    def all_dispatched(self) -> None:
        """Engines have, or have had, every group that the iteration began with."""


class Points:
    """The variants of one iteration at each point, in turn; one that does nothing at a point is not called there."""

    def __init__(self, variants: Sequence[Variant]) -> None:
        def at(point: str) -> list[Any]:
            return [getattr(one, point) for one in variants if getattr(type(one), point) is not getattr(Variant, point)]

        self.before_admit: list[Callable[[], Awaitable[None]]] = at("before_admit")
        self.admitted: list[Callable[[Lease], None]] = at("admitted")
        self.nothing_left: list[Callable[[], None]] = at("nothing_left")
        self.generated: list[Callable[[Lease], None]] = at("generated")
        self.scored: list[Callable[[int, ScoredGroup], None]] = at("scored")
        self.delivered: list[Callable[[Group, ScoredGroup], None]] = at("delivered")
        self.all_dispatched: list[Callable[[], None]] = at("all_dispatched")

"""GroupSource: where the groups of an iteration come from. Engines write them, or they are rows of data.

    EngineGroups   prompts go to engines, what these write is rewarded                engine_groups.py
    RowGroups      rows of data become samples; nothing is generated or rewarded      row_groups.py

The algorithm says which one a run has (Algorithm.samples_from), and main.py constructs it. The
producer asks it for the groups of each iteration and delivers them; it does not know how they come
about. Another source is a class with these calls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pa_npu.coordinator.episode import ScoredGroup
from pa_npu.coordinator.features import Feature, HookPoints
from pa_npu.coordinator.updates import EveryGroup
from pa_npu.data.prompts import Prompt


@dataclass(frozen=True)
class DeliveryTimes:
    """When a group was scored (time.perf_counter), and the seconds that delivering took what it
    released. by_rule: whether it is known that the group is trained by rule.
    """

    scored_s: float
    put_s: float
    by_rule: bool = False


Deliver = Callable[[int, ScoredGroup], Awaitable[DeliveryTimes]]
"""Takes a group and its dispatch index; returns when all that it released is in the buffer."""


class IterationGroups(Protocol):
    """The groups of one iteration.

    features: the source's own part at the producer's points.
    expected_work: of training all groups, in units of GroupCost; None where it is not known.
    numbers: for the iteration's record, once `bring` has returned.
    """

    features: Sequence[Feature]
    expected_work: float | None

    @property
    def numbers(self) -> dict[str, Any]: ...

    async def bring(self, hook_points: HookPoints, deliver: Deliver) -> None:
        """Delivers every group that the iteration's choice asks for, and returns when all are
        delivered. The first failure cancels the rest and is raised.
        """
        ...


class GroupSource(Protocol):
    """A run's source of groups."""

    def prepare(self, iteration: int, prompts: Sequence[Prompt]) -> Awaitable[None]:
        """Chooses ahead of `begin` what takes time to choose."""
        ...

    def begin(
        self, iteration: int, prompts: Sequence[Prompt], choice: EveryGroup, version: int | None
    ) -> IterationGroups:
        """Begins an iteration and returns its groups.

        choice: says which prompts are asked for. version: of the weights that must write them;
        None: any.
        """
        ...

"""Policies on the groups that an update trains, and on how many prompts an iteration needs for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from pa_npu.coordinator.episode import ScoredGroup
from pa_npu.data.prompts import Prompt
from pa_npu.dispatch.selection import EveryGroup, InformativeGroups


class Updates:
    """Each update trains all groups of its iteration, as many in all iterations. order: schedule.order."""

    def __init__(self, groups: int, order: Literal["prompt", "completion"]) -> None:
        self._groups = groups
        self._order = order

    def num_new(self, iteration: int) -> int:
        """Prompts that the iteration begins with. Iterations come in order."""
        return self._groups

    def choose(self, iteration: int, prompts: Sequence[Prompt]) -> EveryGroup[ScoredGroup]:
        """The choice among the iteration's groups, which begin with these prompts."""
        return EveryGroup(prompts, self._order)

    def produced(self, iteration: int, choice: EveryGroup[ScoredGroup]) -> None:
        """The iteration is complete; `choice` is the one that `choose` gave."""

    def resumed(self, iteration: int, num_groups: int) -> None:
        """An iteration, with this many groups, was produced before the run was interrupted."""

    def carry_on(self, groups: Sequence[ScoredGroup], group_tokens: float | None) -> None:
        """Take what was carried when the run was interrupted. group_tokens: TokenBudget's."""
        raise AssertionError("only updates by a budget of tokens carry groups")

    def save(self, version: int) -> None:
        """Before `version` may be saved: what a checkpoint needs beside complete iterations."""


class InformativeUpdates(Updates):
    """Updates of informative groups only (schedule.dynamic_sampling).

    another: gives a further prompt.
    """

    def __init__(self, groups: int, order: Literal["prompt", "completion"], another: Callable[[], Prompt]) -> None:
        super().__init__(groups, order)
        self._another = another

    def choose(self, iteration: int, prompts: Sequence[Prompt]) -> EveryGroup[ScoredGroup]:
        return InformativeGroups(prompts, self._order, self._another)

"""Policies on the groups that an update trains: which of an iteration's, and how many prompts the iteration needs for them.

EveryGroup           all that are dispatched
InformativeGroups    with dynamic sampling, the first B informative ones
BudgetedGroups       as many as have schedule.tokens_per_update tokens (token_budget.py)

DAPO, arXiv 2503.14476, eq. 11: a group whose responses are all right or all wrong has no gradient;
others take its place. A replacement is dispatched when a group turns out uninformative, never
before: so at any time as many groups are dispatched as the iteration needs if all unjudged ones are
informative, hence every informative group is among the first B of dispatch order. Nothing
informative is thrown away, and neither what is trained nor how many prompts are taken depends on
timing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pa_npu.coordinator.episode import ScoredGroup
from pa_npu.data.prompts import Prompt
from pa_npu.errors import UserError

MOST_ITERATIONS = 8
"""Groups that dynamic sampling dispatches at most, in iterations: prompts of which fewer teach are
wrong for the model.
"""


class Updates:
    """Each iteration begins with as many prompts, and its update trains what `kind` chooses among
    their groups.
    """

    def __init__(self, groups: int, kind: Callable[[Sequence[Prompt]], EveryGroup]) -> None:
        self._groups = groups
        self._kind = kind

    def num_new(self, iteration: int) -> int:
        """Prompts that the iteration begins with. Iterations come in order."""
        return self._groups

    def choose(self, iteration: int, prompts: Sequence[Prompt]) -> EveryGroup:
        """Returns the choice among the iteration's groups, which begin with these prompts."""
        return self._kind(prompts)

    def produced(self, iteration: int, choice: EveryGroup) -> None:
        """Notes that the iteration is complete; `choice` is the one that `choose` returned."""

    def resumed(self, iteration: int, num_groups: int) -> None:
        """Notes an iteration with this many groups that was produced before the run was
        interrupted.
        """

    def carry_on(self, groups: Sequence[ScoredGroup], group_tokens: float | None) -> None:
        """Takes the groups that were carried when the run was interrupted. group_tokens:
        TokenBudget's.
        """
        raise AssertionError("only updates by a budget of tokens carry groups")

    def save(self, version: int) -> None:
        """Stores what a checkpoint needs beside complete iterations; called before `version` may be
        saved.
        """


@dataclass(eq=False, repr=False)
class EveryGroup:
    """One iteration's choice: dispatch indices out, scored groups in, and those to train out, each
    with its number, 0 .. size - 1.

    This one trains all that it dispatches, each under its dispatch index and as soon as it is
    scored.

    order: of the slots that the numbers are assigned to. most: an upper bound of `size`, known
    beforehand.
    """

    prompts: Sequence[Prompt]
    order: Literal["prompt", "completion"]

    def __post_init__(self) -> None:
        self.max_groups = len(self.prompts)
        self.num_dispatched = 0
        self._num_scored = 0
        self._changed = asyncio.Event()

    @property
    def size(self) -> int:
        """Returns how many groups are trained; known once all are scored."""
        return self.max_groups

    @property
    def num_wanted(self) -> int:
        """Returns how many groups are to be dispatched, as far as is known."""
        return len(self.prompts)

    @property
    def must_wait(self) -> bool:
        """Returns whether nothing can be dispatched before another group is scored."""
        return self.num_dispatched >= self.num_wanted

    @property
    def is_dispatched(self) -> bool:
        """Returns whether the last group that the iteration began with has just gone."""
        return self.num_dispatched == len(self.prompts)

    def begin(self) -> list[tuple[int, ScoredGroup]]:
        """Returns the groups that are trained before any of the iteration is generated."""
        return []

    async def next_index(self) -> int | None:
        """Waits while unscored groups may be enough, and returns the next dispatch index; None if
        they were enough.

        Unscored groups end by their own deadlines, hence so does this wait.
        """
        while self.must_wait:
            if self._num_scored == self.num_dispatched:
                return None
            self._changed.clear()
            await self._changed.wait()
        self.num_dispatched += 1
        return self.num_dispatched - 1

    def prompt(self, index: int) -> Prompt:
        """Returns the prompt of a dispatch index; called once for each index."""
        return self.prompts[index]

    def trains(self, group: ScoredGroup) -> bool:
        """Returns whether a group with these rewards is trained at all."""
        return True

    def scored(self, index: int, group: ScoredGroup) -> list[tuple[int, ScoredGroup]]:
        """Takes a group and returns those that are to be trained and can be numbered now."""
        self._num_scored += 1
        self._changed.set()
        return self._released(index, group)

    def _released(self, index: int, group: ScoredGroup) -> list[tuple[int, ScoredGroup]]:
        return [(index, group)]


@dataclass(eq=False, repr=False)
class InformativeGroups(EveryGroup):
    """The first informative groups, as many as there are prompts (schedule.dynamic_sampling).

    order=prompt numbers them in dispatch order, and releases a group when all before it are scored;
    completion as they come.

    another: gives a further prompt.
    """

    another: Callable[[], Prompt]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._limit = len(self.prompts) * MOST_ITERATIONS
        self._waiting: dict[int, ScoredGroup] = {}  # scored, not released
        self._next = 0  # dispatch index that in-order release waits for
        self._num_released = 0
        self._num_discarded = 0

    @property
    def num_wanted(self) -> int:
        return len(self.prompts) + self._num_discarded

    async def next_index(self) -> int | None:
        """Returns the index of the next group, as EveryGroup does. Raises UserError beyond the
        limit.
        """
        index = await super().next_index()
        if index is not None and index >= self._limit:
            raise UserError(
                f"schedule.dynamic_sampling: of {self._num_scored} groups {self._num_discarded} "
                f"were all right or all wrong, and {self._limit} dispatched ones cannot give "
                f"{self.max_groups} informative ones; raise rollout.responses_per_prompt, or take "
                "prompts that fit the model"
            )
        return index

    def prompt(self, index: int) -> Prompt:
        return self.prompts[index] if index < len(self.prompts) else self.another()

    def trains(self, group: ScoredGroup) -> bool:
        return group.is_informative

    def _released(self, index: int, group: ScoredGroup) -> list[tuple[int, ScoredGroup]]:
        self._num_discarded += not group.is_informative
        if self.order == "completion":
            return [self._number(group)] if group.is_informative else []
        self._waiting[index] = group
        released = []
        while self._next in self._waiting:
            first = self._waiting.pop(self._next)
            self._next += 1
            if first.is_informative:
                released.append(self._number(first))
        return released

    def _number(self, group: ScoredGroup) -> tuple[int, ScoredGroup]:
        self._num_released += 1
        return self._num_released - 1, group

"""schedule.tokens_per_update: which groups an update trains, and how many an iteration generates, so that it has its tokens.

    carried groups, then the iteration's own, in dispatch order     0   1   2 | 3   4
    trained tokens so far                                          90 210 330   ^ these are carried on
    budget                                                              300

An update takes whole groups until it has its tokens, and as many for each replica. What is left is carried to the next update, as
long as freshness lets it: who would be too old there is taken beyond the budget. What it takes follows from lengths in dispatch
order, never from which group came first.

A budget of trained tokens per update is from Ring-lite's C3PO, arXiv 2506.14731, which selects single responses; here groups stay
whole, because their advantages are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pa_npu.data.prompts import Prompt
from pa_npu.dispatch.selection import EveryGroup, G

# So many more groups are generated than are expected to be needed: what is too much is carried, what is too little is missing.
_MARGIN = 1.35
# Of the expected tokens of a group, what the last iteration says.
_NEWEST = 0.3


@dataclass
class TokenBudget:
    """The token budget of a run. tokens: of an update. most: groups that an iteration may generate, as many for each replica.

    group_tokens: expected of a group, None before any was seen.
    """

    tokens: int
    most: int
    replicas: int
    group_tokens: float | None = None

    def num_new(self, carried: Sequence[int], *, is_last: bool) -> int:
        """Groups to generate for an update that has groups of so many tokens already, as many for each replica.

        is_last: what is too much is trained too.
        """
        wanted = self.most
        if self.group_tokens:
            needed = (self.tokens - sum(carried)) / self.group_tokens
            wanted = math.ceil(needed if is_last else needed * _MARGIN)
        # all replicas train as many groups, in every update and so in the last one too
        rows = -(-max(wanted, 1) // self.replicas)
        return min(rows * self.replicas, self.most)

    def observe(self, tokens: Sequence[int]) -> None:
        """Record how many tokens the groups of an iteration turned out to have."""
        mean = sum(tokens) / len(tokens)
        old = mean if self.group_tokens is None else self.group_tokens
        self.group_tokens = _NEWEST * mean + (1 - _NEWEST) * old


class BudgetedGroups(EveryGroup[G]):
    """Which of the groups at hand one update takes, told as they become complete. Numbers: carried ones first, then by index.

    carried: from earlier updates. num_due: of the first groups, those that no later update may train. told: is given the number
    of groups of the update, once, as soon as it is known.
    """

    def __init__(
        self,
        budget: TokenBudget,
        carried: Sequence[G],
        prompts: Sequence[Prompt],
        num_due: int,
        told: Callable[[int], None] = lambda size: None,
    ) -> None:
        super().__init__(prompts, "prompt")
        self._budget = budget
        self._groups: dict[int, G] = dict(enumerate(carried))
        self._num_carried = len(carried)
        self._total = len(carried) + len(prompts)
        replicas = budget.replicas
        self.most = self._total // replicas * replicas
        self._due = min(-(-num_due // replicas) * replicas, self.most)
        self._told = told
        self._sum = 0
        self._next = 0
        self._size: int | None = None

    @property
    def size(self) -> int:
        assert self._size is not None, "groups are missing"
        return self._size

    def begin(self) -> list[tuple[int, G]]:
        return self._taken()

    def left(self) -> list[G]:
        return [self._groups[number] for number in range(self.size, self._total)]

    @property
    def new_tokens(self) -> list[int]:
        """Trained tokens of the iteration's own groups that are complete, by index."""
        return [
            self._groups[number].tokens for number in range(self._num_carried, self._total) if number in self._groups
        ]

    def _released(self, index: int, group: G) -> list[tuple[int, G]]:
        self._groups[self._num_carried + index] = group
        return self._taken()

    def _taken(self) -> list[tuple[int, G]]:
        """Further groups that the update takes, as far as is known by now; each is told once."""
        found: list[int] = []
        replicas = self._budget.replicas
        while self._size is None:
            row = range(self._next, self._next + replicas)
            enough = self._sum >= self._budget.tokens and self._next >= self._due
            if enough or row.stop > self._total:
                self._size = self._next
                self._told(self._size)
            elif all(number in self._groups for number in row):
                self._sum += sum(self._groups[number].tokens for number in row)
                self._next = row.stop
                found += row
            else:
                break
        return [(number, self._groups[number]) for number in found]

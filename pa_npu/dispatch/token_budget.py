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
from collections.abc import Sequence
from dataclasses import dataclass

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


class Update:
    """Which of the groups at hand one update takes, told as they become complete. Positions: carried ones first, then by index."""

    def __init__(self, budget: TokenBudget, carried: Sequence[int], num_new: int, num_due: int) -> None:
        """carried: tokens of the carried groups. num_due: of the first groups, those that no later update may train."""
        self._budget = budget
        self._tokens: dict[int, int] = dict(enumerate(carried))
        self._num_carried = len(carried)
        self._total = len(carried) + num_new
        replicas = budget.replicas
        self._due = min(-(-num_due // replicas), self._total // replicas) * replicas
        self._sum = 0
        self._next = 0
        self.size: int | None = None
        """Groups that the update takes, once that is known."""

    def taken(self) -> list[int]:
        """Further positions that the update takes, as far as is known by now; each is told once."""
        found: list[int] = []
        replicas = self._budget.replicas
        while self.size is None:
            row = range(self._next, self._next + replicas)
            enough = self._sum >= self._budget.tokens and self._next >= self._due
            if enough or row.stop > self._total:
                self.size = self._next
            elif all(position in self._tokens for position in row):
                self._sum += sum(self._tokens[position] for position in row)
                self._next = row.stop
                found += row
            else:
                break
        return found

    def complete(self, position: int, tokens: int) -> list[int]:
        """A group is complete, with so many trained tokens. Returns what `taken` does."""
        self._tokens[position] = tokens
        return self.taken()

    @property
    def new_tokens(self) -> list[int]:
        """Trained tokens of the iteration's own groups that are complete, by index."""
        return [
            self._tokens[position] for position in range(self._num_carried, self._total) if position in self._tokens
        ]

    @property
    def left(self) -> range:
        """Positions that are carried on, once all groups are complete."""
        assert self.size is not None, "groups are missing"
        return range(self.size, self._total)

"""schedule.tokens_per_update: which groups an update trains, and how many an iteration generates, so that it has its tokens.

    carried groups, then the iteration's own, in dispatch order     0   1   2 | 3   4
    trained tokens so far                                          90 210 330   ^ these are carried on
    budget                                                              300

An update takes whole groups until it has its tokens, and as many for each replica. What is left is
carried to the next update, as long as freshness lets it: who would be too old there is taken beyond
the budget. What it takes follows from lengths in dispatch order, never from which group came first.

A budget of trained tokens per update is from Ring-lite's C3PO, arXiv 2506.14731, which selects
single responses; here groups stay whole, because their advantages are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.freshness import Freshness
from pa_npu.control.messages import CARRIED, EARLY_END, UPDATE_SIZE, CarriedGroups, UpdateSize
from pa_npu.control.milestones import Milestones
from pa_npu.coordinator.episode import ScoredGroup
from pa_npu.coordinator.updates import EveryGroup, Updates
from pa_npu.data.prompts import Prompt
from pa_npu.errors import InvariantViolation, UserError
from pa_npu.rewards.functions import RewardResult
from pa_npu.samples.group import Group
from pa_npu.samples.rollout_buffer import RolloutBuffer

# So many more groups are generated than are expected to be needed: what is too much is carried,
# what is too little is missing.
_MARGIN = 1.35
# Of the expected tokens of a group, what the last iteration says.
_NEWEST = 0.3


@dataclass(eq=False, repr=False)
class BudgetedUpdates(Updates):
    """Each update trains whole groups, carried ones first, until it has `tokens` of them; trainers
    are told how many these are.

    Groups beyond the budget (schedule.tokens_per_update) wait, as they were scored, for the next
    update. A checkpoint has them as groups in wire format, and what a record says of them as JSON.
    """

    config: Config
    tokens: int
    freshness: Freshness
    milestones: Milestones
    channel: StoreChannel
    buffer: RolloutBuffer

    def __post_init__(self) -> None:
        self._last = self.config.schedule.iterations - 1
        self._budget = TokenBudget(
            self.tokens, self.config.schedule.prompts_per_iteration, self.config.mesh.data
        )
        self._carried: Sequence[ScoredGroup] = ()  # to the iteration that is produced next

    def num_new(self, iteration: int) -> int:
        return self._budget.num_new(
            [group.tokens for group in self._carried], is_last=iteration == self._last
        )

    def choose(self, iteration: int, prompts: Sequence[Prompt]) -> BudgetedGroups:
        num_due = sum(
            not self.freshness.allows(iteration + 1, group.version) for group in self._carried
        )
        if iteration == self._last:
            num_due = len(self._carried) + len(prompts)
        return BudgetedGroups(
            self._budget, self._carried, prompts, num_due, partial(self.resumed, iteration)
        )

    def produced(self, iteration: int, choice: EveryGroup) -> None:
        assert isinstance(choice, BudgetedGroups)
        self._carried = choice.left()
        self._budget.observe(choice.new_tokens)
        if self._carried and iteration == self._last:
            raise InvariantViolation(
                f"I2 exactly once: {len(self._carried)} groups are left after the last iteration"
            )

    def resumed(self, iteration: int, num_groups: int) -> None:
        """Tell trainers the size of an update."""
        UPDATE_SIZE.put(
            self.channel, UpdateSize(self.config.mesh.per_replica(num_groups)), iteration=iteration
        )

    def carry_on(self, groups: Sequence[ScoredGroup], group_tokens: float | None) -> None:
        if not self.config.mesh.shares(len(groups)):
            raise UserError(
                f"checkpoint.load: it carries {len(groups)} groups to a later update, which "
                f"{self._budget.replicas} replicas cannot share; continue with as many "
                "trainer.devices as before"
            )
        self._carried = groups
        self._budget.group_tokens = group_tokens

    def save(self, version: int) -> None:
        """Put what no update until `version` trains, and no iteration that is produced until then,
        where checkpoints find it.
        """
        is_saved = self.milestones.is_saved(version) or EARLY_END.exists(self.channel)
        if not is_saved or version > self._last:
            return
        iteration = min(version + self.freshness.iterations_ahead, self._last + 1)
        buffer = self.buffer.written(version)
        for index, group in enumerate(self._carried):
            buffer.put(group.group(0, iteration, index), 0, index)
        carried = [carried_fields(group) for group in self._carried]
        CARRIED.put(
            self.channel,
            CarriedGroups(iteration, carried, self._budget.group_tokens),
            version=version,
        )


@dataclass
class TokenBudget:
    """The token budget of a run.

    Args:
        tokens: of an update.
        max_groups: how many groups an iteration may generate; a multiple of `replicas`.
        replicas: that train, each as many groups.
        group_tokens: expected of a group; None before any was seen.
    """

    tokens: int
    max_groups: int
    replicas: int
    group_tokens: float | None = None

    def num_new(self, carried: Sequence[int], *, is_last: bool) -> int:
        """Returns how many groups to generate for an update, as many for each replica.

        carried: tokens of each group that it has already. is_last: whether it is the run's last
        update, which trains what is too much, too.
        """
        num_groups = self.max_groups
        if self.group_tokens:
            needed = (self.tokens - sum(carried)) / self.group_tokens
            num_groups = math.ceil(needed if is_last else needed * _MARGIN)
        # all replicas train as many groups, in every update and so in the last one too
        rows = -(-max(num_groups, 1) // self.replicas)
        return min(rows * self.replicas, self.max_groups)

    def observe(self, tokens: Sequence[int]) -> None:
        """Records how many tokens the groups of an iteration turned out to have."""
        mean = sum(tokens) / len(tokens)
        old = mean if self.group_tokens is None else self.group_tokens
        self.group_tokens = _NEWEST * mean + (1 - _NEWEST) * old


class BudgetedGroups(EveryGroup):
    """Chooses which of the groups at hand an update takes, as they become complete.

    Groups are numbered: carried ones first, then new ones by index.

    Args:
        budget: of the run.
        carried: groups from earlier updates.
        prompts: of the new groups.
        num_due: how many of the first groups no later update may train.
        on_size: called once with the update's number of groups, as soon as it is known.
    """

    def __init__(
        self,
        budget: TokenBudget,
        carried: Sequence[ScoredGroup],
        prompts: Sequence[Prompt],
        num_due: int,
        on_size: Callable[[int], None] = lambda size: None,
    ) -> None:
        super().__init__(prompts, "prompt")
        self._budget = budget
        self._groups: dict[int, ScoredGroup] = dict(enumerate(carried))
        self._num_carried = len(carried)
        self._total = len(carried) + len(prompts)
        replicas = budget.replicas
        self.max_groups = self._total // replicas * replicas
        self._due = min(-(-num_due // replicas) * replicas, self.max_groups)
        self._on_size = on_size
        self._sum = 0
        self._next = 0
        self._size: int | None = None

    @property
    def size(self) -> int:
        assert self._size is not None, "groups are missing"
        return self._size

    def begin(self) -> list[tuple[int, ScoredGroup]]:
        return self._taken()

    def left(self) -> list[ScoredGroup]:
        """Returns the groups that are neither trained nor dropped, once all are scored."""
        return [self._groups[number] for number in range(self.size, self._total)]

    @property
    def new_tokens(self) -> list[int]:
        """Trained tokens of the iteration's own groups that are complete, by index."""
        return [
            self._groups[number].tokens
            for number in range(self._num_carried, self._total)
            if number in self._groups
        ]

    def _released(self, index: int, group: ScoredGroup) -> list[tuple[int, ScoredGroup]]:
        self._groups[self._num_carried + index] = group
        return self._taken()

    def _taken(self) -> list[tuple[int, ScoredGroup]]:
        """Returns further groups that the update takes, each once, as far as is known by now."""
        numbers: list[int] = []
        replicas = self._budget.replicas
        while self._size is None:
            row = range(self._next, self._next + replicas)
            enough = self._sum >= self._budget.tokens and self._next >= self._due
            if enough or row.stop > self._total:
                self._size = self._next
                self._on_size(self._size)
            elif all(number in self._groups for number in row):
                self._sum += sum(self._groups[number].tokens for number in row)
                self._next = row.stop
                numbers += row
            else:
                break
        return [(number, self._groups[number]) for number in numbers]


def carried_fields(group: ScoredGroup) -> dict[str, Any]:
    """Returns as JSON the parts of a group that the wire format leaves out."""
    prompt = group.prompt
    result = group.result
    assert result is not None, "groups that are carried have rewards"
    return {
        "prompt": prompt.text,
        "prompt_tokens": prompt.tokens.tolist(),
        "answer": prompt.answer,
        "source": prompt.source,
        "texts": [sample.text for sample in group.samples],
        "functions": {name: values.tolist() for name, values in result.functions.items()},
        "correct": [bool(value) for value in result.correct],
        "errors": list(result.errors),
    }


def restored(group: Group, fields: dict[str, Any]) -> ScoredGroup:
    """Returns the scored group of which `group` and `fields` (carried_fields) were made.

    It lacks the prompt's row, which nobody needs once the rewards are known.
    """
    tokens = np.asarray(fields["prompt_tokens"], np.int32)
    prompt = Prompt(
        group.prompt_id, tokens, fields["answer"], fields["prompt"], {}, fields["source"]
    )
    functions = {
        name: np.asarray(values, np.float32) for name, values in fields["functions"].items()
    }
    correct = np.asarray(fields["correct"], np.bool_)
    result = RewardResult(group.rewards.copy(), functions, correct, tuple(fields["errors"]))
    return ScoredGroup(prompt, group.samples(fields["texts"]), result)

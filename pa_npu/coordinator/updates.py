"""Policies on the groups that an update trains, and on how many prompts an iteration needs for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.freshness import Freshness
from pa_npu.control.messages import CARRIED, UPDATE_SIZE, CarriedGroups, UpdateSize
from pa_npu.coordinator.episode import ScoredGroup
from pa_npu.data.prompts import Prompt
from pa_npu.dispatch.selection import EveryGroup, InformativeGroups
from pa_npu.dispatch.token_budget import BudgetedGroups, TokenBudget
from pa_npu.errors import InvariantViolation, UserError
from pa_npu.rewards.functions import RewardResult
from pa_npu.samples.group import Group
from pa_npu.samples.rollout_buffer import RolloutBuffer


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


class BudgetedUpdates(Updates):
    """Each update trains whole groups, carried ones first, until it has `tokens` of them; trainers are told how many these are.

    Groups beyond the budget (schedule.tokens_per_update) wait, as they were scored, for the next update. A checkpoint has them as
    groups in wire format, and what a record says of them as JSON.
    """

    def __init__(
        self, config: Config, tokens: int, freshness: Freshness, channel: StoreChannel, buffer: RolloutBuffer
    ) -> None:
        most = config.schedule.prompts_per_iteration
        super().__init__(most, "prompt")
        self._config = config
        self._last = config.schedule.iterations - 1
        self._freshness = freshness
        self._channel = channel
        self._buffer = buffer
        self._budget = TokenBudget(tokens, most, config.data_parallel)
        self._carried: Sequence[ScoredGroup] = ()  # to the iteration that is produced next

    def num_new(self, iteration: int) -> int:
        return self._budget.num_new([group.tokens for group in self._carried], is_last=iteration == self._last)

    def choose(self, iteration: int, prompts: Sequence[Prompt]) -> BudgetedGroups[ScoredGroup]:
        num_due = sum(not self._freshness.holds(iteration + 1, group.version) for group in self._carried)
        if iteration == self._last:
            num_due = len(self._carried) + len(prompts)
        return BudgetedGroups(self._budget, self._carried, prompts, num_due, partial(self.resumed, iteration))

    def produced(self, iteration: int, choice: EveryGroup[ScoredGroup]) -> None:
        assert isinstance(choice, BudgetedGroups)
        self._carried = choice.left()
        self._budget.observe(choice.new_tokens)
        if self._carried and iteration == self._last:
            raise InvariantViolation(f"I2 exactly once: {len(self._carried)} groups are left after the last iteration")

    def resumed(self, iteration: int, num_groups: int) -> None:
        """Tell trainers the size of an update."""
        UPDATE_SIZE.put(self._channel, UpdateSize(self._config.mesh.per_replica(num_groups)), iteration=iteration)

    def carry_on(self, groups: Sequence[ScoredGroup], group_tokens: float | None) -> None:
        if not self._config.mesh.shares(len(groups)):
            raise UserError(
                f"checkpoint.load: it carries {len(groups)} groups to a later update, which {self._budget.replicas} replicas "
                f"cannot share; continue with as many trainer.devices as before"
            )
        self._carried, self._budget.group_tokens = groups, group_tokens

    def save(self, version: int) -> None:
        """Put what no update until `version` trains, and no iteration that is produced until then, where checkpoints find it."""
        if not self._config.saves(version) or version > self._last:
            return
        iteration = min(version + self._freshness.iterations_ahead, self._last + 1)
        buffer = self._buffer.written(version)
        for index, group in enumerate(self._carried):
            buffer.put(group.group(0, iteration, index), 0, index)
        carried = [told(group) for group in self._carried]
        CARRIED.put(self._channel, CarriedGroups(iteration, carried, self._budget.group_tokens), version=version)


def told(group: ScoredGroup) -> dict[str, Any]:
    """Returns as JSON the parts of a group that the wire format leaves out."""
    prompt, result = group.prompt, group.result
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


def restored(group: Group, told: dict[str, Any]) -> ScoredGroup:
    """The scored group that gave `group` and `told`. The prompt's row is not there: its rewards are known."""
    tokens = np.asarray(told["prompt_tokens"], np.int32)
    prompt = Prompt(group.prompt_id, tokens, told["answer"], told["prompt"], {}, told["source"])
    functions = {name: np.asarray(values, np.float32) for name, values in told["functions"].items()}
    correct = np.asarray(told["correct"], np.bool_)
    result = RewardResult(group.rewards.copy(), functions, correct, tuple(told["errors"]))
    return ScoredGroup(prompt, group.samples(told["texts"]), result)

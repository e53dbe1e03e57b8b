"""Credit by rewards: one advantage for all trained tokens of a sample, by the function that algorithm.advantage names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np

from pa_npu.algorithm.advantages import (
    BATCH_STD,
    GroupAdvantage,
    batch_advantages,
    broken_advantages,
    find_group_advantage,
    group_advantages,
)
from pa_npu.algorithm.algorithm import Algorithm, SampleValues, ScoredSamples, TokenValues
from pa_npu.config.rules.learning import of_preset


class RewardCredit(Algorithm):
    """The common part of algorithms whose credit follows from a group's rewards alone."""

    @cached_property
    def advantage(self) -> GroupAdvantage | None:
        """The function of algorithm.advantage; None of batch-std, which no group determines alone.

        Raises ConfigError where there is none.
        """
        return (
            None if self.keys.advantage == BATCH_STD else find_group_advantage(self.keys.advantage)
        )

    @property
    def needs_whole(self) -> Literal["samples", "groups", "batch"]:
        return "batch" if self.keys.advantage == BATCH_STD else super().needs_whole

    @property
    def credit_columns(self) -> tuple[Any, ...]:
        return tuple(getattr(self.advantage, "columns", ()))

    @property
    def credit_key(self) -> str:
        return f"algorithm.advantage = {self.keys.advantage}"

    def credit(self, group: ScoredSamples) -> TokenValues:
        return group.spread(group_advantages(group.rewards, self.keys.advantage))

    def batch_credit(self, groups: Sequence[ScoredSamples]) -> list[TokenValues]:
        if self.keys.advantage != BATCH_STD:
            return super().batch_credit(groups)
        values = batch_advantages([group.rewards for group in groups])
        return [group.spread(advantages) for group, advantages in zip(groups, values, strict=True)]

    def broken_credit(self, group: ScoredSamples, advantages: TokenValues) -> str | None:
        if type(self).credit is not RewardCredit.credit:
            return super().broken_credit(group, advantages)
        leads = np.add.reduceat(
            group.component == 1, np.cumsum(group.lengths, dtype=np.int64) - group.lengths
        )
        if not leads.all():
            # a sample without such tokens shows no advantage
            return None if self.needs_whole == "batch" else super().broken_credit(group, advantages)
        of_samples = _sample_values(group, advantages)
        if of_samples is None:
            return "a sample has several advantages"
        return broken_advantages(group.rewards, of_samples, self.keys.advantage)

    def broken_rule(self, rewards: SampleValues) -> str | None:
        if (reason := super().broken_rule(rewards)) is not None:
            return reason
        if self.keys.advantage == BATCH_STD:
            # a positive multiple of the centred rewards, whatever the batch
            has_advantage = bool((rewards != rewards[0]).any())
        elif type(self).credit is RewardCredit.credit:
            has_advantage = bool(group_advantages(rewards, self.keys.advantage).any())
        else:
            return None
        if not has_advantage:
            return None
        return f"its rewards {rewards.tolist()} give advantages that are not 0"

    def broken_rules(self) -> Iterator[str]:
        if self.needs_whole != "batch":
            return
        schedule = self.config.schedule
        advantage = f"algorithm.advantage: {BATCH_STD}{of_preset(self.config, 'advantage')}"
        if schedule.max_staleness:
            yield (
                f"{advantage} with schedule.max_staleness = {schedule.max_staleness}: it divides "
                "by the deviation of rewards that other weights than the trained ones have earned; "
                "set advantage to group-std, or max_staleness to 0"
            )
        if schedule.stream:
            yield (
                f"{advantage} needs the whole batch before the first update, but "
                "schedule.stream=true trains while groups arrive; set schedule.stream=false or "
                "algorithm.advantage=group-std"
            )


def _sample_values(group: ScoredSamples, advantages: TokenValues) -> SampleValues | None:
    """[T] -> [G]: each sample's advantage, of samples that all have tokens of the leading
    component; None where one has several.
    """
    starts = np.cumsum(group.lengths, dtype=np.int64) - group.lengths
    leading_rows = np.flatnonzero(group.component == 1)
    first_rows = leading_rows[np.searchsorted(leading_rows, starts)]
    values: SampleValues = advantages[first_rows]
    return values if np.array_equal(group.spread(values), advantages) else None

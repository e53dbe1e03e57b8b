"""Policy gradient: every token that the policy wrote is weighted by the advantage of its response.

The kinds of this family differ by two functions, algorithm.loss (policy_losses.py) and
algorithm.advantage (advantages.py), and by keys. A function of the user's own takes the place of
either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pa_npu.algorithm.advantages import LINEAR_ADVANTAGES
from pa_npu.algorithm.algorithm import OLD_POLICY, Component, NeededModel
from pa_npu.algorithm.normaliser import (
    token_weights,
)
from pa_npu.algorithm.reward_credit import RewardCredit
from pa_npu.config.rules.learning import of_preset
from pa_npu.config.rules.unread import Condition

if TYPE_CHECKING:
    import torch

    from pa_npu.algorithm.loss_gradient import ExpectedGradient
    from pa_npu.algorithm.loss_sums import LossSums
    from pa_npu.algorithm.policy_losses import PolicyLoss, TokenBatch

POLICY = Component(1, "policy", "those that the policy wrote")

# Losses that take no ratio to the policy that sampled, and those that bound no ratio from above.
_WITHOUT_RATIO = ("reinforce",)
_WITHOUT_BOUNDS = ("cispo", "reinforce")


class PolicyGradient(RewardCredit):
    """One component, of the policy's own tokens, whose loss and advantage two keys name."""

    components = (POLICY,)

    @cached_property
    def policy_loss(self) -> PolicyLoss:
        """The function of algorithm.loss. Raises ConfigError where there is none."""
        from pa_npu.algorithm.policy_losses import find_policy_loss

        return find_policy_loss(self.keys.loss)

    @property
    def models(self) -> tuple[NeededModel, ...]:
        several_updates = self.config.schedule.updates_per_iteration > 1
        old = (OLD_POLICY,) if several_updates and self.ratio == "proximal" else ()
        return (*old, *super().models)

    @property
    def whole_groups_key(self) -> str | None:
        return "algorithm.kl_in=reward" if self.has_kl_in_reward else None

    @property
    def has_kl_in_reward(self) -> bool:
        return self.keys.kl_in == "reward" and self.keys.kl_coef > 0

    @property
    def loss_columns(self) -> tuple[Any, ...]:
        return (*super().loss_columns, *getattr(self.policy_loss, "columns", ()))

    # The loss

    def token_weights(self, lengths: Sequence[int], device: torch.device) -> torch.Tensor:
        return token_weights(lengths, self.keys.aggregation, device)

    def loss_sums(self, batch: TokenBatch) -> LossSums:
        from pa_npu.algorithm.corrections import kl_reward_advantages
        from pa_npu.algorithm.loss_sums import weighted_sums

        keys = self.keys
        if self.has_kl_in_reward:
            extra = kl_reward_advantages(batch, keys.kl_estimator, keys.kl_coef, keys.advantage)
            batch = replace(batch, advantages=batch.advantages + extra)
        terms = self.policy_loss(batch, keys)
        return weighted_sums(
            batch, keys, terms, kl_in_loss=bool(keys.kl_coef) and keys.kl_in == "loss"
        )

    @property
    def metric_names(self) -> tuple[str, ...]:
        from pa_npu.algorithm.loss_sums import metric_names

        return metric_names(self.keys, stale=self.config.schedule.max_staleness > 0)

    def expected_gradient(self, batch: TokenBatch) -> ExpectedGradient:
        from pa_npu.algorithm.gradient_formulas import expected_policy_gradient

        return expected_policy_gradient(batch, self.keys)

    @property
    def needs_every_gradient(self) -> str | None:
        if type(self) is not PolicyGradient:
            return super().needs_every_gradient  # a subclass may add to the loss
        return self._term_without_advantage()

    def _term_without_advantage(self) -> str | None:
        """Names a term of the loss that has no advantage as a factor, as a phrase; None without."""
        from pa_npu.algorithm.policy_losses import POLICY_LOSSES

        keys = self.keys
        coefficients = ("kl_coef", "entropy_coef", "router_aux_coef")
        for name in coefficients:
            if getattr(keys, name) > 0:
                return f"algorithm.{name} = {getattr(keys, name):g} adds a term of its own"
        promised = getattr(self.policy_loss, "zero_without_advantage", False)
        if keys.loss not in POLICY_LOSSES and promised is not True:
            return (
                f"algorithm.loss = {keys.loss} does not promise it (set zero_without_advantage = "
                "True on the function)"
            )
        return None

    # Its keys

    def broken_rules(self) -> Iterator[str]:
        yield from super().broken_rules()
        yield from _broken_ratio(self)
        yield from _broken_kl_in_reward(self)
        yield from _broken_bounds(self)

    @property
    def unread(self) -> tuple[Condition, ...]:
        loss = self.keys.loss
        return (
            Condition(
                "algorithm.ratio algorithm.clip_low algorithm.clip_high",
                lambda c: loss not in _WITHOUT_RATIO,
                "take an algorithm.loss with a ratio to clip",
            ),
            Condition(
                "algorithm.dual_clip algorithm.delta",
                lambda c: loss not in _WITHOUT_BOUNDS,
                "set algorithm.loss to clip or gspo",
            ),
        )


def _broken_ratio(algorithm: PolicyGradient) -> Iterator[str]:
    """Yields what is not exact without a ratio, and what counts one twice."""
    config, keys = algorithm.config, algorithm.keys
    schedule = config.schedule
    uncorrected = keys.importance_sampling == "none"
    has_no_ratio = keys.loss in _WITHOUT_RATIO
    if schedule.updates_per_iteration > 1 and has_no_ratio:
        yield (
            f"schedule.updates_per_iteration: {schedule.updates_per_iteration}: "
            f"algorithm.loss={keys.loss} has no ratio to the policy that sampled, so that it is "
            "exact for one update only; set it to 1, or algorithm.loss=clip"
        )
    if keys.ratio == "sampling" and not uncorrected:
        yield (
            "algorithm.ratio: sampling with "
            f"algorithm.importance_sampling={keys.importance_sampling}, which counts the sampling "
            "policy twice; set ratio to proximal, or importance_sampling to none"
        )
    if schedule.max_staleness and has_no_ratio and uncorrected:
        yield (
            f"algorithm.loss: {keys.loss}{of_preset(config, 'loss')} with schedule.max_staleness = "
            f"{schedule.max_staleness}: it has no ratio to the older policy that sampled; set "
            "algorithm.importance_sampling to token or sequence, or algorithm.loss to clip"
        )


def _broken_kl_in_reward(algorithm: PolicyGradient) -> Iterator[str]:
    config, keys = algorithm.config, algorithm.keys
    if not algorithm.has_kl_in_reward:
        return
    if keys.advantage not in LINEAR_ADVANTAGES:
        yield (
            f"algorithm.kl_in: reward with algorithm.advantage={keys.advantage}: the trainer knows "
            "the KL only after the coordinator has divided rewards by their deviation; set "
            f"advantage to {' or '.join(LINEAR_ADVANTAGES)}, or kl_in to loss"
        )
    responses = config.rollout.responses_per_prompt
    if config.microbatch.tokens is not None:
        yield (
            "algorithm.kl_in: reward needs all responses of a group in one microbatch, and "
            f"microbatch.tokens = {config.microbatch.tokens} may cut it; remove microbatch.tokens, "
            "or set kl_in to loss"
        )
    if config.microbatch_responses != responses:
        yield (
            "algorithm.kl_in: reward needs all responses of a group in one microbatch, but "
            f"microbatch.responses = {config.microbatch_responses} of {responses}; remove "
            "microbatch.responses, or set kl_in to loss"
        )


def _broken_bounds(algorithm: PolicyGradient) -> Iterator[str]:
    keys = algorithm.keys
    if keys.dual_clip is not None and keys.delta is not None:
        yield (
            f"algorithm.delta: {keys.delta} with algorithm.dual_clip = {keys.dual_clip}: both "
            "bound the loss of tokens with a negative advantage; remove one"
        )
    if keys.delta is not None and keys.delta <= 1 + keys.clip_high:
        yield (
            f"algorithm.delta: {keys.delta} is not above 1 + algorithm.clip_high = "
            f"{1 + keys.clip_high:g}, where ratios are clipped already; raise it, or remove the key"
        )

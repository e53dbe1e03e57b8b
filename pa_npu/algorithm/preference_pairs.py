"""Preference pairs: of each group the best response is preferred to the worst (online DPO).

The reward orders a group's responses and does nothing else. The loss is a mean over pairs; a group
whose responses are all equal is no pair and has no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pa_npu.algorithm.normaliser import Counts, token_weights
from pa_npu.algorithm.policy_gradient import POLICY
from pa_npu.algorithm.reward_credit import RewardCredit
from pa_npu.config.rules.learning import of_preset
from pa_npu.config.rules.unread import Condition, never_read

if TYPE_CHECKING:
    import torch

    from pa_npu.algorithm.loss_gradient import ExpectedGradient
    from pa_npu.algorithm.loss_sums import LossSums
    from pa_npu.algorithm.policy_losses import TokenBatch

PAIRS = "preference_pairs"


class PreferencePairs(RewardCredit):
    """One component, of the policy's own tokens.

    Their advantages, from algorithm.advantage, order the group's responses.
    """

    components = (POLICY,)

    @property
    def whole_groups_key(self) -> str | None:
        return f"algorithm.loss={self.keys.loss}"

    @property
    def reads_old_logprobs(self) -> bool:
        return False

    # The loss

    def token_weights(self, lengths: Sequence[int], device: torch.device) -> torch.Tensor:
        return token_weights(lengths, "token-mean", device)

    def loss_sums(self, batch: TokenBatch) -> LossSums:
        from pa_npu.algorithm.loss_sums import weighted_sums
        from pa_npu.algorithm.policy_losses import dpo

        return weighted_sums(batch, self.keys, dpo(batch, self.keys), kl_in_loss=False)

    @property
    def metric_names(self) -> tuple[str, ...]:
        from pa_npu.algorithm.loss_sums import metric_names
        from pa_npu.algorithm.policy_losses import PREFERENCE_METRICS

        names = metric_names(self.keys, stale=self.config.schedule.max_staleness > 0)
        return (*names, *PREFERENCE_METRICS)

    def expected_gradient(self, batch: TokenBatch) -> ExpectedGradient:
        from pa_npu.algorithm.gradient_formulas import expected_preference_gradient

        return expected_preference_gradient(batch, self.keys)

    # The normaliser

    @property
    def counted_metric(self) -> str | None:
        return PAIRS

    def normaliser(self, counts: Counts) -> float:
        """Returns the number of pairs: the loss is their mean."""
        return max(1.0, counts.units)

    def broken_normalisers(
        self, normalisers: Sequence[float], dispatched: Counts, num_groups: int
    ) -> str | None:
        are_counts = all(n >= 1 and n.is_integer() for n in normalisers)
        if are_counts and sum(normalisers) <= num_groups:
            return None
        return f"which are no numbers of pairs of {num_groups} dispatched groups"

    # Its keys

    def broken_rules(self) -> Iterator[str]:
        yield from super().broken_rules()
        config, keys = self.config, self.keys
        loss = f"algorithm.loss: {keys.loss}{of_preset(config, 'loss')}"
        if config.microbatch_responses != config.rollout.responses_per_prompt:
            yield (
                f"{loss} compares the responses of a group, but microbatch.responses = "
                f"{config.microbatch_responses} of {config.rollout.responses_per_prompt} are in a "
                "microbatch; remove microbatch.responses"
            )
        if config.microbatch.tokens is not None:
            yield (
                f"{loss} compares the responses of a group, which microbatch.tokens = "
                f"{config.microbatch.tokens} may cut; remove microbatch.tokens"
            )
        if not keys.kl_coef:
            yield (
                f"{loss} needs its beta, the larger the nearer the policy stays to the reference; "
                "set algorithm.kl_coef, e.g. to 0.1"
            )
        if keys.router_aux_coef:
            yield (
                f"{loss} is a mean over pairs, which no token has a part of; set "
                "algorithm.router_aux_coef to 0"
            )
        if keys.importance_sampling != "none":
            yield (
                f"{loss} prefers one response to another whoever sampled them, so that "
                f"algorithm.importance_sampling={keys.importance_sampling} has nothing to correct; "
                "set it to none"
            )

    @property
    def unread(self) -> tuple[Condition, ...]:
        return (
            Condition(
                "algorithm.kl_in algorithm.kl_estimator",
                never_read,
                f"take another algorithm.loss than {self.keys.loss}, whose beta is "
                "algorithm.kl_coef",
            ),
            Condition(
                "algorithm.ratio algorithm.clip_low algorithm.clip_high",
                never_read,
                "take an algorithm.loss with a ratio to clip",
            ),
            Condition(
                "algorithm.dual_clip algorithm.delta",
                never_read,
                "set algorithm.loss to clip or gspo",
            ),
            Condition("algorithm.aggregation", never_read, "take an algorithm.loss of tokens"),
        )

"""Supervised stage: cross-entropy on the tokens that rows of data mark, such as an assistant's turns.

Nothing is generated, rewarded or compared with another policy. A row's tokens carry their weight;
the loss of an iteration is the sum of -w log p over its trained tokens, divided by N.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pa_npu.algorithm.algorithm import Algorithm, Component, ScoredSamples, TokenValues
from pa_npu.algorithm.normaliser import token_weights
from pa_npu.config.rules.unread import Condition, never_read

if TYPE_CHECKING:
    import torch

    from pa_npu.algorithm.loss_gradient import ExpectedGradient
    from pa_npu.algorithm.loss_sums import LossSums
    from pa_npu.algorithm.policy_losses import TokenBatch

DEMONSTRATED = Component(1, "demonstrated", "those that rows of data mark", needs_provenance=False)
# fp32 against fp64, as a share of a token's weight.
_ROUNDING = 1e-5


class Supervised(Algorithm):
    """One component, of rows' marked tokens. algorithm.aggregation says how rows are weighted."""

    components = (DEMONSTRATED,)
    samples_from = "rows"

    @property
    def reads_old_logprobs(self) -> bool:
        return False

    # Credit

    @property
    def credit_key(self) -> str:
        return f"algorithm.loss = {self.keys.loss}, which gives no credit"

    def credit(self, group: ScoredSamples) -> TokenValues:
        return np.zeros(len(group.tokens), np.float32)

    # The loss

    def token_weights(self, lengths: Sequence[int], device: torch.device) -> torch.Tensor:
        return token_weights(lengths, self.keys.aggregation, device)

    def loss_sums(self, batch: TokenBatch) -> LossSums:
        from pa_npu.algorithm.loss_sums import LossSums

        loss = -(batch.logprobs * batch.weights).sum()
        metrics = {
            "loss": loss.detach(),
            "policy_loss": loss.detach(),
            "entropy": batch.entropy.detach().sum(),
        }
        return LossSums(loss, metrics)

    @property
    def metric_names(self) -> tuple[str, ...]:
        return ("loss", "policy_loss", "entropy")

    def expected_gradient(self, batch: TokenBatch) -> ExpectedGradient:
        from pa_npu.algorithm.loss_gradient import ExpectedGradient

        weights = batch.weights.double().numpy()
        limit = _ROUNDING * np.abs(weights) + 1e-12
        return ExpectedGradient(-weights, limit, np.ones(len(weights), np.bool_))

    # Its keys

    @property
    def unread(self) -> tuple[Condition, ...]:
        return (
            Condition(
                "algorithm.advantage algorithm.clip_low algorithm.clip_high algorithm.dual_clip "
                "algorithm.delta algorithm.kl_coef algorithm.kl_in algorithm.kl_estimator "
                "algorithm.ratio algorithm.importance_sampling algorithm.importance_cap "
                "algorithm.importance_floor algorithm.age_exponent "
                "algorithm.entropy_coef",
                never_read,
                f"algorithm.loss={self.keys.loss} is cross-entropy on what rows show",
            ),
        )

"""Preferences on data: rows of a chosen and a rejected answer; the policy learns to tell them apart (DPO).

Nothing is generated or rewarded. A group is a pair, the chosen answer first, and the loss is a mean
over pairs of a function of the margin

    m = beta (h(chosen) - h(rejected)),   h(o) = log pi(o) - log pi_reference(o)

algorithm.preference_loss names the function, beta is algorithm.kl_coef, and a pair's weight, which
its row may give, multiplies its loss. Log-probs are sums over the answer's trained tokens, or means
where the name says so:

| preference_loss | loss of a pair, s = label_smoothing                                | h    | source                       |
|-----------------|--------------------------------------------------------------------|------|------------------------------|
| sigmoid         | -(1 - s) log sigmoid(m) - s log sigmoid(-m)                        | sum  | arXiv 2305.18290, eq. 7; its |
|                 |                                                                    |      | conservative form with s > 0 |
| robust          | (-(1 - s) log sigmoid(m) + s log sigmoid(-m)) / (1 - 2 s)          | sum  | arXiv 2403.00409             |
| sigmoid-norm    | as sigmoid                                                         | mean | TRL's sigmoid_norm           |
| ipo             | (m / beta - 1 / (2 beta))^2                                        | mean | arXiv 2310.12036, eq. 17, by |
|                 |                                                                    |      | token as its authors use it  |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pa_npu.algorithm.algorithm import Algorithm, Component, ScoredSamples, TokenValues
from pa_npu.algorithm.normaliser import Counts, token_weights
from pa_npu.config.rules.unread import Condition, never_read

if TYPE_CHECKING:
    import torch

    from pa_npu.algorithm.loss_gradient import ExpectedGradient
    from pa_npu.algorithm.loss_sums import LossSums
    from pa_npu.algorithm.policy_losses import TokenBatch

COMPARED = Component(
    1, "compared", "those of answers that rows of data compare", needs_provenance=False
)
_PAIR = 2
_CHOSEN, _REJECTED = 1.0, -1.0
_BY_TOKEN = ("sigmoid-norm", "ipo")
# fp32 sums over answers against fp64 ones, as a share of the terms.
_ROUNDING_OF_SUMS = 2e-3


class RowPreferences(Algorithm):
    """One component, of the two answers of every pair.

    The advantages say which answer is the chosen one: 1 on its tokens, -1 on those of the other.
    """

    components = (COMPARED,)
    samples_from = "rows"
    row_is = "pair"
    held_out_names = ("loss", "preference_margin", "preference_accuracy")

    @property
    def whole_groups_key(self) -> str | None:
        return f"algorithm.loss={self.keys.loss}"

    @property
    def reads_old_logprobs(self) -> bool:
        return False

    # Credit

    @property
    def credit_key(self) -> str:
        return f"algorithm.loss = {self.keys.loss}, which prefers the first row of a pair"

    def credit(self, group: ScoredSamples) -> TokenValues:
        if len(group.lengths) != _PAIR:
            raise ValueError(f"a group of {len(group.lengths)} rows is no pair")
        return group.spread(np.array([_CHOSEN, _REJECTED], np.float32))

    # The loss

    def token_weights(self, lengths: Sequence[int], device: torch.device) -> torch.Tensor:
        return token_weights(lengths, "token-mean", device)

    def loss_sums(self, batch: TokenBatch) -> LossSums:
        from pa_npu.algorithm.loss_sums import LossSums

        losses, metrics = self._pairs(batch)
        weights = batch.response_mean(batch.weights).view(-1, _PAIR).mean(dim=1)
        loss = (losses * weights).sum()
        detached = {"loss": loss.detach(), "policy_loss": loss.detach()}
        entropy = batch.entropy.detach().sum()
        return LossSums(loss, {**detached, "entropy": entropy, **metrics})

    @property
    def metric_names(self) -> tuple[str, ...]:
        return (
            "loss",
            "policy_loss",
            "entropy",
            "preference_pairs",
            "preference_margin",
            "preference_right",
            "preference_chosen",
            "preference_rejected",
        )

    def _pairs(self, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the loss of each pair, before its weight, and sums over pairs by name."""
        import torch

        if batch.reference_logprobs is None or batch.num_responses % _PAIR:
            raise ValueError(
                f"a preference needs reference log-probs and pairs, not {batch.num_responses} rows"
            )
        sides = batch.response_mean(batch.advantages).sign().view(-1, _PAIR)
        ratios = batch.logprobs - batch.reference_logprobs
        gained = batch.response_sum(ratios).view(-1, _PAIR)
        compared = gained
        if self.keys.preference_loss in _BY_TOKEN:
            compared = batch.response_mean(ratios).view(-1, _PAIR)
        losses = self._loss_of((compared * sides).sum(dim=1))
        with torch.no_grad():
            rewards = self.keys.kl_coef * gained
            margin = (rewards * sides).sum(dim=1)
            metrics = {
                "preference_pairs": torch.ones_like(margin).sum(),
                "preference_margin": margin.sum(),
                "preference_right": (margin > 0).float().sum(),
                "preference_chosen": (rewards * (sides > 0)).sum(),
                "preference_rejected": (rewards * (sides < 0)).sum(),
            }
        return losses, metrics

    def _loss_of(self, difference: torch.Tensor) -> torch.Tensor:
        """[pairs] of h(chosen) - h(rejected) -> [pairs]."""
        from torch.nn.functional import logsigmoid

        beta, share, name = self.keys.kl_coef, self.keys.label_smoothing, self.keys.preference_loss
        if name == "ipo":
            return (difference - 1 / (2 * beta)) ** 2
        right, wrong = -logsigmoid(beta * difference), -logsigmoid(-beta * difference)
        if name == "robust":
            return ((1 - share) * right - share * wrong) / (1 - 2 * share)
        return (1 - share) * right + share * wrong

    def expected_gradient(self, batch: TokenBatch) -> ExpectedGradient:
        from pa_npu.algorithm.loss_gradient import ExpectedGradient

        assert batch.reference_logprobs is not None, "a preference has a reference"
        ratios = (batch.logprobs.double() - batch.reference_logprobs.double()).numpy()
        index, weights = batch.response_index.numpy(), batch.weights.double().numpy()
        lengths = np.bincount(index, minlength=batch.num_responses)
        gained = np.bincount(index, weights=ratios, minlength=batch.num_responses)
        part = np.ones(batch.num_responses)
        if self.keys.preference_loss in _BY_TOKEN:
            part = 1 / lengths
        starts = np.cumsum(lengths) - lengths
        sides = np.sign(batch.advantages.double().numpy()[starts])
        difference = (gained * part * sides).reshape(-1, _PAIR).sum(axis=1)
        slope = self._slope_of(difference)
        weight = weights[starts].reshape(-1, _PAIR).mean(axis=1)
        values = ((slope * weight).repeat(_PAIR) * sides * part)[index]
        # rounding of the difference, which is a sum over both answers, moves the slope too
        terms = np.bincount(index, weights=np.abs(ratios), minlength=batch.num_responses) * part
        reach = self._curvature * (terms.reshape(-1, _PAIR).sum(axis=1) + 1) * 1e-4
        moved = ((reach * weight).repeat(_PAIR) * part)[index]
        limit = _ROUNDING_OF_SUMS * np.abs(values) + moved + 1e-9
        return ExpectedGradient(values, limit, np.ones(len(values), np.bool_))

    def _slope_of(self, difference: np.ndarray) -> np.ndarray:
        """Returns the derivative of `_loss_of`, in fp64."""
        beta, share, name = self.keys.kl_coef, self.keys.label_smoothing, self.keys.preference_loss
        if name == "ipo":
            slope: np.ndarray = 2 * (difference - 1 / (2 * beta))
            return slope
        right = 1 / (1 + np.exp(-beta * difference))
        if name == "robust":
            slope = -beta * ((1 - share) * (1 - right) + share * right) / (1 - 2 * share)
            return slope
        slope = -beta * ((1 - share) * (1 - right) - share * right)
        return slope

    @property
    def _curvature(self) -> float:
        """The largest second derivative of `_loss_of`."""
        if self.keys.preference_loss == "ipo":
            return 2.0
        return self.keys.kl_coef**2 / 4

    # Held-out rows

    def held_out_sums(self, batch: TokenBatch) -> Mapping[str, torch.Tensor]:
        losses, metrics = self._pairs(batch)
        return {
            "loss": losses.sum(),
            "preference_margin": metrics["preference_margin"],
            "preference_accuracy": metrics["preference_right"],
        }

    def held_out_count(self, *, rows: int, tokens: int) -> int:
        return rows // _PAIR

    # The normaliser

    def normaliser(self, counts: Counts) -> float:
        """Returns the number of pairs: the loss is their mean."""
        return counts.responses / _PAIR

    # Its keys

    def broken_rules(self) -> Iterator[str]:
        config, keys = self.config, self.keys
        loss = f"algorithm.loss={keys.loss}"
        if config.rollout.responses_per_prompt != _PAIR:
            yield (
                f"rollout.responses_per_prompt: {config.rollout.responses_per_prompt} with {loss}, "
                "whose groups are pairs of a chosen and a rejected answer; set it to 2, or remove "
                "it beside algorithm.name=dpo"
            )
        elif config.microbatch_responses != _PAIR:
            yield (
                f"microbatch.responses: {config.microbatch_responses} with {loss}, which compares "
                "the two answers of a pair in one microbatch; remove it, and pack pairs with "
                "microbatch.max_tokens"
            )
        elif config.microbatch.tokens is not None:
            yield (
                f"microbatch.tokens: {config.microbatch.tokens} with {loss}, whose pairs it may "
                "cut; pack pairs with microbatch.max_tokens"
            )
        if not keys.kl_coef:
            yield (
                f"algorithm.kl_coef: 0 with {loss}, whose beta it is, the larger the nearer the "
                "policy stays to the reference; set it, e.g. to 0.1"
            )
        if keys.preference_loss == "ipo" and keys.label_smoothing:
            yield (
                f"algorithm.label_smoothing: {keys.label_smoothing:g} with "
                "algorithm.preference_loss=ipo, which has no labels to smooth; remove it, or take "
                "another preference_loss"
            )
        if keys.preference_loss == "robust" and not keys.label_smoothing:
            yield (
                "algorithm.preference_loss: robust with algorithm.label_smoothing = 0, which is "
                "sigmoid; set label_smoothing to the share of pairs that are the wrong way round, "
                "or preference_loss to sigmoid"
            )

    @property
    def unread(self) -> tuple[Condition, ...]:
        return (
            Condition(
                "algorithm.advantage algorithm.aggregation algorithm.clip_low algorithm.clip_high "
                "algorithm.dual_clip algorithm.delta algorithm.kl_in algorithm.kl_estimator "
                "algorithm.ratio algorithm.importance_sampling algorithm.importance_cap "
                "algorithm.importance_floor algorithm.age_exponent algorithm.entropy_coef",
                never_read,
                f"algorithm.loss={self.keys.loss} is a mean over pairs of rows, whose beta is "
                "algorithm.kl_coef",
            ),
        )

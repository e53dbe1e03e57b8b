"""The trained tokens of a microbatch, their weights, and the losses: one function per algorithm, registered under its config value.

A loss is `(TokenBatch, AlgorithmConfig) -> PolicyTerms`. r is the ratio to the old policy, A the
advantage; the old policy is the policy itself (ratio 1) when an iteration makes one update. How
tokens are weighted is not the loss's business (normaliser.py). A loss of your own: write such a
function anywhere importable and set algorithm.loss=module:function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from pa_npu.algorithm.choices import Choices
from pa_npu.config.sections.learning import AlgorithmConfig
from pa_npu.config.user_code import find_function


@dataclass(frozen=True)
class TokenBatch:
    """Every field is [tokens] fp32 unless stated; tokens are ordered by response."""

    logprobs: torch.Tensor  # of the policy, with gradient
    entropy: torch.Tensor  # of the policy's next-token distribution, in nats
    # of the policy that the ratio is taken against, proximal or sampling, no gradient
    old_logprobs: torch.Tensor
    # of the reference, no gradient; None where there is none
    reference_logprobs: torch.Tensor | None
    engine_logprobs: torch.Tensor  # what the engine reported when it sampled the token
    advantages: torch.Tensor
    weights: torch.Tensor  # of the aggregation, times those that the datum gives
    # int64, which response of the microbatch a token belongs to, from 0
    response_index: torch.Tensor
    num_responses: int
    # responses of a prompt; they are consecutive, though a microbatch may hold a part of a group
    group_size: int
    # by how many versions a token is older than what it trains; None with max_staleness=0
    ages: torch.Tensor | None = None
    # declared columns by name, [tokens, *shape], their dtype; "component", "weight" and "written"
    # where they say something
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    # of the teacher's most likely tokens; None where the algorithm compares no distributions
    choices: Choices | None = None

    def select(self, rows: torch.Tensor) -> TokenBatch:
        """Returns the batch of some of its tokens. rows: bool [tokens]."""
        return self._with_columns(lambda values: values[rows])

    def wide(self) -> TokenBatch:
        """Returns the batch with all its floating-point columns in fp64."""
        return self._with_columns(
            lambda values: values.double() if values.is_floating_point() else values
        )

    def _with_columns(self, change: Callable[[torch.Tensor], torch.Tensor]) -> TokenBatch:
        changed: dict[str, Any] = {
            name: change(values)
            for name, values in vars(self).items()
            if isinstance(values, torch.Tensor)
        }
        return replace(
            self,
            **changed,
            columns={name: change(values) for name, values in self.columns.items()},
            choices=None if self.choices is None else self.choices.map(change),
        )

    def response_sum(self, values: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [responses]."""
        sums = torch.zeros(self.num_responses, dtype=values.dtype, device=values.device)
        return sums.index_add(0, self.response_index, values)

    def response_mean(self, values: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [responses]."""
        return self.response_sum(values) / self.response_sum(torch.ones_like(values))

    def per_token(self, response_values: torch.Tensor) -> torch.Tensor:
        """[responses] -> [tokens]."""
        return response_values.index_select(0, self.response_index)


@dataclass(frozen=True)
class PolicyTerms:
    loss: torch.Tensor  # [tokens], to be weighted and summed
    clipped: torch.Tensor  # [tokens] bool, where the clip changes the gradient
    # sums by name, of losses that have their own
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


PREFERENCE_METRICS = ("preference_pairs", "preference_margin", "preference_right")
"""Sums over pairs: 1, the margin, and whether it is positive."""

PolicyLoss = Callable[[TokenBatch, AlgorithmConfig], PolicyTerms]


def clip(batch: TokenBatch, config: AlgorithmConfig) -> PolicyTerms:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); with dual_clip or delta bounded for A < 0,
    see _clipped.

    PPO, arXiv 1707.06347, eq. 7; per token in GRPO, arXiv 2402.03300, eq. 3; with clip_high >
    clip_low in DAPO, arXiv 2503.14476, eq. 8.
    """
    ratio = (batch.logprobs - batch.old_logprobs).exp()
    return _clipped(ratio, batch.advantages, config)


def gspo(batch: TokenBatch, config: AlgorithmConfig) -> PolicyTerms:
    """Returns the clip on the sequence ratio s_i = (pi(o_i) / pi_old(o_i))^(1/|o_i|), which all
    tokens of a response share.

    GSPO, arXiv 2507.18071, eq. 5 to 7. The paper averages over responses:
    aggregation=sequence-mean.
    """
    sequence_ratio = batch.response_mean(batch.logprobs - batch.old_logprobs).exp()
    return _clipped(batch.per_token(sequence_ratio), batch.advantages, config)


def cispo(batch: TokenBatch, config: AlgorithmConfig) -> PolicyTerms:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi: clips the weight and keeps every token's
    gradient.

    MiniMax-M1, arXiv 2506.13585, eq. 4 and 5; no lower bound there (clip_low=1), the upper one is
    not published.
    """
    ratio = (batch.logprobs.detach() - batch.old_logprobs).exp()
    weight = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return PolicyTerms(-weight * batch.advantages * batch.logprobs, weight != ratio)


def reinforce(batch: TokenBatch, config: AlgorithmConfig) -> PolicyTerms:
    """-A log pi, no ratio and no clip: exact on-policy REINFORCE, as RLOO uses it, arXiv
    2402.14740.
    """
    return PolicyTerms(
        -batch.advantages * batch.logprobs, torch.zeros_like(batch.logprobs, dtype=torch.bool)
    )


def dpo(batch: TokenBatch, config: AlgorithmConfig) -> PolicyTerms:
    """-log sigmoid(m) of each group's pair, spread evenly over the tokens of its two responses:
    online DPO.

        m = beta (h(best) - h(worst)),   h(o) = log pi(o) - log pi_reference(o), sums over the
                                         response

    Best and worst by advantage, which orders responses as their reward does; of equal ones the
    first. Where all are equal there is no preference: the group's tokens have the loss 0, and it is
    no pair, of which the update's loss is the mean. Whole groups only.

    DPO: Rafailov et al., arXiv 2305.18290, eq. 7; best and worst of K online samples, trained
    asynchronously: arXiv 2410.18252.
    """
    size = batch.group_size
    if batch.reference_logprobs is None or batch.num_responses % size:
        raise ValueError(
            f"a preference needs reference log-probs and whole groups of {size}, not "
            f"{batch.num_responses} responses"
        )
    lengths = batch.response_sum(torch.ones_like(batch.logprobs))
    first_tokens = (lengths.cumsum(0) - lengths).round().long()
    scores = batch.advantages.index_select(0, first_tokens).view(-1, size)
    # argmax promises no order among equal values
    earlier = torch.arange(size, 0, -1, device=scores.device)
    highest, lowest = scores.max(dim=1, keepdim=True).values, scores.min(dim=1, keepdim=True).values
    best, worst = (
        ((scores == value) * earlier).argmax(dim=1, keepdim=True) for value in (highest, lowest)
    )
    is_pair = (highest > lowest).squeeze(1).to(batch.logprobs.dtype)

    gained = batch.response_sum(batch.logprobs - batch.reference_logprobs).view(-1, size)
    margin = config.kl_coef * (gained.gather(1, best) - gained.gather(1, worst)).squeeze(1)
    loss = -logsigmoid(margin) * is_pair
    chosen = (
        torch.zeros_like(scores, dtype=lengths.dtype).scatter(1, best, 1.0).scatter(1, worst, 1.0)
    )
    num_tokens = (chosen * lengths.view(-1, size)).sum(dim=1)
    token_loss = batch.per_token(((loss / num_tokens)[:, None] * chosen).flatten())
    margin = margin.detach()
    sums = (is_pair.sum(), (margin * is_pair).sum(), ((margin > 0) * is_pair).sum())
    clipped = torch.zeros_like(batch.logprobs, dtype=torch.bool)
    return PolicyTerms(token_loss, clipped, dict(zip(PREFERENCE_METRICS, sums, strict=True)))


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "clip": clip,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
}


def find_policy_loss(name: str) -> PolicyLoss:
    """Returns the registered loss, or the function that `module:function` names.

    Raises ConfigError when there is none.
    """
    function: PolicyLoss = find_function("algorithm.loss", name, POLICY_LOSSES)
    return function


def _clipped(ratio: torch.Tensor, advantages: torch.Tensor, config: AlgorithmConfig) -> PolicyTerms:
    """Returns the clip's loss, which for A < 0 grows with the ratio without end unless one of the
    two keys bounds it.

    dual_clip = c: min(loss, -c A) where A < 0. Ye et al., arXiv 1912.09729, eq. 5; verl's
    clip_ratio_c.
    delta: the unclipped ratio is at most delta. INTELLECT-2, arXiv 2505.07291, eq. 2; TRL's delta.
    """
    clamped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    free = -(ratio if config.delta is None else ratio.clamp(max=config.delta)) * advantages
    bounded = -clamped * advantages
    loss, clipped = torch.maximum(free, bounded), bounded > free
    if config.delta is not None:
        clipped = clipped | ((ratio > config.delta) & (advantages < 0))
    if config.dual_clip is not None:
        limit = -config.dual_clip * advantages
        beyond = (advantages < 0) & (loss > limit)
        loss, clipped = torch.where(beyond, limit, loss), clipped | beyond
    return PolicyTerms(loss, clipped)

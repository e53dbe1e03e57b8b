"""Policy-gradient losses per token: one function per algorithm, registered under the config value that selects it.

A loss is `(TokenBatch, AlgorithmConfig) -> PolicyTerms`. r is the ratio to the old policy, A the advantage; the old policy is the
policy itself (ratio 1) when an iteration makes one update. How tokens are weighted is aggregation's business, not the loss's.
A loss of your own: write such a function anywhere importable and set algorithm.loss=module:function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from pa_npu.algorithm.batch import TokenBatch
from pa_npu.algorithm.preference import preference_loss
from pa_npu.config.sections import AlgorithmConfig
from pa_npu.config.user_code import find_function


@dataclass(frozen=True)
class PolicyTerms:
    loss: torch.Tensor  # [tokens], to be weighted and summed
    clipped: torch.Tensor  # [tokens] bool, where the clip changes the gradient
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)  # sums by name, of losses that have their own


PolicyLoss = Callable[[TokenBatch, AlgorithmConfig], PolicyTerms]


def clip(batch: TokenBatch, config: AlgorithmConfig) -> PolicyTerms:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); with dual_clip or delta bounded for A < 0, see _clipped.

    PPO, arXiv 1707.06347, eq. 7; per token in GRPO, arXiv 2402.03300, eq. 3; with clip_high > clip_low in DAPO,
    arXiv 2503.14476, eq. 8.
    """
    ratio = (batch.logprobs - batch.old_logprobs).exp()
    return _clipped(ratio, batch.advantages, config)


def gspo(batch: TokenBatch, config: AlgorithmConfig) -> PolicyTerms:
    """The clip on the sequence ratio s_i = (pi(o_i) / pi_old(o_i))^(1/|o_i|), which all tokens of a response share.

    GSPO, arXiv 2507.18071, eq. 5 to 7. The paper averages over responses: aggregation=sequence-mean.
    """
    sequence_ratio = batch.response_mean(batch.logprobs - batch.old_logprobs).exp()
    return _clipped(batch.per_token(sequence_ratio), batch.advantages, config)


def cispo(batch: TokenBatch, config: AlgorithmConfig) -> PolicyTerms:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi: clips the weight and keeps every token's gradient.

    MiniMax-M1, arXiv 2506.13585, eq. 4 and 5; no lower bound there (clip_low=1), the upper one is not published.
    """
    ratio = (batch.logprobs.detach() - batch.old_logprobs).exp()
    weight = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return PolicyTerms(-weight * batch.advantages * batch.logprobs, weight != ratio)


def reinforce(batch: TokenBatch, config: AlgorithmConfig) -> PolicyTerms:
    """-A log pi, no ratio and no clip: exact on-policy REINFORCE, as RLOO uses it, arXiv 2402.14740."""
    return PolicyTerms(-batch.advantages * batch.logprobs, torch.zeros_like(batch.logprobs, dtype=torch.bool))


def dpo(batch: TokenBatch, config: AlgorithmConfig) -> PolicyTerms:
    """-log sigmoid(beta (log-ratio of the group's best response - that of its worst)), ratios to the reference: online DPO.

    See pa_npu.algorithm.preference. Whole groups only; the update's loss is the mean over pairs.
    """
    loss, metrics = preference_loss(batch, config)
    return PolicyTerms(loss, torch.zeros_like(batch.logprobs, dtype=torch.bool), metrics)


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "clip": clip,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "dpo": dpo,
}


def find_policy_loss(name: str) -> PolicyLoss:
    """The registered loss, or the function that `module:function` names. Raises ConfigError when there is none."""
    found: PolicyLoss = find_function("algorithm.loss", name, POLICY_LOSSES)
    return found


def _clipped(ratio: torch.Tensor, advantages: torch.Tensor, config: AlgorithmConfig) -> PolicyTerms:
    """The clip's loss, which for A < 0 grows with the ratio without end unless one of the two keys bounds it.

    dual_clip = c: min(loss, -c A) where A < 0. Ye et al., arXiv 1912.09729, eq. 5; verl's clip_ratio_c.
    delta: the unclipped ratio is at most delta. INTELLECT-2, arXiv 2505.07291, eq. 2; TRL's delta.
    """
    clamped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    free = -(ratio if config.delta is None else ratio.clamp(max=config.delta)) * advantages
    bounded = -clamped * advantages
    loss, clipped = torch.maximum(free, bounded), bounded > free
    if config.delta is not None:
        clipped = clipped | ((ratio > config.delta) & (advantages < 0))
    if config.dual_clip is not None:
        most = -config.dual_clip * advantages
        beyond = (advantages < 0) & (loss > most)
        loss, clipped = torch.where(beyond, most, loss), clipped | beyond
    return PolicyTerms(loss, clipped)

"""KL estimates between policies, and the weights of tokens that another policy sampled than the one that is trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pa_npu.algorithm.advantages import LINEAR_ADVANTAGES
from pa_npu.algorithm.policy_losses import TokenBatch
from pa_npu.config.sections.learning import AlgorithmConfig


def k1(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """-d with d = reference - policy: unbiased for KL(policy || reference) on the policy's samples;
    may be negative.

    In the loss its expected gradient is zero, because that of log pi is; it acts in the reward
    only. Estimators k1, k2, k3 after J. Schulman, "Approximating KL Divergence", 2020. All are per
    token, [tokens].
    """
    return logprobs - reference


def k2(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """d^2 / 2: biased, low variance; its expected gradient is that of KL(policy || reference)."""
    return 0.5 * (reference - logprobs).square()


def k3(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """exp(d) - 1 - d: unbiased and never negative; its expected gradient is that of KL(reference ||
    policy), the other direction.

    GRPO's choice, arXiv 2402.03300, eq. 4.
    """
    difference = reference - logprobs
    return difference.exp() - 1.0 - difference


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def kl_reward_advantages(
    batch: TokenBatch, estimator: str, coefficient: float, kind: str
) -> torch.Tensor:
    """Returns the advantages, [tokens], of -coefficient * KL(old policy || reference) as a part of
    each response's reward.

    KL is estimated by the sum over the response's tokens: with k1 the reward of RLOO, arXiv
    2402.14740. `kind` is one of LINEAR_ADVANTAGES, which are the sum of the rewards' and the KL's,
    so that the coordinator need not know the KL. Every group of the batch must be whole.
    """
    if batch.reference_logprobs is None or batch.num_responses % batch.group_size:
        raise ValueError(
            f"KL in the reward needs reference log-probs and whole groups of {batch.group_size}, "
            f"not {batch.num_responses} responses"
        )
    kl = KL_ESTIMATORS[estimator](batch.old_logprobs, batch.reference_logprobs)
    rewards = -coefficient * batch.response_sum(kl).view(-1, batch.group_size)
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    advantages = centred * LINEAR_ADVANTAGES[kind](batch.group_size)
    return batch.per_token(advantages.flatten())


@dataclass(frozen=True)
class TokenWeights:
    """Factors of the tokens' losses, without gradient, [tokens], and where they were truncated or
    masked, [tokens] bool.
    """

    values: torch.Tensor
    cut: torch.Tensor


def importance_weights(batch: TokenBatch, config: AlgorithmConfig) -> TokenWeights:
    """pi_proximal / pi_sampling of each token, or of the whole response (product over its tokens),
    kept within bounds.

    Sampling: what the engine reported. It differs from the proximal policy by what the engine
    computes differently, and by the updates since (staleness), so one weight corrects for both; the
    KL and entropy terms are left alone. With the clip's ratio against the proximal policy this is
    decoupled PPO: Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298.

    no floor    min(w, cap)                    TIS: Yao et al., "Your efficient RL framework secretly brings you off-policy RL
                                               training", 2025; truncation: Ionides, 2008
    a floor     w where floor <= w <= cap, else 0    with floor = 0 MIS: Liu et al., "When speed kills stability", 2025;
                                               of tokens and with a floor IcePop: Ring-1T, arXiv
                                               2510.18855
    """
    log_ratio = batch.old_logprobs - batch.engine_logprobs
    if config.importance_sampling == "sequence":
        log_ratio = batch.per_token(batch.response_sum(log_ratio))
    ratio = log_ratio.exp()
    if config.importance_floor is None:
        return TokenWeights(ratio.clamp(max=config.importance_cap), ratio > config.importance_cap)
    cut = (ratio > config.importance_cap) | (ratio < config.importance_floor)
    return TokenWeights(torch.where(cut, torch.zeros_like(ratio), ratio), cut)


def age_weights(ages: torch.Tensor, exponent: float) -> torch.Tensor:
    """(1 + age)^-exponent, [tokens]: 1 for tokens of the trained version."""
    return (1.0 + ages).pow(-exponent)


def effective_sample_size(weight_sum: float, square_sum: float, count: float) -> float:
    """(sum w)^2 / (n sum w^2), between 0 and 1: how many equally weighted samples n weighted ones
    are worth, as a share of n.

    Kong, "A note on importance sampling using standardized weights", 1992.
    """
    return weight_sum * weight_sum / (count * square_sum) if square_sum else 0.0

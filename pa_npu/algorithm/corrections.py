"""KL estimates between policies, and truncated importance sampling between engine and trainer."""

from __future__ import annotations

import torch

from pa_npu.algorithm.batch import TokenBatch


def k1(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """-d with d = other - policy: unbiased for KL(policy || other) on the policy's samples; may be negative.

    In the loss its expected gradient is zero, because that of log pi is; it acts in the reward only. Estimators k1, k2, k3
    after J. Schulman, "Approximating KL Divergence", 2020. All are per token, [tokens].
    """
    return logprobs - other


def k2(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """d^2 / 2: biased, low variance; its expected gradient is that of KL(policy || other)."""
    return 0.5 * (other - logprobs).square()


def k3(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """exp(d) - 1 - d: unbiased and never negative; its expected gradient is that of KL(other || policy), the other direction.

    GRPO's choice, arXiv 2402.03300, eq. 4.
    """
    difference = other - logprobs
    return difference.exp() - 1.0 - difference


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def kl_reward_advantages(batch: TokenBatch, estimator: str, coefficient: float, kind: str) -> torch.Tensor:
    """What -coefficient * KL(old policy || reference) of each response, as part of its reward, adds to the advantages, [tokens].

    KL is estimated by the sum over the response's tokens: with k1 the reward of RLOO, arXiv 2402.14740. Advantages that are
    linear in the rewards (centred, leave-one-out) are the sum of the rewards' and the KL's, so that the coordinator
    need not know the KL. Every group of the batch must be whole.
    """
    if batch.reference_logprobs is None or batch.num_responses % batch.group_size:
        raise ValueError(
            f"KL in the reward needs reference log-probs and whole groups of {batch.group_size}, "
            f"not {batch.num_responses} responses"
        )
    kl = KL_ESTIMATORS[estimator](batch.old_logprobs, batch.reference_logprobs)
    rewards = -coefficient * batch.response_sum(kl).view(-1, batch.group_size)
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    if kind == "leave-one-out":
        advantages = advantages * (batch.group_size / (batch.group_size - 1))
    return batch.per_token(advantages.flatten())


def engine_weights(batch: TokenBatch, level: str, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Truncated importance weights min(pi_old / pi_engine, cap), [tokens], and where they were truncated, [tokens] bool.

    level "token": of each token; "sequence": of the whole response (product over its tokens). They correct for an engine whose
    log-probs differ from the trainer's for the same weights, and leave the KL and entropy terms alone. TIS: Yao et al., "Your
    efficient RL framework secretly brings you off-policy RL training", 2025; truncation: Ionides, 2008.
    """
    log_ratio = batch.old_logprobs - batch.engine_logprobs
    if level == "sequence":
        log_ratio = batch.per_token(batch.response_sum(log_ratio))
    ratio = log_ratio.exp()
    return ratio.clamp(max=cap), ratio > cap

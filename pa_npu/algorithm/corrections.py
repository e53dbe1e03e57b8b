"""KL estimates between policies, and truncated importance sampling between engine and trainer."""

from __future__ import annotations

import torch

from pa_npu.algorithm.batch import TokenBatch


def k1(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """-d with d = other - policy: unbiased for KL(policy || other) on the policy's samples; may be negative.

    Estimators k1, k2, k3 after J. Schulman, "Approximating KL Divergence", 2020. All are per token, [tokens].
    """
    return logprobs - other


def k2(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """d^2 / 2: biased, low variance; its gradient is the KL's in expectation."""
    return 0.5 * (other - logprobs).square()


def k3(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """exp(d) - 1 - d: unbiased and never negative. GRPO's choice, arXiv 2402.03300, eq. 4."""
    difference = other - logprobs
    return difference.exp() - 1.0 - difference


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def engine_weights(batch: TokenBatch, level: str, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Truncated importance weights min(pi_old / pi_engine, cap), [tokens], and where they were truncated, [tokens] bool.

    level "token": of each token; "sequence": of the whole response (product over its tokens). They correct for an engine whose
    log-probs differ from the trainer's for the same weights. TIS: Yao et al., "Your efficient RL framework secretly brings
    you off-policy RL training", 2025; truncation: Ionides, 2008.
    """
    log_ratio = batch.old_logprobs - batch.engine_logprobs
    if level == "sequence":
        log_ratio = batch.per_token(batch.response_sum(log_ratio))
    ratio = log_ratio.exp()
    return ratio.clamp(max=cap), ratio > cap

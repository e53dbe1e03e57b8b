"""Per-token losses of the policy-gradient algorithms: plain functions of a dataclass of tensors.

An algorithm is one function `(TokenBatch, AlgorithmConfig) -> PolicyTerms`, registered in POLICY_LOSSES under its config value.
All tensors are [tokens]: the response tokens of one microbatch, in packed order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pa_npu.config.schema import AlgorithmConfig


@dataclass(frozen=True)
class TokenBatch:
    """The response tokens of one microbatch; every field is [tokens] fp32 unless stated."""

    logprobs: torch.Tensor  # of the policy, with gradient
    entropy: torch.Tensor  # of the policy's next-token distribution, in nats
    old_logprobs: torch.Tensor  # of the policy that the ratio is taken against, no gradient
    reference_logprobs: torch.Tensor | None  # of the reference, no gradient; None when kl_coef is 0
    engine_logprobs: torch.Tensor  # what the engine reported when it sampled the token
    advantages: torch.Tensor
    weights: torch.Tensor  # of aggregation.token_weights
    response_index: torch.Tensor  # int64, which response a token belongs to


@dataclass(frozen=True)
class PolicyTerms:
    loss: torch.Tensor  # [tokens], to be weighted and summed
    clipped: torch.Tensor  # [tokens] bool, where the clip is active


@dataclass(frozen=True)
class LossSums:
    """Sums over one microbatch. `loss` carries the gradient; `metrics` holds detached unweighted sums, by name."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


def grpo(batch: TokenBatch, config: AlgorithmConfig) -> PolicyTerms:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logp - logp_old). GRPO, arXiv 2402.03300, eq. 3."""
    ratio = (batch.logprobs - batch.old_logprobs).exp()
    clamped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    unclipped_loss, clipped_loss = -ratio * batch.advantages, -clamped * batch.advantages
    return PolicyTerms(torch.maximum(unclipped_loss, clipped_loss), clipped_loss > unclipped_loss)


POLICY_LOSSES: dict[str, Callable[[TokenBatch, AlgorithmConfig], PolicyTerms]] = {"grpo": grpo}


def k3(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """k3 estimate of KL(policy || other) per token: exp(d) - 1 - d with d = other - policy. Schulman, "Approximating KL Divergence"."""
    difference = other - logprobs
    return difference.exp() - 1.0 - difference


def loss_sums(batch: TokenBatch, config: AlgorithmConfig) -> LossSums:
    """The weighted, unnormalised sum over a microbatch of policy loss + kl_coef * k3 - entropy_coef * entropy."""
    terms = POLICY_LOSSES[config.name](batch, config)
    token_loss = terms.loss
    mismatch = (batch.logprobs - batch.engine_logprobs).detach()
    metrics = {
        "policy_loss": (terms.loss.detach() * batch.weights).sum(),
        "entropy": batch.entropy.detach().sum(),
        "clipped": terms.clipped.float().sum(),
        "logprob_diff": mismatch.abs().sum(),
        "logprob_k3": k3(batch.logprobs.detach(), batch.engine_logprobs).sum(),
    }
    if batch.reference_logprobs is not None:
        kl = k3(batch.logprobs, batch.reference_logprobs)
        token_loss = token_loss + config.kl_coef * kl
        metrics["kl"] = kl.detach().sum()
    if config.entropy_coef:
        token_loss = token_loss - config.entropy_coef * batch.entropy
    loss = (token_loss * batch.weights).sum()
    return LossSums(loss, {**metrics, "loss": loss.detach()})

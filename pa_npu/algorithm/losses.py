"""The loss of one microbatch: policy loss, KL and entropy terms, weighted and summed but never normalised."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pa_npu.algorithm.batch import TokenBatch
from pa_npu.algorithm.corrections import KL_ESTIMATORS, engine_weights, k3, kl_reward_advantages
from pa_npu.algorithm.policy_losses import PolicyLoss
from pa_npu.config.sections import AlgorithmConfig


@dataclass(frozen=True)
class LossSums:
    """Sums over one microbatch. `loss` carries the gradient; `metrics` holds detached sums, by name (see metric_names)."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


def metric_names(config: AlgorithmConfig) -> tuple[str, ...]:
    """Names in LossSums.metrics: loss and policy_loss are weighted sums, the others sums over tokens."""
    names: tuple[str, ...] = ("loss", "policy_loss", "entropy", "clipped")
    if config.kl_coef:
        names += ("kl",)
    if config.importance_sampling != "none":
        names += ("importance_weight", "importance_truncated")
    return names


def loss_sums(batch: TokenBatch, config: AlgorithmConfig, policy_loss: PolicyLoss) -> LossSums:
    """The weighted sum of w * policy loss + kl_coef * KL - entropy_coef * entropy; w: engine importance weights, if asked for."""
    if config.kl_coef and config.kl_in == "reward":
        extra = kl_reward_advantages(batch, config.kl_estimator, config.kl_coef, config.advantage)
        batch = replace(batch, advantages=batch.advantages + extra)
    terms = policy_loss(batch, config)
    token_loss = terms.loss
    metrics = {
        "entropy": batch.entropy.detach().sum(),
        "clipped": terms.clipped.float().sum(),
    }
    if config.importance_sampling != "none":
        importance, truncated = engine_weights(batch, config.importance_sampling, config.importance_cap)
        token_loss = token_loss * importance
        metrics |= {"importance_weight": importance.sum(), "importance_truncated": truncated.float().sum()}
    metrics["policy_loss"] = (token_loss.detach() * batch.weights).sum()
    if batch.reference_logprobs is not None:
        kl = KL_ESTIMATORS[config.kl_estimator](batch.logprobs, batch.reference_logprobs)
        metrics["kl"] = k3(batch.logprobs.detach(), batch.reference_logprobs).sum()
        if config.kl_in == "loss":
            token_loss = token_loss + config.kl_coef * kl
    if config.entropy_coef:
        token_loss = token_loss - config.entropy_coef * batch.entropy
    loss = (token_loss * batch.weights).sum()
    return LossSums(loss, metrics | {"loss": loss.detach()})

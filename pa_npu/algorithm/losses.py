"""The loss of one microbatch: policy loss, KL and entropy terms, weighted and summed but never normalised."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pa_npu.algorithm.batch import TokenBatch
from pa_npu.algorithm.corrections import KL_ESTIMATORS, age_weights, importance_weights, k3, kl_reward_advantages
from pa_npu.algorithm.policy_losses import PolicyLoss
from pa_npu.algorithm.preference import PREFERENCE_METRICS
from pa_npu.config.sections import AlgorithmConfig


@dataclass(frozen=True)
class LossSums:
    """Sums over one microbatch. `loss` carries the gradient; `metrics` holds detached sums, by name (see metric_names)."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


def metric_names(config: AlgorithmConfig, *, stale: bool = False) -> tuple[str, ...]:
    """Names in LossSums.metrics: loss and policy_loss are weighted sums, the others sums over tokens. stale: of those with ages."""
    names: tuple[str, ...] = ("loss", "policy_loss", "entropy", "clipped")
    if config.has_reference:
        names += ("kl",)
    if config.loss == "dpo":
        names += PREFERENCE_METRICS
    if config.importance_sampling != "none":
        names += ("importance_weight", "importance_cut")
    if config.importance_sampling != "none" or stale:
        names += ("weight", "weight_squared")
    return (*names, "age") if stale else names


def loss_sums(batch: TokenBatch, config: AlgorithmConfig, policy_loss: PolicyLoss) -> LossSums:
    """The weighted sum of w * policy loss + kl_coef * KL - entropy_coef * entropy; w: importance and age weights, if asked for."""
    if config.kl_coef and config.kl_in == "reward":
        extra = kl_reward_advantages(batch, config.kl_estimator, config.kl_coef, config.advantage)
        batch = replace(batch, advantages=batch.advantages + extra)
    terms = policy_loss(batch, config)
    token_loss = terms.loss
    metrics = {
        "entropy": batch.entropy.detach().sum(),
        "clipped": terms.clipped.float().sum(),
        **terms.metrics,
    }
    weight = None
    if config.importance_sampling != "none":
        importance = importance_weights(batch, config)
        weight = importance.values
        token_loss = token_loss * weight
        metrics |= {"importance_weight": weight.sum(), "importance_cut": importance.cut.float().sum()}
    if batch.ages is not None:
        if weight is None:  # the ratio in the loss says how far the policy has moved from the one that sampled
            weight = (batch.logprobs.detach() - batch.engine_logprobs).exp()
        if config.age_exponent:
            by_age = age_weights(batch.ages, config.age_exponent)
            weight = weight * by_age
            token_loss = token_loss * by_age
        metrics["age"] = batch.ages.sum()
    if weight is not None:
        metrics |= {"weight": weight.sum(), "weight_squared": weight.square().sum()}
    metrics["policy_loss"] = (token_loss.detach() * batch.weights).sum()
    if batch.reference_logprobs is not None:
        kl = KL_ESTIMATORS[config.kl_estimator](batch.logprobs, batch.reference_logprobs)
        metrics["kl"] = k3(batch.logprobs.detach(), batch.reference_logprobs).sum()
        if config.kl_coef and config.kl_in == "loss":
            token_loss = token_loss + config.kl_coef * kl
    if config.entropy_coef:
        token_loss = token_loss - config.entropy_coef * batch.entropy
    loss = (token_loss * batch.weights).sum()
    return LossSums(loss, metrics | {"loss": loss.detach()})

"""The sum over a microbatch's tokens: the loss itself with its corrections, KL and entropy, and the metrics beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pa_npu.algorithm.corrections import KL_ESTIMATORS, age_weights, importance_weights, k3
from pa_npu.algorithm.policy_losses import PolicyTerms, TokenBatch
from pa_npu.config.sections.learning import AlgorithmConfig


@dataclass(frozen=True)
class LossSums:
    """Sums over one microbatch.

    `loss` carries the gradient; `metrics` holds detached sums, by name (see metric_names).
    """

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


def metric_names(config: AlgorithmConfig, *, stale: bool = False) -> tuple[str, ...]:
    """Names in LossSums.metrics of `weighted_sums`, beside those of the terms: loss and policy_loss
    are weighted sums, the others sums over tokens. stale: with ages."""
    names: tuple[str, ...] = ("loss", "policy_loss", "entropy", "clipped")
    if config.has_reference:
        names += ("kl",)
    if config.importance_sampling != "none":
        names += ("importance_weight", "importance_cut")
    if config.importance_sampling != "none" or stale:
        names += ("weight", "weight_squared")
    return (*names, "age") if stale else names


def weighted_sums(
    batch: TokenBatch, config: AlgorithmConfig, terms: PolicyTerms, *, kl_in_loss: bool
) -> LossSums:
    """Returns the weighted sum of w * terms + kl_coef * KL - entropy_coef * entropy; w: importance
    and age weights, if asked for.

    kl_in_loss: whether the KL is a term of each token's loss.
    """
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
        metrics |= {
            "importance_weight": weight.sum(),
            "importance_cut": importance.cut.float().sum(),
        }
    if batch.ages is not None:
        # the ratio in the loss says how far the policy has moved from the one that sampled
        if weight is None:
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
        if kl_in_loss:
            token_loss = token_loss + config.kl_coef * kl
    if config.entropy_coef:
        token_loss = token_loss - config.entropy_coef * batch.entropy
    loss = (token_loss * batch.weights).sum()
    return LossSums(loss, metrics | {"loss": loss.detach()})

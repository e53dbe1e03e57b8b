"""Algorithms in tests: made of their keys alone, whatever the rules between these and others say."""

from __future__ import annotations

from typing import Any

from pa_npu.algorithm.algorithm import Algorithm
from pa_npu.algorithm.loss_sums import LossSums
from pa_npu.algorithm.policy_gradient import PolicyGradient
from pa_npu.algorithm.policy_losses import PolicyLoss, TokenBatch
from pa_npu.algorithm.registry import build_algorithm
from pa_npu.algorithm.rules import broken_rules
from pa_npu.config.schema import Config
from pa_npu.config.sections.learning import AlgorithmConfig

_BASE = Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}})


def algorithm_of(keys: AlgorithmConfig) -> Algorithm:
    """Makes the algorithm of these keys, unchecked."""
    return build_algorithm(_BASE.model_copy(update={"algorithm": keys}))


def loss_sums(batch: TokenBatch, keys: AlgorithmConfig, policy_loss: PolicyLoss) -> LossSums:
    """A policy gradient's sums with this loss."""
    algorithm = PolicyGradient(_BASE.model_copy(update={"algorithm": keys}))
    algorithm.policy_loss = policy_loss
    return algorithm.loss_sums(batch)


def checked(tree: dict[str, Any]) -> Config:
    """Validates a tree, and checks the rules of its algorithm. Raises ValueError."""
    config = Config.model_validate(tree)
    for broken in broken_rules(config):
        raise ValueError(broken)
    return config

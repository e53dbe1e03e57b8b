"""Divergences between a teacher's and the policy's distribution over the teacher's most likely tokens.

t, s: the teacher's and the policy's probabilities of k + 1 outcomes (choices.py), l their logs.

    forward    KL(t || s)                                   covers all that the teacher would write
    reverse    KL(s || t)                                   keeps to what the teacher would write
    js         b KL(t || m) + (1 - b) KL(s || m),  m = b t + (1 - b) s      b: algorithm.distill_beta

Generalised Jensen-Shannon: GKD, arXiv 2306.13649, section 3. With k as large as the vocabulary each
is the divergence of the whole distributions; with fewer it is a lower bound of that, as of any
coarser partition.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from pa_npu.algorithm.choices import Choices
from pa_npu.algorithm.loss_gradient import ExpectedGradient, Values
from pa_npu.config.sections.learning import AlgorithmConfig

# As a share of an outcome's terms: fp32 against fp64.
_ROUNDING = 1e-4


def divergence(choices: Choices, keys: AlgorithmConfig) -> torch.Tensor:
    """Returns algorithm.distill_divergence of each target, [N], with a gradient at
    `choices.policy`.
    """
    policy, teacher = choices.policy, choices.teacher
    if keys.distill_divergence == "forward":
        return (teacher.exp() * (teacher - policy)).sum(-1)
    if keys.distill_divergence == "reverse":
        return (policy.exp() * (policy - teacher)).sum(-1)
    beta = keys.distill_beta
    mixed = torch.logaddexp(teacher + math.log(beta), policy + math.log1p(-beta))
    from_teacher = (teacher.exp() * (teacher - mixed)).sum(-1)
    from_policy = (policy.exp() * (policy - mixed)).sum(-1)
    return beta * from_teacher + (1.0 - beta) * from_policy


def expected_gradient_of(choices: Choices, keys: AlgorithmConfig) -> ExpectedGradient:
    """Returns the gradient of `divergence` at the policy's log-probs from its formula in numpy,
    [N, k + 1]. choices: fp64, on the host.
    """
    policy, teacher = choices.policy.numpy(), choices.teacher.numpy()
    values: Values
    if keys.distill_divergence == "forward":
        values = -np.exp(teacher)
        size = np.exp(teacher)
    elif keys.distill_divergence == "reverse":
        values = np.exp(policy) * (policy - teacher + 1.0)
        size = np.exp(policy)
    else:
        beta = keys.distill_beta
        mixed = np.log(beta * np.exp(teacher) + (1.0 - beta) * np.exp(policy))
        values = (1.0 - beta) * np.exp(policy) * (policy - mixed)
        size = np.exp(policy)
    limit = _ROUNDING * size * (1.0 + np.abs(policy) + np.abs(teacher)) + 1e-12
    return ExpectedGradient(values, limit, np.ones(values.shape, np.bool_))

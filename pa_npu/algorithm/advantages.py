"""Advantages of a group's responses from their rewards (numpy, used by the coordinator)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Rewards = npt.NDArray[np.float32]

# Keeps groups with nearly equal rewards from exploding; the constant of TRL (verl adds 1e-6).
STD_EPSILON = 1e-4


def group_advantages(rewards: Rewards, kind: Literal["group-std", "centred", "leave-one-out"]) -> Rewards:
    """Advantages [G] of one group's `rewards` [G].

    group-std      A_i = (r_i - mean(r)) / std(r), GRPO, arXiv 2402.03300, with the sample deviation, as TRL and verl.
    centred        A_i = r_i - mean(r): Dr.GRPO, arXiv 2503.20783.
    leave-one-out  A_i = r_i - mean of the other rewards = (r_i - mean(r)) G / (G - 1): RLOO, arXiv 2402.14740.

    A group whose rewards are all equal has zero advantages. Depends on one group only, hence usable while streaming.
    """
    centred = _centre(rewards)
    if kind == "group-std":
        return (centred / (_sample_std(centred) + STD_EPSILON)).astype(np.float32)
    if kind == "leave-one-out":
        centred *= len(centred) / (len(centred) - 1)
    return centred.astype(np.float32)


def batch_advantages(rewards: Sequence[Rewards]) -> list[Rewards]:
    """Centre each group by its own mean and divide by the deviation of all centred rewards of the iteration.

    REINFORCE++ with baseline, arXiv 2501.03262; the mean of the centred rewards over the batch is zero already. Every response
    counts once; verl whitens tokens instead, so that there a response counts by its length.
    Needs every group of the iteration, so the configuration refuses it while streaming.
    """
    centred = [_centre(group) for group in rewards]
    std = _sample_std(np.concatenate(centred)) if centred else 0.0
    return [(group / (std + STD_EPSILON)).astype(np.float32) for group in centred]


def _centre(rewards: Rewards) -> npt.NDArray[np.float64]:
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or values.size == 0 or not np.isfinite(values).all():
        raise ValueError(f"rewards must be a non-empty vector of finite numbers, not {rewards!r}")
    return values - values.mean()


def _sample_std(centred: npt.NDArray[np.float64]) -> float:
    # an exact sum does not depend on the order in which the groups of a batch finished
    return math.sqrt(math.fsum(np.square(centred)) / max(1, centred.size - 1))

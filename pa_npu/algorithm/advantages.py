"""Advantages of a group's responses from their rewards (numpy, used by the coordinator)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Rewards = npt.NDArray[np.float32]

# Keeps groups with nearly equal rewards from exploding; the constant of the GRPO reference implementation.
STD_EPSILON = 1e-4


def group_advantages(rewards: Rewards, scale: Literal["group-std", "none"]) -> Rewards:
    """Centre `rewards` [G] by the group's mean and, with `group-std`, divide by its sample deviation.

    GRPO (arXiv 2402.03300, section 4.1.2): A_i = (r_i - mean(r)) / std(r).
    `none` is Dr.GRPO (arXiv 2503.20783): A_i = r_i - mean(r).
    A group whose rewards are all equal has zero advantages. Depends on one group only, hence usable while streaming.
    """
    centred = _centre(rewards)
    if scale == "none":
        return centred.astype(np.float32)
    return (centred / (_sample_std(centred) + STD_EPSILON)).astype(np.float32)


def batch_advantages(rewards: Sequence[Rewards]) -> list[Rewards]:
    """Centre each group by its own mean and divide by the deviation of all centred rewards of the iteration.

    Needs every group of the iteration, so the configuration refuses it together with schedule.stream=true.
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
    return float(np.sqrt(np.square(centred).sum() / max(1, centred.size - 1)))

"""Advantages of a group's responses from their rewards (numpy, used by the coordinator).

G is the number of samples that the environment made of a prompt: rollout.responses_per_prompt,
unless it makes more or fewer.

A function of your own: `my_advantage(rewards)`, float32 [G] -> [G], anywhere importable;
algorithm.advantage=module:function. One that needs a certain G raises ValueError, which ends the
run with one line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from pa_npu.config.user_code import describe, find_function, source_of
from pa_npu.errors import ConfigError

Rewards = npt.NDArray[np.float32]
GroupAdvantage = Callable[[Rewards], Rewards]

# Keeps groups with nearly equal rewards from exploding; the constant of TRL (verl adds 1e-6).
DEVIATION_EPSILON = 1e-4
# Another machine's float64 sums may round otherwise.
_ROUNDING = 1e-5


def group_std(rewards: Rewards) -> Rewards:
    """A_i = (r_i - mean(r)) / std(r): GRPO, arXiv 2402.03300, with the sample deviation, as TRL and
    verl.
    """
    centred_rewards = _centre(rewards)
    return (centred_rewards / (_sample_std(centred_rewards) + DEVIATION_EPSILON)).astype(np.float32)


def centred(rewards: Rewards) -> Rewards:
    """A_i = r_i - mean(r): Dr.GRPO, arXiv 2503.20783."""
    return _centre(rewards).astype(np.float32)


def leave_one_out(rewards: Rewards) -> Rewards:
    """A_i = r_i - mean of the other rewards = (r_i - mean(r)) G / (G - 1): RLOO, arXiv 2402.14740;
    0 without others.
    """
    return (_centre(rewards) * (len(rewards) / max(1, len(rewards) - 1))).astype(np.float32)


def no_reward(rewards: Rewards) -> Rewards:
    """A_i = 0: rewards are recorded and train nothing."""
    return np.zeros(len(rewards), np.float32)


GROUP_ADVANTAGES: dict[str, GroupAdvantage] = {
    "group-std": group_std,
    "centred": centred,
    "leave-one-out": leave_one_out,
    "no-reward": no_reward,
}

LINEAR_ADVANTAGES: dict[str, Callable[[int], float]] = {
    "centred": lambda size: 1.0,
    "leave-one-out": lambda size: size / max(1, size - 1),
}
"""Those that are linear in the rewards: from G to the factor of the centred rewards.

Trainers can add the part of a KL in the reward to them later (algorithm.kl_in).
"""

BATCH_STD = "batch-std"
"""Needs every group of an iteration: see batch_advantages."""
KNOWN_ADVANTAGES = (*GROUP_ADVANTAGES, BATCH_STD)


def find_group_advantage(name: str) -> GroupAdvantage:
    """Returns the registered function, or the one that `module:function` names.

    Raises ConfigError when there is none.
    """
    function: GroupAdvantage = find_function("algorithm.advantage", name, GROUP_ADVANTAGES)
    return function


def group_advantages(rewards: Rewards, kind: str) -> Rewards:
    """Advantages float32 [G] of one group's `rewards` [G], by the function that `kind` names.

    The built-in ones give zeros where all rewards are equal. Depends on one group only, hence
    usable while streaming. Raises ConfigError where a user's function fails or returns something
    else than G finite numbers.
    """
    function = find_group_advantage(kind)
    if kind in GROUP_ADVANTAGES:
        return function(rewards)
    where = f"algorithm.advantage: {kind} ({source_of(function)})"
    try:
        advantages = np.asarray(function(np.array(rewards, np.float32)), np.float32)
    except Exception as error:  # a user's function may raise anything
        raise ConfigError(f"{where} failed: {describe(error)}; correct the function") from None
    if advantages.shape != np.shape(rewards):
        raise ConfigError(
            f"{where} returned the shape {advantages.shape} for {len(rewards)} rewards; return one "
            "number per reward"
        )
    if not np.isfinite(advantages).all():
        raise ConfigError(
            f"{where} returned {advantages.tolist()}, not all finite; return finite numbers"
        )
    return advantages


def broken_advantages(rewards: Rewards, advantages: Rewards, kind: str) -> str | None:
    """Why `advantages` [G] are not those of the group's `rewards` [G], as a phrase; None where they
    are (invariant I7).

    Of batch-std, which one group does not determine: a positive multiple of the centred rewards.
    """
    if kind == BATCH_STD:
        centred_rewards = _centre(rewards)
        squares = float(np.square(centred_rewards).sum())
        scale = float(np.dot(centred_rewards, advantages)) / squares if squares else 0.0
        if scale < 0:
            return f"advantages {advantages.tolist()} go against rewards {rewards.tolist()}"
        expected = (centred_rewards * scale).astype(np.float32)
    else:
        expected = group_advantages(rewards, kind)
    largest = float(np.abs(expected).max())
    if np.abs(advantages - expected).max() <= _ROUNDING * largest:
        return None
    return (
        f"advantages {advantages.tolist()} of rewards {rewards.tolist()} should be "
        f"{expected.tolist()}"
    )


def batch_advantages(rewards: Sequence[Rewards]) -> list[Rewards]:
    """Centre each group by its own mean and divide by the deviation of all centred rewards of the
    iteration.

    REINFORCE++ with baseline, arXiv 2501.03262; the mean of the centred rewards over the batch is
    zero already. Every response counts once; verl whitens tokens instead, so that there a response
    counts by its length.
    Needs every group of the iteration, so the configuration refuses it while streaming.
    """
    groups = [_centre(group) for group in rewards]
    std = _sample_std(np.concatenate(groups)) if groups else 0.0
    return [(group / (std + DEVIATION_EPSILON)).astype(np.float32) for group in groups]


def _centre(rewards: Rewards) -> npt.NDArray[np.float64]:
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or values.size == 0 or not np.isfinite(values).all():
        raise ValueError(f"rewards must be a non-empty vector of finite numbers, not {rewards!r}")
    return values - values.mean()


def _sample_std(centred: npt.NDArray[np.float64]) -> float:
    # an exact sum does not depend on the order in which the groups of a batch finished
    return math.sqrt(math.fsum(np.square(centred)) / max(1, centred.size - 1))

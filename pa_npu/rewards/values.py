"""Checks a reward, wherever it comes from: functions, judges, agents and remote environments."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from typing import Any

from pa_npu.config.sections.reward import MAX_REWARD

_SHOWN_CHARACTERS = 40
_TEXTS = (str, bytes, bytearray, memoryview)


class NotAReward(ValueError):
    """A value that cannot be a reward; the message is a phrase behind the name of its source."""


def as_reward(value: Any) -> float:
    """Returns a reward as a float.

    Numbers of numpy and tensors with one element count; a text of digits does not. Raises
    NotAReward unless it is one finite number within MAX_REWARD.
    """
    if isinstance(value, _TEXTS) or _is_complex(value) or not hasattr(value, "__float__"):
        raise NotAReward(
            f"{value!r:.{_SHOWN_CHARACTERS}} is a {type(value).__name__}, not a number"
        )
    try:
        reward = float(value)
    except OverflowError:  # an integer of hundreds of digits
        raise NotAReward(f"an integer of more than 300 digits is beyond {MAX_REWARD:g}") from None
    except Exception as error:
        raise NotAReward(f"{value!r:.{_SHOWN_CHARACTERS}} is not one number ({error})") from None
    if not math.isfinite(reward):
        raise NotAReward(f"{reward} is not finite")
    if abs(reward) > MAX_REWARD:
        raise NotAReward(f"{reward:g} is beyond {MAX_REWARD:g}")
    return reward


def _is_complex(value: Any) -> bool:
    """Returns whether a number of numpy or torch has an imaginary part."""
    return "complex" in str(getattr(value, "dtype", ""))


def as_rewards(values: Any, num_responses: int) -> list[float]:
    """Returns the rewards that a function returned for a group, in order.

    Raises NotAReward unless there is a reward for each response. A dictionary or a set has no order
    of responses, and a text is no list of numbers.
    """
    is_list = isinstance(values, Iterable) and getattr(values, "ndim", 1) > 0
    if isinstance(values, (*_TEXTS, Mapping, Set)) or not is_list:
        raise NotAReward(
            f"returned a {type(values).__name__}, not a list with a number for each response"
        )
    rewards = list(values)
    if len(rewards) != num_responses:
        raise NotAReward(f"returned {len(rewards)} rewards for {num_responses} responses")
    try:
        return [as_reward(value) for value in rewards]
    except NotAReward as error:
        raise NotAReward(f"returned a reward that cannot be used: {error}") from None

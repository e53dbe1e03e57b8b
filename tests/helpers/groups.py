"""Groups in tests: what belongs to trained tokens set or read without the tokens between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pa_npu.samples.group import Group


def with_trained(group: Group, **values: np.ndarray) -> Group:
    """The group with other values of its trained tokens: logprobs, versions, or advantages, each [trained tokens]."""
    changes: dict[str, Any] = {}
    for name, trained in values.items():
        column = getattr(group, name).copy()
        column[group.trained] = trained
        changes[name] = column
    return replace(group, **changes)


def sample_advantages(group: Group) -> np.ndarray:
    """float32 [G], of groups whose samples end in a trained token and have one advantage each."""
    return group.advantages[group.offsets()[1:] - 1]


def prompt_tokens(group: Group) -> np.ndarray:
    """Returns the prompt of a group that has one."""
    return group.tokens[: group.prompt_lengths()[0]]

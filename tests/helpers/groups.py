"""Groups in tests: what belongs to trained tokens set or read without the tokens between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pa_npu.samples.expert_choices import ExpertChoices
from pa_npu.samples.group import Group


def with_trained(group: Group, **values: np.ndarray) -> Group:
    """The group with other values of its trained tokens: logprobs, versions, or advantages, each
    [trained tokens].
    """
    changes: dict[str, Any] = {}
    for name, trained in values.items():
        column = getattr(group, name).copy()
        column[group.trained] = trained
        changes[name] = column
    return replace(group, **changes)


def sample_advantages(group: Group) -> np.ndarray:
    """float32 [G], of groups whose samples end in a trained token and have one advantage each."""
    return group.advantages[group.offsets()[1:] - 1]


def trained_advantages(group: Group) -> list[np.ndarray]:
    """The advantages of each sample's trained tokens."""
    return np.split(group.advantages[group.trained], np.cumsum(group.trained_lengths)[:-1])


def prompt_tokens(group: Group) -> np.ndarray:
    """Returns the prompt of a group that has one."""
    return group.tokens[: group.prompt_lengths()[0]]


def with_random_expert_choices(
    group: Group, expert_choices: ExpertChoices, seed: int, missing: float = 0.0
) -> Group:
    """Gives any experts to any token, the same for the prompt of all samples; a share of the tokens
    has none.
    """
    rng, (layers, taken) = np.random.default_rng(seed), expert_choices.column.shape
    order = np.argsort(rng.random((len(group.tokens), layers, expert_choices.num_experts)), axis=-1)
    values = order[..., :taken].astype(expert_choices.column.type)
    values[rng.random(len(values)) < missing] = expert_choices.column.elsewhere
    prompt = group.prompt_lengths()[0]
    for start in group.offsets()[:-1].tolist():
        values[start : start + prompt] = values[:prompt]
    return replace(group, columns={expert_choices.column: values})

"""The tokens that a teacher finds most likely, and how the policy's distribution over them is compared with the teacher's.

    teacher's pass ──k ids of every target──> choices_of ──> policy's pass ──log-probs of these──> Choices

A distribution over k + 1 outcomes: the teacher's k most likely tokens, and all others together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from pa_npu.algorithm.algorithm import NeededModel


@dataclass(frozen=True)
class Choices:
    """Log-probs of the outcomes of N targets, [N, k + 1] each, the last one of all other tokens.

    Gradients flow through `policy`.
    """

    policy: torch.Tensor
    teacher: torch.Tensor

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Choices:
        return Choices(change(self.policy), change(self.teacher))


def needs_targets(model: NeededModel, columns: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Returns which targets a model is asked for, bool [N]; None where these are all.

    columns: the microbatch's, by name.
    """
    if model.targets is None:
        return None
    column, value = model.targets
    return columns[column] == value


def by_target(
    models: tuple[NeededModel, ...],
    columns: Mapping[str, torch.Tensor],
    values: Mapping[str, torch.Tensor],
) -> torch.Tensor | None:
    """Returns for each target the value of the model that is asked for it, [N, *shape]; None where
    there are no values.

    values: by model, [N, *shape]; a model that no target of the microbatch asks for has none.
    """
    merged: torch.Tensor | None = None
    for model in models:
        if model.name not in values:
            continue
        own = values[model.name]
        rows = needs_targets(model, columns) if model.targets and len(columns) else None
        if merged is None or rows is None:
            merged = own
            continue
        merged = torch.where(rows.reshape(-1, *[1] * (own.dim() - 1)), own, merged)
    return merged

"""The tokens that a teacher finds most likely, and how the policy's distribution over them is compared with the teacher's.

    teacher's pass ──k ids of every target──> choices_of ──> policy's pass ──log-probs of these──> Choices

A distribution over k + 1 outcomes: the teacher's k most likely tokens, and all others together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


def asked_models(
    models: Sequence[NeededModel], columns: Mapping[str, torch.Tensor]
) -> tuple[str, ...]:
    """Returns the names of the models that a microbatch with these columns asks for.

    Waits for the device where a model is not asked for all targets.
    """
    names = []
    for model in models:
        if model.targets is None or bool(_targets_of(model, columns).any()):
            names.append(model.name)
    return tuple(names)


def by_target(
    models: Sequence[NeededModel],
    columns: Mapping[str, torch.Tensor],
    values: Mapping[str, torch.Tensor],
) -> torch.Tensor | None:
    """Returns for each target the value of the model that is asked for it, [N, *shape]; None where
    there are no values.

    values: by model, [N, *shape]; a model that no target of the microbatch asks for may have none.
    """
    merged: torch.Tensor | None = None
    for model in models:
        if model.name not in values:
            continue
        of_model = values[model.name]
        if merged is None or model.targets is None:
            merged = of_model
            continue
        rows = _targets_of(model, columns)
        merged = torch.where(rows.reshape(-1, *[1] * (of_model.dim() - 1)), of_model, merged)
    return merged


def _targets_of(model: NeededModel, columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns which targets ask for a model that is not for all of them, bool [N]; [0] where
    nothing says it, as of a filler and of a probe.
    """
    assert model.targets is not None, "a model for all targets asks nobody"
    column, value = model.targets
    return columns[column] == value if column in columns else torch.zeros(0, dtype=torch.bool)

"""The tokens that a teacher finds most likely, and how the policy's distribution over them is compared with the teacher's.

    teacher's pass, or columns ──k ids of every target──> chosen_tokens ──> policy's pass ──log-probs of these──> Choices

A distribution over k + 1 outcomes: the teacher's k most likely tokens, and all others together. A
teacher that trainers hold finds them in its pass; one that engines compute has sent them, as
columns of the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from pa_npu.algorithm.algorithm import NeededModel

# The columns of a teacher that engines compute (samples/teachers.py): the log-prob of each token, and
# the ids and log-probs of the most likely ones, whose last is of all other tokens together.
SCORES_COLUMN = "teacher_logprobs"
CHOICES_COLUMN = "teacher_choices"
CHOICE_LOGPROBS_COLUMN = "teacher_choice_logprobs"


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
        if not len(rows):  # no loss reads these targets
            continue
        merged = torch.where(rows.reshape(-1, *[1] * (of_model.dim() - 1)), of_model, merged)
    return merged


def chosen_tokens(
    models: Sequence[NeededModel],
    columns: Mapping[str, torch.Tensor],
    computed: Mapping[str, torch.Tensor],
    targets: torch.Tensor,
) -> torch.Tensor | None:
    """Returns for each target the tokens whose log-probs the policy gives too, int64 [N, k]; None
    where no teacher is compared by them.

    Targets that no teacher was asked for, and a filler's, have the vocabulary's first k: no loss
    reads them.

    Args:
        models: the teachers.
        columns: of the microbatch.
        computed: [N, k] by name, of the teachers that have had a pass.
        targets: int64 [N].
    """
    values = dict(computed)
    for model in models:
        if model.computed_by != "engines" or not model.num_choices:
            continue
        first = torch.arange(model.num_choices, device=targets.device)
        sent = columns.get(CHOICES_COLUMN)
        if sent is None:
            values[model.name] = first.expand(len(targets), -1)
        else:
            values[model.name] = torch.where(sent < 0, first, sent.long())
    return by_target(models, columns, values)


def _targets_of(model: NeededModel, columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns which targets ask for a model that is not for all of them, bool [N]; [0] where
    nothing says it, as of a filler and of a probe.
    """
    assert model.targets is not None, "a model for all targets asks nobody"
    column, value = model.targets
    return columns[column] == value if column in columns else torch.zeros(0, dtype=torch.bool)

"""Finds the tensors that got a gradient, and those of the others that may have none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pa_npu.backends.protocol import SteppedTensor

_PARTNERS = {".lora_A.": ".lora_B."}
"""The gradient of A is exactly 0 as long as B is 0, which B is at first."""


def _partner(name: str) -> str | None:
    """Returns the name of the tensor without which this one has no gradient; None if there is no
    such tensor.
    """
    for suffix, partner_suffix in _PARTNERS.items():
        if suffix in name:
            return name.replace(suffix, partner_suffix)
    return None


def waits_for_its_partner(name: str, weights: dict[str, float]) -> bool:
    """Returns whether a tensor is multiplied by another one that is 0. weights: by name, whether
    any weight of the tensor is not 0.
    """
    partner = _partner(name)
    return partner is not None and not weights.get(partner, 1.0)


@torch.no_grad()
def gradients_present(
    tensors: Sequence[SteppedTensor], sampled: npt.NDArray[np.bool_]
) -> tuple[list[bool], list[bool], list[bool]]:
    """Returns three answers for each tensor: whether a gradient has come; whether any of its
    elements is not 0; and, for the B of an adapter whose A has no gradient, whether any weight is
    not 0 (True for all other tensors).

    sampled: as in StepReplay._check_gradients.
    """
    arrived = [tensor.gradient is not None for tensor in tensors]
    nonzero: list[bool] = sampled.tolist()
    weights = [True] * len(tensors)
    # most rows of an embedding have no gradient, so that a sample that is 0 says nothing
    unknown = [
        (number, tensor.gradient)
        for number, tensor in enumerate(tensors)
        if not nonzero[number] and tensor.gradient is not None
    ]
    for (number, _), has_any in zip(
        unknown, _any([gradient for _, gradient in unknown]), strict=True
    ):
        nonzero[number] = has_any
    still_zero = [tensors[number].name for number, _ in unknown if not nonzero[number]]
    waited_for = {_partner(name) for name in still_zero}
    partners = [
        (number, tensor.weights)
        for number, tensor in enumerate(tensors)
        if tensor.name in waited_for
    ]
    for (number, _), has_any in zip(
        partners, _any([partner for _, partner in partners]), strict=True
    ):
        weights[number] = has_any
    return arrived, nonzero, weights


def _any(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Returns for each tensor whether any element is not 0; waits for the device once."""
    if not tensors:
        return []
    device = tensors[0].device
    answers: list[bool] = torch.stack([tensor.any().to(device) for tensor in tensors]).tolist()
    return answers

"""Finds the weights of a transformers model under the names of HF checkpoints.

transformers may compute with other tensors than checkpoints hold: experts' projections are a single
tensor, for example. Engines and loaders of an export need those of the checkpoint. `wire_weights`
finds them by transformers' own conversion back, applied to tensors without memory: each result is a
view, and its beginning shows which elements of a parameter it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from pa_npu.errors import DataError


@dataclass(frozen=True)
class WireWeight:
    """A tensor of the checkpoint.

    It is elements [start, start + size) of the flattened parameter or buffer `source`.
    """

    source: str
    start: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def view_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the view of `whole`, which is the tensor `source`."""
        return whole.view(-1)[self.start : self.start + self.size].view(self.shape)


def stored_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Returns parameters and buffers of checkpoints by transformers' names, a tied one once."""
    kept = model.state_dict(keep_vars=True).keys()
    buffers = {
        name: buffer
        for name, buffer in model.named_buffers()
        if name in kept and buffer.is_floating_point()
    }
    return dict(model.named_parameters()) | buffers


def use_dtype(model: Any, dtype: torch.dtype) -> None:
    """Holds all parameters in `dtype`, and the buffers of checkpoints in fp32.

    transformers keeps some parameters in fp32, and some buffers in other types. A router's biases
    may be large, and its scores close to each other.
    """
    for tensor in stored_tensors(model).values():
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        tensor.data = tensor.data.to(dtype if is_parameter else torch.float32)


def wire_weights(model: Any) -> dict[str, WireWeight]:
    """Returns the weights by HF name, in transformers' order.

    Raises DataError if a tensor of the checkpoint is not in one piece.
    """
    from transformers.core_model_loading import revert_weight_conversion

    bare = {
        name: torch.empty(tensor.shape, device="meta")
        for name, tensor in stored_tensors(model).items()
    }
    source_of = {tensor.untyped_storage()._cdata: name for name, tensor in bare.items()}
    with _ViewsOnly():
        reverted = revert_weight_conversion(model, dict(bare))
    weights: dict[str, WireWeight] = {}
    for name, tensor in reverted.items():
        source = source_of.get(tensor.untyped_storage()._cdata)
        if source is None or not tensor.is_contiguous():
            raise DataError(
                f"model.path: {model.config._name_or_path}: {name} is computed with in another "
                "form than it is stored in, which trainer.backend=fsdp does not support; use a "
                "model without it"
            )
        weights[name] = WireWeight(source, tensor.storage_offset(), tuple(tensor.shape))
    order = {name: number for number, name in enumerate(bare)}

    def place(item: tuple[str, WireWeight]) -> tuple[int, int]:
        return order[item[1].source], item[1].start

    return dict(sorted(weights.items(), key=place))


class _ViewsOnly(torch.overrides.TorchFunctionMode):
    """Copies nothing to make it contiguous, inside of its block."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.contiguous:
            return args[0]
        return function(*args, **(kwargs or {}))

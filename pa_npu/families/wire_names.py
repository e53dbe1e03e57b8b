"""The weights of a transformers model under the names of HF checkpoints, each as a run of elements of a parameter.

transformers may compute with other tensors than checkpoints hold: experts' projections, for one,
are a single tensor. Engines, and whoever loads an export, want the checkpoint's. `wire_weights`
finds them by transformers' own way back, taken with tensors that have no memory: what comes out is
a view, and where a view begins says which elements it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from pa_npu.errors import DataError


@dataclass(frozen=True)
class WireWeight:
    """A tensor of the checkpoint: elements [start, start + its size) of the flattened parameter or
    buffer `source`.
    """

    source: str
    start: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The view of `whole`, which is the tensor `source`."""
        return whole.view(-1)[self.start : self.start + self.size].view(self.shape)


def stored_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Parameters, a tied one once, and the buffers that checkpoints hold, by transformers' names."""
    kept = model.state_dict(keep_vars=True).keys()
    buffers = {
        name: buffer
        for name, buffer in model.named_buffers()
        if name in kept and buffer.is_floating_point()
    }
    return dict(model.named_parameters()) | buffers


def use_dtype(model: Any, dtype: torch.dtype) -> None:
    """Hold all parameters in `dtype`, of which transformers keeps some in fp32, and the buffers of
    checkpoints in fp32, of which it keeps some: a router's biases may be large, and its scores
    close to each other."""
    for tensor in stored_tensors(model).values():
        tensor.data = tensor.data.to(
            dtype if isinstance(tensor, torch.nn.Parameter) else torch.float32
        )


def wire_weights(model: Any) -> dict[str, WireWeight]:
    """By HF name, in transformers' order.

    Raises DataError where a tensor of the checkpoint is not in one piece.
    """
    from transformers.core_model_loading import revert_weight_conversion

    bare = {
        name: torch.empty(tensor.shape, device="meta")
        for name, tensor in stored_tensors(model).items()
    }
    source_of = {tensor.untyped_storage()._cdata: name for name, tensor in bare.items()}
    with _ViewsOnly():
        reverted = revert_weight_conversion(model, dict(bare))
    found = {}
    for name, tensor in reverted.items():
        source = source_of.get(tensor.untyped_storage()._cdata)
        if source is None or not tensor.is_contiguous():
            raise DataError(
                f"model.path: {model.config._name_or_path}: {name} is computed with in another "
                "form than it is stored in, which trainer.backend=fsdp does not support; use a "
                "model without it"
            )
        found[name] = WireWeight(source, tensor.storage_offset(), tuple(tensor.shape))
    order = {name: number for number, name in enumerate(bare)}
    return dict(sorted(found.items(), key=lambda item: (order[item[1].source], item[1].start)))


class _ViewsOnly(torch.overrides.TorchFunctionMode):
    """Inside, nothing is copied to make it contiguous."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return args[0] if function is torch.Tensor.contiguous else function(*args, **(kwargs or {}))

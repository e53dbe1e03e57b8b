"""The model with a set of adapters merged into its weights, row by row as it is sent: no merged copy of it exists anywhere.

A row of a merged weight is W + factor * B A, added in fp32 and rounded once, to the type that is sent. W and B are cut into the
same rows over the ranks, so that a rank needs A alone of the others. An engine that gets A and B alone does the same (base_of).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from pa_npu.backends.fsdp.lora import PREFIX, Adapted
from pa_npu.backends.fsdp.optimizer import local
from pa_npu.backends.fsdp.weights import Rows, rows_of
from pa_npu.errors import DataError
from pa_npu.families.model_directory import read_header, weight_files
from pa_npu.families.wire_names import WireWeight
from pa_npu.weight_transfer.adapters import Base, StoredWeight, merge, stored_digest

_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Merged:
    """Weights to send of a model with its adapters; those of an Adapted without any are the base's."""

    def __init__(self, adapted: Adapted) -> None:
        self._adapted = adapted

    def wire_weights(self) -> list[tuple[str, WireWeight, torch.Tensor]]:
        """See Weights."""
        return self._adapted.model.wire_weights()

    def rows(self, weight: WireWeight, whole: torch.Tensor, alone: bool) -> Rows:
        """See Weights."""
        layer, adapters = self._adapted.layers.get(weight.source.removesuffix(".weight")), self._adapted.adapters
        own = rows_of(whole, weight.start, alone)
        if layer is None or adapters is None:
            return own
        down, up = layer.lora_A[adapters].weight, layer.lora_B[adapters].weight
        return _MergedRows(own.shard, own.start, down, up, layer.scaling[adapters])


def base_of(adapted: Adapted, directory: str, dtype: torch.dtype) -> Base:
    """The model directory's weights, which engines merge adapters into that are sent alone. dtype: as ShardedWeights'.

    Raises DataError where the directory has other tensors than would be sent merged.
    """
    files, stored = weight_files(directory), []
    headers = {file: read_header(Path(directory) / file) for file in set(files.values())}
    for name, weight, whole in adapted.model.wire_weights():
        found = headers.get(files.get(name, ""), {}).get(name)
        if found is None or found.shape != weight.shape or found.dtype not in _TORCH_NAMES:
            raise DataError(
                f"publish.lora=adapter: {directory} does not have {name} as it would be sent, shape {list(weight.shape)}; set "
                f"publish.lora=merged"
            )
        layer = weight.source.removesuffix(".weight")
        layer, row = (PREFIX + layer, weight.start // weight.shape[1]) if layer in adapted.layers else ("", 0)
        place = (found.begin, found.begin + found.num_bytes, row)
        loaded = str(dtype if isinstance(whole, torch.nn.Parameter) else whole.dtype).removeprefix("torch.")
        stored.append(StoredWeight(name, files[name], *place, _TORCH_NAMES[found.dtype], loaded, weight.shape, layer))
    (factor,) = {layer.scaling[adapted.adapters] for layer in adapted.layers.values()}
    digest = stored_digest(directory, tuple(stored), next(adapted.parameters()).device)
    return Base(factor, digest, tuple(stored))


@dataclass(frozen=True)
class _MergedRows(Rows):
    """down: A, fp32 [rank, inputs]; up: B, fp32 [outputs, rank]; both sharded. factor: of their product."""

    down: torch.Tensor
    up: torch.Tensor
    factor: float
    _whole: list[torch.Tensor] = field(default_factory=list)  # A, once it is gathered

    def gather(self, group: dist.ProcessGroup | None, memory: torch.device) -> None:
        if not self._whole:
            own = rows_of(self.down, 0, True)
            whole = torch.zeros(self.down.numel(), dtype=torch.float32, device=memory)
            whole[own.start : own.start + own.shard.numel()].copy_(own.shard)
            if group is not None:
                dist.all_reduce(whole, group=group)  # a sum with zeros
            self._whole.append(whole.to(own.shard.device).view(self.down.shape))

    @torch.no_grad()
    def read(self, first: int, last: int) -> torch.Tensor:
        (down,), inputs = self._whole, self.down.shape[1]
        rows = slice(first // inputs, last // inputs)
        up = local(self.up).detach().view(-1, self.up.shape[1])[rows]
        merged = self.shard[first:last].clone().view(-1, inputs)
        merge(merged, up, down, self.factor, (self.start + first) // inputs)
        return merged.view(-1)

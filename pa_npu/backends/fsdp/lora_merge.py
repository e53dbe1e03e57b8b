"""The model with a set of adapters merged into its weights, row by row as it is sent: no merged copy of it exists anywhere.

A row of a merged weight is W + factor * B A, added in fp32 and rounded once, to the type that is sent. W and B are cut into the
same rows over the ranks, so that a rank needs A alone of the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from pa_npu.backends.fsdp.lora import Adapted
from pa_npu.backends.fsdp.optimizer import local
from pa_npu.backends.fsdp.weights import Rows, rows_of
from pa_npu.families.wire_names import WireWeight

_BLOCK_ROWS = 256


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


def merge(weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor, factor: float, first: int = 0) -> None:
    """Add factor * B A to rows of a weight in place, in fp32, and round once to its type.

    weight: rows from `first` on, of any type; up: B's, fp32 [rows, rank]; down: A, fp32 [rank, inputs].

    The bits are the same however a weight is cut into rows. Kernels sum few rows otherwise than many, so a row is always computed
    at the same place of a product of the same size, with zeros for rows that are not asked for.
    """
    last = first + len(weight)
    for block in range(first // _BLOCK_ROWS * _BLOCK_ROWS, last, _BLOCK_ROWS):
        start, stop = max(block, first), min(block + _BLOCK_ROWS, last)
        rows, own = slice(start - first, stop - first), slice(start - block, stop - block)
        padded = up.new_zeros(_BLOCK_ROWS, up.shape[1])
        padded[own] = up[rows]
        weight[rows] = (padded @ down)[own].mul_(factor).add_(weight[rows])


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

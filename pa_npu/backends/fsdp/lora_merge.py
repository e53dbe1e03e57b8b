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
from pa_npu.backends.fsdp.weights import Rows, memory_of, rows_of
from pa_npu.families.wire_names import WireWeight


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


@dataclass(frozen=True)
class _MergedRows(Rows):
    """down: A, fp32 [rank, inputs]; up: B, fp32 [outputs, rank]; both sharded. factor: of their product."""

    down: torch.Tensor
    up: torch.Tensor
    factor: float
    _whole: list[torch.Tensor] = field(default_factory=list)  # A, once it is gathered

    def gather(self, group: dist.ProcessGroup | None) -> None:
        if not self._whole:
            own = rows_of(self.down, 0, True)
            device = own.shard.device
            whole = torch.zeros(self.down.numel(), dtype=torch.float32, device=memory_of(group, device))
            whole[own.start : own.start + own.shard.numel()].copy_(own.shard)
            if group is not None:
                dist.all_reduce(whole, group=group)  # a sum with zeros
            self._whole.append(whole.to(device).view(self.down.shape))

    @torch.no_grad()
    def read(self, first: int, last: int) -> torch.Tensor:
        (down,), inputs = self._whole, self.down.shape[1]
        rows = slice(first // inputs, last // inputs)
        up = local(self.up).detach().view(-1, self.up.shape[1])[rows]
        base = self.shard[first:last].view(-1, inputs)
        return torch.addmm(base.float(), up, down, alpha=self.factor).view(-1)

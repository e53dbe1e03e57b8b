"""The policy's weights from their shards, for a publish and an export: shards are rows, as FSDP2 cuts along the first dimension."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from pa_npu.backends.buckets import GatheredWeights, Outgoing, Part, Region
from pa_npu.backends.fsdp.optimizer import local
from pa_npu.config.mesh import Place
from pa_npu.config.sections.operation import Senders
from pa_npu.families.spec import ModelSpec
from pa_npu.families.wire_names import WireWeight
from pa_npu.weight_transfer.adapters import Base
from pa_npu.weight_transfer.contents import Position
from pa_npu.weight_transfer.manifest import row_size


@dataclass(frozen=True)
class Rows(Part):
    """This rank's part of a weight: elements [start, start + shard.numel()) of it flattened, as far
    as it has these.
    """

    shard: torch.Tensor
    start: int

    def lay(self, out: torch.Tensor, first: int) -> None:
        """See Part."""
        begin, end = max(first, self.start), min(first + len(out), self.start + self.shard.numel())
        if begin < end:
            out[begin - first : end - first].copy_(self.read(begin - self.start, end - self.start))

    def pieces(self, size: int) -> Iterator[tuple[torch.Tensor, Position]]:
        """See Part."""
        first, last = max(0, -self.start), min(self.shard.numel(), size - self.start)
        if first < last:
            yield self.read(first, last), Position(self.start + first)

    def read(self, first: int, last: int) -> torch.Tensor:
        """Elements [first, last) of the shard as they are sent."""
        return self.shard[first:last]


class Weights(ABC):
    """A model as its weights are sent."""

    @abstractmethod
    def wire_weights(self) -> list[tuple[str, WireWeight, torch.Tensor]]:
        """Returns every tensor to send: its name, which elements it is, and of which parameter or
        buffer.
        """

    def rows(self, weight: WireWeight, whole: torch.Tensor, alone: bool) -> Rows:
        """This rank's part of one of them. alone: whether this rank lays out what is not cut."""
        return rows_of(whole, weight.start, alone)


class ShardedWeights(GatheredWeights):
    """dtype: what parameters are sent in, buffers go as they are held.

    The rest as GatheredWeights.
    """

    def __init__(
        self,
        model: Weights,
        spec: ModelSpec,
        place: Place,
        bucket_bytes: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        *,
        base: Base | None = None,
        sent_once: str = "",
        on_host: bool = False,
        senders: Senders = "leader",
    ) -> None:
        self._model = model
        self._weights = model.wire_weights()
        sent = {
            name: Outgoing(
                weight.shape, dtype if isinstance(whole, torch.nn.Parameter) else whole.dtype
            )
            for name, weight, whole in self._weights
        }
        device = local(self._weights[0][2]).device
        super().__init__(
            sent,
            spec,
            place,
            bucket_bytes,
            group,
            device,
            base=base,
            sent_once=sent_once,
            on_host=on_host,
            senders=senders,
        )

    def parts(self, leads: bool) -> Mapping[str, Rows]:
        return {
            name: self._model.rows(weight, whole, leads) for name, weight, whole in self._weights
        }

    def live_parts(self, leads: bool) -> Mapping[str, Rows]:
        return {
            name: self._model.rows(weight, whole, leads)
            for name, weight, whole in self._model.wire_weights()
        }

    def regions(self) -> Mapping[str, Sequence[Region]]:
        """See GatheredWeights."""
        mesh = self._place.mesh
        num_shards = len(self._place.shard_group)
        everyone = tuple(range(mesh.size))
        regions: dict[str, list[Region]] = {}
        for name, weight, whole in self._weights:
            if not isinstance(whole, DTensor):
                regions[name] = [Region.whole(weight.shape, everyone)]
                continue
            regions[name] = [
                _region(weight, whole, shard, num_shards, everyone[shard::num_shards])
                for shard in range(num_shards)
            ]
        return regions


def _region(
    weight: WireWeight, whole: DTensor, shard: int, num_shards: int, holders: tuple[int, ...]
) -> Region:
    """Returns the rows of a weight that shard number `shard` of its parameter has."""
    rows = -(-whole.shape[0] // num_shards)  # as torch.chunk cuts
    elements = math.prod(whole.shape[1:])
    first = shard * rows * elements - weight.start
    last = (shard + 1) * rows * elements - weight.start
    begin = min(max(0, first), weight.size)
    end = min(max(0, last), weight.size)
    width = row_size(weight.shape)
    return Region(begin, (end - begin) // width, width, holders)


def rows_of(whole: torch.Tensor, start: int, alone: bool) -> Rows:
    """This rank's rows of a parameter that FSDP has cut along its first dimension, counted from
    where a tensor of the checkpoint begins in it. alone: whether this rank lays out what is not
    cut, as buffers are."""
    if not isinstance(whole, DTensor):
        return Rows(whole.detach().reshape(-1) if alone else whole.new_empty(0), -start)
    mesh, rows_here = whole.device_mesh, local(whole).detach()
    (axis,) = [
        number for number, placement in enumerate(whole.placements) if isinstance(placement, Shard)
    ]
    rows = -(-whole.shape[0] // mesh.size(axis))  # as torch.chunk cuts
    first = min(rows * mesh.get_local_rank(axis), whole.shape[0])
    return Rows(rows_here.reshape(-1), first * math.prod(whole.shape[1:]) - start)

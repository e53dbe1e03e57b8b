"""The policy's weights gathered from their shards into flat buckets of bounded size, for a publish and an export.

A rank never holds more of other ranks' weights than two buckets: one is on its way between the ranks while the one before is read.
Shards are rows; each rank lays its own rows of a bucket where they belong, the others' are zero bits, and the sum of the bits over
the ranks is the bucket.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from pa_npu.backends.fsdp.optimizer import local
from pa_npu.config.mesh import Place
from pa_npu.families.spec import ModelSpec
from pa_npu.families.wire_names import WireWeight
from pa_npu.weight_transfer import transport
from pa_npu.weight_transfer.adapters import Base
from pa_npu.weight_transfer.manifest import Bucket, Manifest, Segment

_WORD_BYTES = 4  # sums of bits are those of int32, which every backend of collectives adds


@dataclass(frozen=True)
class Rows:
    """This rank's part of a weight: elements [start, start + shard.numel()) of it flattened, as far as it has these."""

    shard: torch.Tensor
    start: int

    def gather(self, group: dist.ProcessGroup | None) -> None:
        """Get what `read` needs of other ranks; collective over those that hold the shards."""

    def read(self, first: int, last: int) -> torch.Tensor:
        """Elements [first, last) of the shard as they are sent."""
        return self.shard[first:last]


class Weights(Protocol):
    """A model as its weights are sent."""

    def wire_weights(self) -> list[tuple[str, WireWeight, torch.Tensor]]:
        """Every tensor to send: its name, which elements it is, and of which parameter or buffer."""

    def rows(self, weight: WireWeight, whole: torch.Tensor, alone: bool) -> Rows:
        """This rank's part of one of them. alone: whether this rank lays out what is not cut."""


class ShardedWeights:
    """A WeightSource. dtype: what parameters are sent in, buffers go as they are held.

    group: the ranks whose shards make the whole, None where this rank is alone. base: what adapters are merged into.
    """

    def __init__(
        self,
        model: Weights,
        spec: ModelSpec,
        place: Place,
        bucket_bytes: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        base: Base | None = None,
    ) -> None:
        self._place = place
        self._group = group
        self._model = model
        self._weights = model.wire_weights()
        shapes = {name: weight.shape for name, weight, _ in self._weights}
        sent: dict[torch.dtype, dict[str, tuple[int, ...]]] = {}
        for name, weight, whole in self._weights:  # parameters first
            own = dtype if isinstance(whole, torch.nn.Parameter) else whole.dtype
            sent.setdefault(own, {})[name] = weight.shape
        self.manifest = Manifest(
            stage=0,
            model=spec.wire_sizes(),
            shapes=shapes,
            buckets=tuple(
                Bucket(str(own).removeprefix("torch."), segments)
                for own, some in sent.items()
                for segments in plan_segments(some, max(1, bucket_bytes // own.itemsize))
            ),
            base=base,
        )

    @property
    def is_leader(self) -> bool:
        return self._place.publishes

    def buckets(self, deadline: transport.Deadline) -> Iterator[torch.Tensor | None]:
        """See WeightSource. Collective over the ranks that hold the shards."""
        alone = self._group is None or dist.get_rank(self._group) == 0
        weights = {name: self._model.rows(weight, whole, alone) for name, weight, whole in self._weights}
        buckets = self.manifest.buckets
        upcoming = self._start(buckets[0], weights)
        for number, bucket in enumerate(buckets, start=1):
            whole, work = upcoming
            if number < len(buckets):
                upcoming = self._start(buckets[number], weights)
            if work is not None:
                what = f"bucket {number} of {len(buckets)} ({bucket.summary})"
                where = f"gathering weights over shards, {what}: rank {self._place.rank}"
                transport.wait(work, deadline, where, "look at the logs of the trainer ranks for the one that stopped")
            yield whole.view(bucket.torch_dtype)[: bucket.num_elements] if self.is_leader else None

    @torch.no_grad()
    def _start(self, bucket: Bucket, weights: dict[str, Rows]) -> tuple[torch.Tensor, transport.Work | None]:
        """Lay this rank's rows of a bucket out, and begin to add the other ranks'."""
        device = memory_of(self._group, next(iter(weights.values())).shard.device)
        words = torch.zeros(-(-bucket.num_bytes // _WORD_BYTES), dtype=torch.int32, device=device)
        flat, offset = words.view(bucket.torch_dtype), 0
        for segment in bucket.segments:
            own = weights[segment.name]
            own.gather(self._group)
            first = max(segment.start, own.start)
            last = min(segment.start + segment.size, own.start + own.shard.numel())
            if first < last:
                place = offset + first - segment.start
                flat[place : place + last - first].copy_(own.read(first - own.start, last - own.start))
            offset += segment.size
        if self._group is None:
            return words, None
        return words, dist.reduce(words, group=self._group, group_dst=0, async_op=True)


def memory_of(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """The device of the group's collectives: host memory for one of a thread beside training, else the device."""
    return torch.device("cpu") if group is not None and dist.get_backend(group) == transport.HOST_BACKEND else device


def plan_segments(shapes: dict[str, tuple[int, ...]], most: int) -> list[tuple[Segment, ...]]:
    """Tensors in order, cut by rows into buckets of at most `most` elements (or one row, if that is larger)."""
    buckets: list[list[Segment]] = []
    room = 0
    for name, shape in shapes.items():
        size, row = math.prod(shape), math.prod(shape[1:])
        if size > room:
            room = 0  # one that fits into a bucket is never cut, so that the receiver can use it where it arrives
        start = 0
        while start < size:
            if room < row:
                buckets.append([])
                room = max(most, row)
            count = min(size - start, room // row * row)
            buckets[-1].append(Segment(name, start, count))
            room -= count
            start += count
    return [tuple(bucket) for bucket in buckets]


def rows_of(whole: torch.Tensor, start: int, alone: bool) -> Rows:
    """This rank's rows of a parameter that FSDP has cut along its first dimension, counted from where a tensor of the checkpoint
    begins in it. alone: whether this rank lays out what is not cut, as buffers are."""
    if not isinstance(whole, DTensor):
        return Rows(whole.detach().reshape(-1) if alone else whole.new_empty(0), -start)
    mesh, own = whole.device_mesh, local(whole).detach()
    (axis,) = [number for number, placement in enumerate(whole.placements) if isinstance(placement, Shard)]
    rows = -(-whole.shape[0] // mesh.size(axis))  # as torch.chunk cuts
    first = min(rows * mesh.get_local_rank(axis), whole.shape[0])
    return Rows(own.reshape(-1), first * math.prod(whole.shape[1:]) - start)

"""Gathers a model's weights from the ranks that hold them into flat buckets of bounded size.

They serve a publish and an export. A rank never holds more of other ranks' weights than two
buckets: one is on its way between the ranks while the one before is read. Each rank lays its own
part of a bucket where it belongs and leaves the others' zero, so that the sum of the bits over the
ranks is the bucket. It is a sum because gloo's all-gather copies everything twice more, and HCCL
has no gather to one rank.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist

from pa_npu.config.mesh import Place
from pa_npu.families.spec import ModelSpec
from pa_npu.weight_transfer import transport
from pa_npu.weight_transfer.adapters import Base
from pa_npu.weight_transfer.contents import Contents
from pa_npu.weight_transfer.manifest import Bucket, Manifest, Segment

_WORD_BYTES = 4  # sums of bits are those of int32, which every backend of collectives adds
_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Outgoing:
    """A tensor to send: its full shape, and the type that it is sent in."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Part(ABC):
    """This rank's part of a tensor."""

    def gather(self, group: dist.ProcessGroup | None, memory: torch.device) -> None:  # noqa: B027
        """Gets what `lay` needs from other ranks. Collective over `group`, whose collectives take
        tensors in `memory`.
        """

    @abstractmethod
    def lay(self, out: torch.Tensor, first: int) -> None:
        """Copies this rank's part of whole rows of the tensor to its place in `out`, which is flat
        and begins with element `first`.
        """

    @abstractmethod
    def pieces(self, size: int) -> Iterator[torch.Tensor]:
        """Yields this rank's part of the tensor of `size` elements, each element once, in any order
        and shape.
        """


class GatheredWeights(ABC):
    """A WeightSource. A backend's subclass passes the tensors that are sent, by name, and
    implements `parts`, this rank's parts of them.

    group: the ranks that together hold the weights, of which the first one leads; None if this rank
    holds all.
    base: what adapters are merged into.
    sent_once: see Manifest.
    on_host: makes buckets in host memory, where the group's collectives are, for a thread that
    sends while training runs.
    """

    def __init__(
        self,
        tensors: Mapping[str, Outgoing],
        spec: ModelSpec,
        place: Place,
        bucket_bytes: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        base: Base | None = None,
        sent_once: str = "",
        on_host: bool = False,
    ) -> None:
        self._place = place
        self._group = group
        self._memory = _HOST if on_host else device
        whole = Manifest(stage=place.stage, model={}, shapes={}, buckets=(), sent_once=sent_once)
        by_type: dict[tuple[bool, torch.dtype], dict[str, tuple[int, ...]]] = {}
        for name, tensor in tensors.items():
            kind = whole.is_sent_once(name), tensor.dtype
            by_type.setdefault(kind, {})[name] = tensor.shape
        buckets: list[Bucket] = []
        for (_, dtype), shapes in by_type.items():
            type_name = str(dtype).removeprefix("torch.")
            max_elements = max(1, bucket_bytes // dtype.itemsize)
            buckets += [
                Bucket(type_name, segments) for segments in plan_segments(shapes, max_elements)
            ]
        self.manifest = msgspec.structs.replace(
            whole,
            model=spec.wire_sizes(),
            shapes={name: tensor.shape for name, tensor in tensors.items()},
            buckets=tuple(buckets),
            base=base,
        )

    @abstractmethod
    def parts(self, leads: bool) -> Mapping[str, Part]:
        """Returns this rank's part of each tensor. leads: whether it lays out what all ranks have."""

    @abstractmethod
    def live_parts(self, leads: bool) -> Mapping[str, Part]:
        """Returns the parts of tensors that are looked up anew in the model that trains."""

    @property
    def is_leader(self) -> bool:
        return self._place.publishes

    @property
    def _leads(self) -> bool:
        return self._group is None or self._group.rank() == 0

    @torch.no_grad()
    def contents(self) -> dict[str, str]:
        """See WeightSource. Collective over the group, as `gather` of a part is."""
        types = {}
        for bucket in self.manifest.buckets:
            for segment in bucket.segments:
                types[segment.name] = bucket.torch_dtype
        parts = self.live_parts(self._leads)
        contents = Contents()
        for name, shape in self.manifest.shapes.items():
            parts[name].gather(self._group, self._memory)
            for piece in parts[name].pieces(math.prod(shape)):
                contents.add(name, piece, types[name])
        return contents.read()

    def buckets(
        self, deadline: transport.Deadline, *, whole: bool = True
    ) -> Iterator[torch.Tensor | None]:
        """See WeightSource. Collective over the group."""
        parts = self.parts(self._leads)
        buckets = self.manifest.sent(whole=whole)
        upcoming = self._start(buckets[0], parts)
        for number, bucket in enumerate(buckets, start=1):
            words, work = upcoming
            if number < len(buckets):
                upcoming = self._start(buckets[number], parts)
            if work is not None:
                bucket_text = f"bucket {number} of {len(buckets)} ({bucket.summary})"
                others = [rank for rank in self._place.shard_group if rank != self._place.rank]
                where = (
                    f"gathering weights over the ranks of stage {self._place.stage}, {bucket_text}: rank "
                    f"{self._place.rank} waits for the parts of ranks {others}"
                )
                transport.wait(
                    work,
                    deadline,
                    where,
                    "look at the logs of the trainer ranks for the one that stopped",
                )
            yield words.view(bucket.torch_dtype)[: bucket.num_elements] if self.is_leader else None

    @torch.no_grad()
    def _start(
        self, bucket: Bucket, parts: Mapping[str, Part]
    ) -> tuple[torch.Tensor, dist.Work | None]:
        """Lays this rank's part of a bucket out, and begins to add the other ranks' parts."""
        words = torch.zeros(
            -(-bucket.num_bytes // _WORD_BYTES), dtype=torch.int32, device=self._memory
        )
        flat, offset = words.view(bucket.torch_dtype), 0
        for segment in bucket.segments:
            part = parts[segment.name]
            part.gather(self._group, self._memory)
            part.lay(flat[offset : offset + segment.size], segment.start)
            offset += segment.size
        if self._group is None:
            return words, None
        work: dist.Work = self._group.reduce(words, 0)
        return words, work


def plan_segments(
    shapes: Mapping[str, tuple[int, ...]], max_elements: int
) -> list[tuple[Segment, ...]]:
    """Cuts tensors, in order, by rows into buckets of at most `max_elements` elements, or of one row
    if that is larger.
    """
    buckets: list[list[Segment]] = []
    room = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        row = math.prod(shape[1:])
        if size > room:
            # a tensor that fits into a bucket is never cut, so that the receiver can use it where
            # it arrives
            room = 0
        start = 0
        while start < size:
            if room < row:
                buckets.append([])
                room = max(max_elements, row)
            count = min(size - start, room // row * row)
            buckets[-1].append(Segment(name, start, count))
            room -= count
            start += count
    return [tuple(bucket) for bucket in buckets]

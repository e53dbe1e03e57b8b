"""A model's weights from the ranks that hold them, in flat buckets of bounded size.

They serve a publish and an export, in one of two ways:

    divided    Each rank makes buckets of its own shards and sends them itself; a region that
               several ranks hold is sent by the one of them that has the fewest bytes. No weights
               move between trainer ranks.
    gathered   One rank makes buckets of whole tensors. Each rank lays its own part of a bucket
               where it belongs and leaves the others' zero, so that the sum of the bits over the
               ranks is the bucket. It is a sum because gloo's all-gather copies everything twice
               more, and HCCL has no gather to one rank.

A rank never holds more of other ranks' weights than two buckets: one is on its way while the one
before is read.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist

from pa_npu.config.mesh import Place
from pa_npu.config.sections.operation import Senders
from pa_npu.families.spec import ModelSpec
from pa_npu.weight_transfer import transport
from pa_npu.weight_transfer.adapters import Base
from pa_npu.weight_transfer.contents import OrderedContents, Position
from pa_npu.weight_transfer.manifest import Bucket, Manifest, Segment, row_size

_WORD_BYTES = 4  # sums of bits are those of int32, which every backend of collectives adds
_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Outgoing:
    """A tensor to send: its full shape, and the type that it is sent in."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Region:
    """A block of a tensor: `rows` rows, `width` elements of each, from element `start` on.

    holders: the ranks of this stage that hold it.
    """

    start: int
    rows: int
    width: int
    holders: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return self.rows * self.width

    @classmethod
    def whole(cls, shape: tuple[int, ...], holders: tuple[int, ...] = ()) -> Region:
        """Returns a whole tensor."""
        width = row_size(shape)
        return cls(0, math.prod(shape) // width if width else 0, width, holders)


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

    def lay_columns(self, out: torch.Tensor, first_row: int) -> None:
        """Copies this rank's columns of the rows from `first_row` on to `out`, [rows, columns].

        Called on parts whose region is narrower than the tensor.
        """
        raise NotImplementedError(f"{type(self).__name__} has whole rows")

    @abstractmethod
    def pieces(self, size: int) -> Iterator[tuple[torch.Tensor, Position]]:
        """Yields this rank's part of the tensor of `size` elements, each element once, in pieces of
        any shape, and where their elements are in the whole.
        """


class GatheredWeights(ABC):
    """A WeightSource. A backend's subclass passes the tensors that are sent, by name, and
    implements `parts`, this rank's parts of them, and `regions`, what each rank holds of them. Both
    are called when the subclass has its own attributes.

    group: the ranks that together hold the weights, of which the first one leads; None if this rank
    holds all.
    base: what adapters are merged into.
    sent_once: see Manifest.
    on_host: makes buckets in host memory, where the group's collectives are, for a thread that
    sends while training runs.
    senders: publish.senders. With "leader" weights are gathered on the first rank of the group,
    otherwise this rank makes buckets of its own share of them.
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
        senders: Senders = "leader",
    ) -> None:
        self._place = place
        self._group = group
        self._memory = _HOST if on_host else device
        self._names = tuple(tensors)
        self._divides = senders != "leader"
        sender = place.shard_group[0]
        num_senders = 1
        own = {name: [Region.whole(tensor.shape)] for name, tensor in tensors.items()}
        if self._divides:
            everyone = place.mesh.publishers(senders)
            of_stage = [rank for rank in everyone if place.mesh.place(rank).stage == place.stage]
            own = divide(tensors, self.regions(), of_stage)[place.rank]
            sender = place.rank
            num_senders = len(of_stage)
        whole = Manifest(stage=place.stage, model={}, shapes={}, buckets=(), sent_once=sent_once)
        by_type: dict[tuple[bool, torch.dtype], list[str]] = {}
        for name in own:
            kind = whole.is_sent_once(name), tensors[name].dtype
            by_type.setdefault(kind, []).append(name)
        buckets: list[Bucket] = []
        for (_, dtype), names in by_type.items():
            type_name = str(dtype).removeprefix("torch.")
            max_elements = max(1, bucket_bytes // dtype.itemsize)
            blocks = [(name, region, tensors[name].shape) for name in names for region in own[name]]
            buckets += [
                Bucket(type_name, segments) for segments in plan_segments(blocks, max_elements)
            ]
        self.manifest = msgspec.structs.replace(
            whole,
            model=spec.wire_sizes(),
            shapes={name: tensors[name].shape for name in own},
            buckets=tuple(buckets),
            base=base,
            rank=sender,
            senders=num_senders,
        )

    @abstractmethod
    def parts(self, leads: bool) -> Mapping[str, Part]:
        """Returns this rank's part of each tensor. leads: whether it lays out what all ranks have."""

    @abstractmethod
    def live_parts(self, leads: bool) -> Mapping[str, Part]:
        """Returns the parts of tensors that are looked up anew in the model that trains."""

    @abstractmethod
    def regions(self) -> Mapping[str, Sequence[Region]]:
        """Returns the regions of each tensor, which together are the tensor, with the ranks that
        hold them: equal on all ranks. No rank holds two regions of a tensor.
        """

    @property
    def is_leader(self) -> bool:
        return self._divides or self._place.publishes

    @property
    def _leads(self) -> bool:
        return self._divides or self._group is None or self._group.rank() == 0

    @torch.no_grad()
    def contents(self) -> dict[str, str]:
        """See WeightSource. Collective over the group, as `gather` of a part is."""
        types = {}
        for bucket in self.manifest.buckets:
            for segment in bucket.segments:
                types[segment.name] = bucket.torch_dtype
        parts = self.live_parts(self._leads)
        contents = OrderedContents()
        for name in self._names:
            parts[name].gather(self._group, self._memory)
            if name not in types:
                continue
            size = math.prod(self.manifest.shapes[name])
            for piece, position in parts[name].pieces(size):
                contents.add(name, piece, types[name], position)
        return contents.read()

    def buckets(
        self, deadline: transport.Deadline, *, whole: bool = True
    ) -> Iterator[torch.Tensor | None]:
        """See WeightSource. Collective over the group, unless this rank sends its own shards and
        its parts gather nothing.
        """
        parts = self.parts(self._leads)
        if self._divides:
            # Ranks come to a tensor at different times, so that what they need of each other is
            # gathered before anything is sent.
            for name in self._names:
                parts[name].gather(self._group, self._memory)
        buckets = self.manifest.sent(whole=whole)
        upcoming = self._start(buckets[0], parts) if buckets else None
        for number, bucket in enumerate(buckets, start=1):
            assert upcoming is not None
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
        """Lays this rank's part of a bucket out. If others have parts of it too, begins to add
        them.
        """
        words = torch.zeros(
            -(-bucket.num_bytes // _WORD_BYTES), dtype=torch.int32, device=self._memory
        )
        flat, offset = words.view(bucket.torch_dtype), 0
        for segment in bucket.segments:
            out = flat[offset : offset + segment.size]
            offset += segment.size
            part = parts[segment.name]
            if segment.width:
                row = segment.start // row_size(self.manifest.shapes[segment.name])
                part.lay_columns(out.view(-1, segment.width), row)
                continue
            if not self._divides:
                part.gather(self._group, self._memory)
            part.lay(out, segment.start)
        if self._divides or self._group is None:
            return words, None
        work: dist.Work = self._group.reduce(words, 0)
        return words, work


def divide(
    tensors: Mapping[str, Outgoing],
    regions: Mapping[str, Sequence[Region]],
    senders: Sequence[int],
) -> dict[int, dict[str, list[Region]]]:
    """Divides tensors among the senders of a stage, which all do it alike: each region goes to the
    one of its holders that has the fewest bytes so far.

    Returns each sender's regions by name, in the order of the tensors.
    """
    shares: dict[int, dict[str, list[Region]]] = {rank: {} for rank in senders}
    num_bytes = dict.fromkeys(senders, 0)
    for name, tensor in tensors.items():
        for region in regions[name]:
            if not region.size:
                continue
            holders = [rank for rank in region.holders if rank in num_bytes]
            rank = min(holders, key=num_bytes.__getitem__)
            num_bytes[rank] += region.size * tensor.dtype.itemsize
            shares[rank].setdefault(name, []).append(region)
    return shares


def plan_segments(
    blocks: Sequence[tuple[str, Region, tuple[int, ...]]], max_elements: int
) -> list[tuple[Segment, ...]]:
    """Cuts regions of tensors, in order, by rows into buckets of at most `max_elements` elements,
    or of one row if that is larger.

    blocks: name, region and full shape of each tensor.
    """
    buckets: list[list[Segment]] = []
    room = 0
    for name, region, shape in blocks:
        whole_row = row_size(shape)
        width = 0 if region.width == whole_row else region.width
        if region.size > room:
            # a tensor that fits into a bucket is never cut, so that the receiver can use it where
            # it arrives
            room = 0
        row = 0
        while row < region.rows:
            if room < region.width:
                buckets.append([])
                room = max(max_elements, region.width)
            count = min(region.rows - row, room // region.width)
            start = region.start + row * whole_row
            buckets[-1].append(Segment(name, start, count * region.width, width))
            room -= count * region.width
            row += count
    return [tuple(bucket) for bucket in buckets]

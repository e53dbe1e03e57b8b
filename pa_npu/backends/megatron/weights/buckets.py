"""One stage's HF tensors, gathered over tensor and expert parallelism into flat buckets of bounded size.

Publishing and exporting read a stage through this. A rank holds at most two packed and two gathered buckets: tensors
larger than a bucket are cut by rows, each rank contributing the same rows of its shard. With TP the ranks exchange their
packed shards, one bucket ahead of the one being laid out for the wire; tensors that TP does not cut come from the leader
alone, experts from the one rank that holds them. What the leader holds it packs straight from the parameters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pa_npu.backends.megatron.weights.hf_map import (
    HfTensor,
    first_layer,
    holder,
    part_view,
    stage_tensors,
    standard_parameters,
)
from pa_npu.config.mesh import Place
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.model_rules import check_tensor_division
from pa_npu.weight_transfer import transport
from pa_npu.weight_transfer.manifest import Bucket, Manifest, Segment


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) of every rank's shard of a tensor; a vector's rows are its elements."""

    tensor: HfTensor
    start: int
    stop: int


@dataclass(frozen=True)
class Gather:
    """The exchange of one bucket. works: (who sends, the work).

    shards: [tp_size, elements], the TP ranks' rows of its pieces one after another. experts: rows of experts by who holds them.
    """

    shards: torch.Tensor | None
    experts: dict[int, torch.Tensor]
    works: list[tuple[int, transport.Work]]


class StageTensors:
    """The plan and the data of one stage. All TP ranks build the same plan from the same parameters."""

    def __init__(
        self,
        module: torch.nn.Module,
        spec: ModelSpec,
        place: Place,
        bucket_bytes: int,
        shard_group: dist.ProcessGroup | None = None,
        to_host: bool = False,
    ) -> None:
        """shard_group: the ranks of place.shard_group, None where that is one. to_host: it is one of host memory."""
        self._to_host = to_host
        self._tensor_size = place.mesh.tensor
        check_tensor_division(spec, self._tensor_size)
        self._spec = spec
        self._place = place
        self._shard_group = shard_group
        self._rank = place.shard_group.index(place.rank)
        self._parameters = standard_parameters(module)
        self._tensors = stage_tensors(self._parameters, spec, first_layer(module))
        self._plan = plan_buckets(
            [(tensor, self._dtype(tensor)) for tensor in self._tensors], self._tensor_size, bucket_bytes
        )
        self.manifest = Manifest(
            stage=place.stage,
            model=spec.wire_sizes(),
            shapes={tensor.name: tensor.shape for tensor in self._tensors},
            buckets=tuple(
                Bucket(
                    str(self._dtype(pieces[0].tensor)).removeprefix("torch."),
                    tuple(segment for piece in pieces for segment in piece_segments(piece, self._tensor_size)),
                )
                for pieces in self._plan
            ),
        )

    @property
    def is_leader(self) -> bool:
        return self._place.publishes

    def buckets(self, deadline: transport.Deadline) -> Iterator[torch.Tensor | None]:
        """The stage's buckets in order: a flat tensor on the leader, None on its peers. Collective over place.shard_group.

        Read only: a bucket may be a run of a parameter. A yielded bucket is overwritten when the one after the next is
        asked for, because two buffers take turns.
        """
        buffers: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        upcoming = self._start_gather(self._plan[0])
        for index, (pieces, bucket) in enumerate(zip(self._plan, self.manifest.buckets, strict=True)):
            gather = upcoming
            if index + 1 < len(self._plan):
                upcoming = self._start_gather(self._plan[index + 1])
            gathered = self._finish_gather(gather, deadline, index)
            key = (index % 2, bucket.torch_dtype)
            if not self.is_leader:
                yield None
                continue
            if (run := self._contiguous(pieces, gathered)) is not None:
                yield run[: bucket.num_elements].to(self._memory(pieces[0].tensor))
                continue
            if key not in buffers:
                largest = max(b.num_elements for b in self.manifest.buckets if b.dtype == bucket.dtype)
                buffers[key] = torch.empty(largest, dtype=bucket.torch_dtype, device=self._memory(pieces[0].tensor))
            target = buffers[key][: bucket.num_elements]
            self._fill(target, pieces, gathered)
            yield target

    def _dtype(self, tensor: HfTensor) -> torch.dtype:
        return self._parameters[tensor.parameter].dtype

    def _memory(self, tensor: HfTensor) -> torch.device:
        """The device on which its bucket is put together."""
        return torch.device("cpu") if self._to_host else self._parameters[tensor.parameter].device

    def _rows(self, piece: Piece) -> torch.Tensor:
        """This rank's rows of a piece as a view (or, for a part of an interleaved tensor, a copy) [..., columns]."""
        tensor = piece.tensor
        view = part_view(self._parameters[tensor.parameter].detach(), tensor, self._spec)
        shape = tensor.local_shape(self._tensor_size)
        if (piece.start, piece.stop) == (0, shape[0]):
            return view
        return view.reshape(shape)[piece.start : piece.stop]

    @torch.no_grad()
    def _start_gather(self, pieces: list[Piece]) -> Gather | None:
        """Pack and exchange this bucket's shards; None where the leader has all of it.

        One broadcast per peer, all at once: as much traffic as an all-gather, but gloo's all-gather copies everything
        twice more (a tenth of the broadcast's speed), and HCCL has no gather to one rank.
        """
        size, like = self._tensor_size, self._parameters[pieces[0].tensor.parameter].detach()
        memory = self._memory(pieces[0].tensor)
        cut = [piece for piece in pieces if piece.tensor.shard_dim is not None] if size > 1 else []
        shards, sent = None, []
        if cut:
            shards = like.new_empty(size, sum(self._num_elements(piece) for piece in cut), device=memory)
            if self._rank < size:
                _pack([self._rows(piece) for piece in cut], shards[self._rank])
            sent = [(rank, shards[rank]) for rank in range(1, size)]
        held: dict[int, list[Piece]] = {}
        for piece in pieces:
            if owner := holder(piece.tensor, self._spec, self._place):
                held.setdefault(owner, []).append(piece)
        experts: dict[int, torch.Tensor] = {}
        for owner, owned in sorted(held.items()):
            experts[owner] = like.new_empty(sum(self._num_elements(piece) for piece in owned), device=memory)
            if self._rank == owner:
                _pack([self._rows(piece) for piece in owned], experts[owner])
            sent.append((owner, experts[owner]))
        if not sent:
            return None
        works = [(rank, transport.broadcast(self._shard_group, part, root=rank)) for rank, part in sent]
        return Gather(shards, experts, works)

    def _num_elements(self, piece: Piece) -> int:
        """Count the elements of a piece on a rank that holds rows of it."""
        return (piece.stop - piece.start) * math.prod(piece.tensor.local_shape(self._tensor_size)[1:])

    def _finish_gather(self, gather: Gather | None, deadline: transport.Deadline, index: int) -> Gather | None:
        if gather is None:
            return None
        for rank, work in gather.works:
            where = (
                f"gathering weights over the ranks of stage {self._place.stage}, bucket {index + 1} of {len(self._plan)} "
                f"({self.manifest.buckets[index].summary}): rank {self._rank} of {len(self._place.shard_group)} "
                f"waits for the shard of rank {rank}"
            )
            remedy = "look at the logs of the ranks of this tensor- or expert-parallel group for the one that stopped"
            transport.wait(work, deadline, where, remedy)
        return gather

    def _contiguous(self, pieces: list[Piece], gathered: Gather | None) -> torch.Tensor | None:
        """The bucket, where it already lies in memory as the wire wants it; padding may follow."""
        if len(pieces) > 1:
            return None
        if gathered is not None:
            (part,) = [gathered.shards] if gathered.shards is not None else gathered.experts.values()
            return None if pieces[0].tensor.shard_dim == 1 else part.view(-1)
        rows = self._rows(pieces[0])
        return rows.view(-1) if rows.is_contiguous() else None

    @torch.no_grad()
    def _fill(self, target: torch.Tensor, pieces: list[Piece], gathered: Gather | None) -> None:
        """Lay the pieces out as the manifest's segments say."""
        size, offset, column = self._tensor_size, 0, 0
        taken: Counter[int] = Counter()  # elements of each rank's experts
        for piece in pieces:
            tensor = piece.tensor
            if owner := holder(tensor, self._spec, self._place):
                assert gathered is not None
                count, start = self._num_elements(piece), taken[owner]
                target[offset : offset + count].copy_(gathered.experts[owner][start : start + count])
                taken[owner] += count
                offset += count
                continue
            if size == 1 or tensor.shard_dim is None:
                rows = self._rows(piece)
                target[offset : offset + rows.numel()].view(rows.shape).copy_(rows)
                offset += rows.numel()
                continue
            assert gathered is not None
            assert gathered.shards is not None
            count = self._num_elements(piece)
            shards = gathered.shards[:, column : column + count]
            column += count
            if tensor.shard_dim == 1:
                out = target[offset : offset + size * count].view(piece.stop - piece.start, size, -1)
                out.copy_(shards.view(size, piece.stop - piece.start, -1).transpose(0, 1))
                offset += size * count
                continue
            for rank, segment in _rank_rows(piece, size):
                target[offset : offset + segment].copy_(shards[rank, :segment])
                offset += segment


def _pack(rows: list[torch.Tensor], out: torch.Tensor) -> None:
    offset = 0
    for row in rows:
        out[offset : offset + row.numel()].view(row.shape).copy_(row)
        offset += row.numel()


def plan_buckets(tensors: list[tuple[HfTensor, torch.dtype]], tp_size: int, bucket_bytes: int) -> list[list[Piece]]:
    """Cut tensors, in order, into buckets of one dtype and at most bucket_bytes (or one row of all ranks, if larger).

    A tensor that fits into a bucket is never cut, so that the receiver can use it where it arrives.
    """
    buckets: list[list[Piece]] = []
    room, current_dtype = 0, None
    for tensor, dtype in tensors:
        rows = tensor.local_shape(tp_size)[0]
        row_bytes = math.prod(tensor.shape[1:]) * dtype.itemsize * (tp_size if tensor.shard_dim == 0 else 1)
        if dtype != current_dtype or rows * row_bytes > room:
            room = 0
        start = 0
        while start < rows:
            if room < row_bytes:
                buckets.append([])
                room = max(bucket_bytes, row_bytes)
                current_dtype = dtype
            stop = min(rows, start + room // row_bytes)
            buckets[-1].append(Piece(tensor, start, stop))
            room -= (stop - start) * row_bytes
            start = stop
    return buckets


def piece_segments(piece: Piece, tp_size: int) -> Iterator[Segment]:
    """Yields the segments of the HF tensor that a piece's gathered rows are, in the order of the wire: rank after rank."""
    tensor = piece.tensor
    columns = math.prod(tensor.shape[1:])
    if tensor.shard_dim != 0 or tp_size == 1:
        yield Segment(tensor.name, piece.start * columns, (piece.stop - piece.start) * columns)
        return
    size = tensor.local_size(tp_size)
    if (piece.start, piece.stop) == (0, size):
        yield Segment(tensor.name, 0, math.prod(tensor.shape))
        return
    for rank, count in _rank_rows(piece, tp_size):
        yield Segment(tensor.name, (rank * size + piece.start) * columns, count)


def _rank_rows(piece: Piece, tp_size: int) -> Iterator[tuple[int, int]]:
    """(rank, elements) of a piece cut along rows; vocabulary padding is left out."""
    tensor = piece.tensor
    columns = math.prod(tensor.shape[1:])
    for rank in range(tp_size):
        first, last = tensor.local_range(rank, tp_size)
        count = min(piece.stop, last - first) - piece.start
        if count > 0:
            yield rank, count * columns

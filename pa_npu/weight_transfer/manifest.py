"""A sender's part of a publish: tensors, or blocks of them, cut into buckets, and their reassembly.

The manifest is sent ahead as JSON. It says which segments of which tensors a bucket has, so that
only data crosses the wire. A pipeline stage has one sender or several, which divide its tensors
among themselves; segments of a tensor may come from all of them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from pa_npu.weight_transfer.adapters import Base, Count
from pa_npu.weight_transfer.transport import WeightSyncError


def row_size(shape: tuple[int, ...]) -> int:
    """Returns the number of elements of a row, which is all that shares an index of the first
    dimension.
    """
    return math.prod(shape[1:])


class Segment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`size` elements of the HF tensor `name`.

    width: 0 for elements [start, start + size) of the flattened tensor. Otherwise they are a block
    of so many elements of each row, whose first one is element `start`.
    """

    name: str
    start: Count
    size: Count
    width: Count = 0

    def view_of(self, flat: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns the view of these elements in the flattened tensor, which has this shape."""
        if not self.width:
            return flat[self.start : self.start + self.size]
        row, column = divmod(self.start, row_size(shape))
        rows = flat.view(-1, row_size(shape))[row : row + self.size // self.width]
        return rows[:, column : column + self.width]


class Bucket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One broadcast: segments of one dtype (torch's name, such as bfloat16), one after another."""

    dtype: str
    segments: tuple[Segment, ...]

    @property
    def num_elements(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.torch_dtype.itemsize

    @property
    def summary(self) -> str:
        """First and last tensor, for messages."""
        first = self.segments[0].name
        last = self.segments[-1].name
        return first if first == last else f"{first} to {last}"


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The weights that one trainer rank sends.

    stage: the pipeline stage whose weights they are.
    model: sizes that engines compare.
    shapes: of the HF tensors, by name, that it sends, or sends segments of.
    buckets: in the order of sending.
    base: weights that the sent tensors are adapters of; None if they are the weights. One sender
        announces it.
    rank: of the trainer.
    senders: number of ranks that together send the stage's weights.
    sent_once: name of a module whose weights never change, so that engines get them with the first
        version in a group and keep them; empty if there is none.
    """

    stage: Count
    model: dict[str, Count]
    shapes: dict[str, tuple[Count, ...]]
    buckets: tuple[Bucket, ...]
    base: Base | None = None
    rank: Count = 0
    senders: Count = 1
    sent_once: str = ""

    @property
    def sender(self) -> str:
        """Returns the words for the sender in messages: stage 0, or rank 3 of stage 0."""
        if self.senders == 1:
            return f"stage {self.stage}"
        return f"rank {self.rank} of stage {self.stage}"

    def is_sent_once(self, name: str) -> bool:
        """Returns whether a weight or module of this name, in a file or in an engine, is sent once."""
        return bool(self.sent_once) and self.sent_once in name.split(".")[:2]

    def sent(self, *, whole: bool) -> tuple[Bucket, ...]:
        """Returns the buckets of a publish. whole: the first one in a group, which has all."""
        return tuple(bucket for bucket in self.buckets if whole or not self._is_once(bucket))

    @property
    def once(self) -> list[bool]:
        """Returns for each bucket whether it is sent once."""
        return [self._is_once(bucket) for bucket in self.buckets]

    def _is_once(self, bucket: Bucket) -> bool:
        return self.is_sent_once(bucket.segments[0].name)

    @property
    def loaded(self) -> set[str]:
        """HF names of the weights that an engine has in the end."""
        if self.base is None:
            return set(self.shapes)
        return {weight.name for weight in self.base.weights}

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def digest(self) -> int:
        text = json.dumps(self.to_json(), sort_keys=True).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1

    def to_json(self) -> dict[str, Any]:
        raw: dict[str, Any] = msgspec.to_builtins(self)
        return raw

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Manifest:
        """Returns a manifest.

        Raises WeightSyncError unless its segments are parts of its tensors, none of them twice, and
        all of each tensor where the stage has no other sender.
        """
        try:
            manifest = msgspec.convert(raw, cls)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            raise WeightSyncError(
                f"weight manifest is malformed ({error}); trainer and engine must run the same "
                "pa_npu"
            ) from None
        manifest._check()
        return manifest

    def _check(self) -> None:
        for bucket in self.buckets:
            if not all(segment.size for segment in bucket.segments) or not bucket.segments:
                raise WeightSyncError(
                    f"weight manifest of {self.sender}: a bucket or a segment of one is "
                    "empty; trainer and engine must run the same pa_npu"
                )
            if not isinstance(getattr(torch, bucket.dtype, None), torch.dtype):
                raise WeightSyncError(
                    f"weight manifest of {self.sender}: unknown dtype {bucket.dtype!r}; "
                    "update torch in the engine"
                )
            for segment in bucket.segments:
                if self.is_sent_once(segment.name) != self._is_once(bucket):
                    raise WeightSyncError(
                        f"weight manifest of {self.sender}: a bucket has {segment.name} beside "
                        f"{bucket.segments[0].name}, of which one is sent once; trainer and engine "
                        "must run the same pa_npu"
                    )
        _check_covered(f"weight manifest of {self.sender}", [self], whole=self.senders == 1)


def check_covered(manifests: Sequence[Manifest]) -> None:
    """Raises WeightSyncError unless all senders of each stage are there, and their segments together
    cover each tensor once.
    """
    by_stage: dict[int, list[Manifest]] = {}
    for manifest in manifests:
        by_stage.setdefault(manifest.stage, []).append(manifest)
    stages: dict[str, int] = {}
    for stage, of_stage in by_stage.items():
        for name in {name for manifest in of_stage for name in manifest.shapes}:
            is_twice = len(of_stage) > 1 and of_stage[0].senders == 1
            if is_twice or stages.setdefault(name, stage) != stage:
                raise WeightSyncError(
                    f"weight tensor {_first_twice(manifests) or name} is announced by two trainer "
                    "stages; give each stage's manifest once"
                )
        ranks = sorted(manifest.rank for manifest in of_stage)
        if any(manifest.senders != len(set(ranks)) for manifest in of_stage):
            raise WeightSyncError(
                f"weight manifests of stage {stage} are those of ranks {ranks}, and its weights are "
                f"divided among {of_stage[0].senders} senders; give the manifest of each once"
            )
        _check_covered(f"weight manifests of stage {stage}", of_stage, whole=True)


def _first_twice(manifests: Sequence[Manifest]) -> str | None:
    """Returns the first tensor that two manifests have; None if there is none."""
    seen: set[str] = set()
    for manifest in manifests:
        for name in manifest.shapes:
            if name in seen:
                return name
            seen.add(name)
    return None


def _check_covered(where: str, manifests: Sequence[Manifest], whole: bool) -> None:
    """Raises WeightSyncError unless the segments are in their tensors, none overlaps another, and
    with `whole` nothing of a tensor is missing.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    types: dict[str, str] = {}
    segments: dict[str, list[Segment]] = {}
    for manifest in manifests:
        for name, shape in manifest.shapes.items():
            if shapes.setdefault(name, shape) != shape:
                raise WeightSyncError(
                    f"{where}: {name} has shape {shape} for one sender and {shapes[name]} for "
                    "another; all trainer ranks must load the same model"
                )
            segments.setdefault(name, [])
        for bucket in manifest.buckets:
            for segment in bucket.segments:
                segments.setdefault(segment.name, []).append(segment)
                if types.setdefault(segment.name, bucket.dtype) != bucket.dtype:
                    raise WeightSyncError(
                        f"{where}: {segment.name} is sent as {bucket.dtype} and as "
                        f"{types[segment.name]}; all trainer ranks must run the same pa_npu"
                    )
    for name, parts in segments.items():
        if name not in shapes or not _covers(shapes[name], parts, whole):
            raise WeightSyncError(
                f"{where}: the segments of {name} do not cover shape {shapes.get(name)} exactly "
                "once"
            )


def _covers(shape: tuple[int, ...], segments: Sequence[Segment], whole: bool) -> bool:
    """Returns whether the segments lie in a tensor of this shape, none over another; with `whole`,
    also whether they are all of it.
    """
    row = row_size(shape)
    size = math.prod(shape)
    if whole and sum(segment.size for segment in segments) != size:
        return False
    if not any(segment.width for segment in segments):
        end = 0
        for start, stop in sorted((part.start, part.start + part.size) for part in segments):
            if start < end:
                return False
            end = stop
        return end <= size
    blocks: list[tuple[int, int, int, int]] = []  # rows [a, b), columns [c, d)
    for segment in segments:
        width = segment.width or row
        if not width or segment.size % width:
            return False
        first, column = divmod(segment.start, row)
        last = first + segment.size // width
        if column + width > row or last * row > size:
            return False
        for a, b, c, d in blocks:
            if first < b and a < last and column < d and c < column + width:
                return False
        blocks.append((first, last, column, column + width))
    return True


class Assembler:
    """Puts the HF tensors of a stage together from the buckets of its senders.

    The buckets of each sender must come in order; those of several senders may come in any.
    """

    def __init__(self, *manifests: Manifest) -> None:
        """manifests: of all senders of the stage."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        for manifest in manifests:
            self._shapes.update(manifest.shapes)
        self._open: dict[str, torch.Tensor] = {}
        self._remaining: dict[str, int] = {}

    def buffer(self, bucket: Bucket, device: torch.device) -> torch.Tensor:
        """Returns memory to receive a bucket in.

        If the bucket is one run of a tensor's elements, it is the tensor's own memory.
        """
        segment = bucket.segments[0]
        is_run = len(bucket.segments) == 1 and not segment.width
        if is_run and segment.size < self._size(segment.name):
            return self._place(segment, bucket.torch_dtype, device)
        return torch.empty(bucket.num_elements, dtype=bucket.torch_dtype, device=device)

    def completed(self, bucket: Bucket, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors that `buffer`, filled with `bucket`, completes.

        A tensor that came in one piece is a view of the buffer, which must not be reused while the
        tensor is needed.
        """
        offset = 0
        for segment in bucket.segments:
            data = buffer[offset : offset + segment.size]
            offset += segment.size
            name = segment.name
            shape = self._shapes[name]
            if segment.size == self._size(name):
                yield name, data.view(shape)
                continue
            place = self._place(segment, buffer.dtype, buffer.device)
            if place.data_ptr() != data.data_ptr():
                place.copy_(data.view(place.shape))
            self._remaining[name] -= segment.size
            if self._remaining[name] == 0:
                yield name, self._open.pop(name).view(shape)

    def _place(self, segment: Segment, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns the view of a segment in its tensor, whose memory is made for its first segment."""
        if segment.name not in self._open:
            size = self._size(segment.name)
            self._open[segment.name] = torch.empty(size, dtype=dtype, device=device)
            self._remaining[segment.name] = size
        return segment.view_of(self._open[segment.name], self._shapes[segment.name])

    def _size(self, name: str) -> int:
        return math.prod(self._shapes[name])


def assemblers(manifests: Sequence[Manifest]) -> Mapping[int, Assembler]:
    """Returns an assembler for each stage, by its number. manifests: of all senders."""
    stages = {manifest.stage for manifest in manifests}
    made: dict[int, Assembler] = {}
    for stage in stages:
        made[stage] = Assembler(*(part for part in manifests if part.stage == stage))
    return made

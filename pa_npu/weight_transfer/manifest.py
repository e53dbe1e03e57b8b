"""A pipeline stage's part of a publish: its tensors, cut into buckets, and their reassembly.

The manifest is sent ahead as JSON. It says which segments of which tensors a bucket has, so that
only data crosses the wire.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from pa_npu.weight_transfer.adapters import Base, Count
from pa_npu.weight_transfer.transport import WeightSyncError


class Segment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Elements [start, start + size) of the flattened HF tensor `name`."""

    name: str
    start: Count
    size: Count


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
    """The weights that one stage sends.

    model: sizes that engines compare.
    shapes: of its HF tensors, by name.
    buckets: in the order of sending.
    base: weights that the sent tensors are adapters of; None if they are the weights.
    sent_once: name of a module whose weights never change, so that engines get them with the first
        version in a group and keep them; empty if there is none.
    """

    stage: Count
    model: dict[str, Count]
    shapes: dict[str, tuple[Count, ...]]
    buckets: tuple[Bucket, ...]
    base: Base | None = None
    sent_once: str = ""

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
        """Returns a manifest; raises WeightSyncError unless its segments cover each tensor once."""
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
        covered: dict[str, list[tuple[int, int]]] = {name: [] for name in self.shapes}
        for bucket in self.buckets:
            if not all(segment.size for segment in bucket.segments) or not bucket.segments:
                raise WeightSyncError(
                    f"weight manifest of stage {self.stage}: a bucket or a segment of one is "
                    "empty; trainer and engine must run the same pa_npu"
                )
            if not isinstance(getattr(torch, bucket.dtype, None), torch.dtype):
                raise WeightSyncError(
                    f"weight manifest of stage {self.stage}: unknown dtype {bucket.dtype!r}; "
                    "update torch in the engine"
                )
            for segment in bucket.segments:
                if self.is_sent_once(segment.name) != self._is_once(bucket):
                    raise WeightSyncError(
                        f"weight manifest of stage {self.stage}: a bucket has {segment.name} beside "
                        f"{bucket.segments[0].name}, of which one is sent once; trainer and engine "
                        "must run the same pa_npu"
                    )
                segment_range = (segment.start, segment.start + segment.size)
                covered.setdefault(segment.name, []).append(segment_range)
        for name, ranges in covered.items():
            end = 0
            for start, stop in sorted(ranges):
                if start != end:
                    break
                end = stop
            if name not in self.shapes or end != math.prod(self.shapes[name]):
                raise WeightSyncError(
                    f"weight manifest of stage {self.stage}: the segments of {name} do not cover "
                    f"shape {self.shapes.get(name)} exactly once"
                )


class Assembler:
    """Puts a stage's HF tensors together from its buckets, which must come in order."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._open: dict[str, torch.Tensor] = {}
        self._remaining: dict[str, int] = {}

    def buffer(self, bucket: Bucket, device: torch.device) -> torch.Tensor:
        """Returns memory to receive a bucket in.

        If the bucket is one piece of a tensor, it is the tensor's own memory.
        """
        segment = bucket.segments[0]
        if len(bucket.segments) == 1 and segment.size < self._size(segment.name):
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
            shape = self._manifest.shapes[name]
            if segment.size == self._size(name):
                yield name, data.view(shape)
                continue
            place = self._place(segment, buffer.dtype, buffer.device)
            if place.data_ptr() != data.data_ptr():
                place.copy_(data)
            self._remaining[name] -= segment.size
            if self._remaining[name] == 0:
                yield name, self._open.pop(name).view(shape)

    def _place(self, segment: Segment, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns the view of a segment in its tensor, whose memory is made for its first segment."""
        if segment.name not in self._open:
            size = self._size(segment.name)
            self._open[segment.name] = torch.empty(size, dtype=dtype, device=device)
            self._remaining[segment.name] = size
        return self._open[segment.name][segment.start : segment.start + segment.size]

    def _size(self, name: str) -> int:
        return math.prod(self._manifest.shapes[name])

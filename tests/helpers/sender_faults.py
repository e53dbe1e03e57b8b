"""Faults of one of several ranks that send weights: the last one, from version 1 on. What ranks
announce is wrong from the beginning.

tests.helpers.fault_in_run puts them into a whole run. Buckets are small there, so that each sender
has several.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from pa_npu.backends.buckets import Region
from pa_npu.weight_transfer.manifest import Bucket, Manifest, Segment, row_size

BUCKET_BYTES = 8192
PUBLISH_TIMEOUT_S = 6.0
"""publish.timeout_s of a run whose sender hangs."""

OLD = "one sender sends its old weights"
SHIFTED = "one sender sends a shard shifted by a row"
TURNED = "one sender sends a shard with its last row first"
REPEATED = "one sender sends a bucket in place of another"
EXCHANGED_RANKS = "one sender announces the place of another's shard, and the other its own"
EXCHANGED_TENSORS = "one sender announces two of its tensors under each other's names"
DOUBLED = "one sender announces the place of another's shard"
ANNOUNCED = (EXCHANGED_RANKS, EXCHANGED_TENSORS, DOUBLED)
"""They end a run before its first iteration."""
DIES = "one sender dies in the middle"
HANGS = "one sender hangs in the middle"
STUCK_ONCE = "one sender hangs in the middle, once"

_OTHER_VALUES = (
    r"I5: as weight version 1 the trainers sent other values than they train, or these in other "
    r"places, in \d+ of \d+ tensors \(model\.\S+"
)
_AT_FIRST = _OTHER_VALUES.replace("version 1", "version 0")
FAULTS = {
    OLD: r"I5: stage \d sent, as weight version 1, bit for bit what it sent as the version before|"
    rf"{_OTHER_VALUES}.* still those of version 0",
    SHIFTED: _OTHER_VALUES,
    TURNED: _OTHER_VALUES,
    REPEATED: _OTHER_VALUES,
    EXCHANGED_RANKS: _AT_FIRST,
    EXCHANGED_TENSORS: _AT_FIRST[: _AT_FIRST.index(r"\d+ of")]
    + r"2 of \d+ tensors \(model\.layers\.0\.\S+, model\.layers\.1\.\S+\)",
    DOUBLED: r"I5: the trainers announce other weights than they have: .* the segments of "
    r"model\.\S+ do not cover shape",
    DIES: r"failed: trainer-1 ended: killed by SIGKILL",  # after the launcher's own restarts
    HANGS: r"weight version 1 could not be published in 4 attempts: .*; nothing is heard of these "
    r"trainer ranks: 1; look",
}
"""Faults that end a run, and what its last lines say."""
HANGS_GATHERING = FAULTS[HANGS].replace("ranks: 1;", "ranks: (0, )?1;")
"""What they say where rank 1 hangs while rank 0 gathers what both have, and sends it."""


def inject(fault: str, weights: type[Any]) -> None:
    """Changes GatheredWeights: what the last of the ranks that have weights announces and sends.

    If one rank sends what all have, another one than that can only stop.
    """
    make = weights.__init__

    def with_small_buckets(
        self: Any, tensors: Any, spec: Any, place: Any, _: int, *rest: Any, **keys: Any
    ) -> None:
        make(self, tensors, spec, place, BUCKET_BYTES, *rest, **keys)
        self._laid_out_by_test = self.manifest
        if self._divides and (fault == EXCHANGED_RANKS or _is_last(self)):
            self.manifest = _announced(fault, self)

    weights.__init__ = with_small_buckets
    send = weights.buckets

    def changed(self: Any, deadline: Any, **keys: Any) -> Iterator[torch.Tensor | None]:
        buckets = _laid_out(self, send(self, deadline, **keys))
        return _with_fault(fault, self, buckets) if _is_last(self) else buckets

    weights.buckets = changed


def _is_last(source: Any) -> bool:
    """Returns whether this rank is the last of several."""
    place = source._place
    return bool(place.rank == place.mesh.size - 1 > 0)


def _announced(fault: str, source: Any) -> Manifest:
    """Returns what a rank says that it sends."""
    manifest: Manifest = source.manifest
    if fault == DOUBLED:
        return _with_segments(manifest, lambda segment: {"start": 0})
    if fault == EXCHANGED_TENSORS:
        pair = [name for name in manifest.shapes if name.endswith("down_proj.weight")][:2]
        names = dict(zip(pair, reversed(pair), strict=True))
        return _with_segments(
            manifest, lambda segment: {"name": names.get(segment.name, segment.name)}
        )
    if fault == EXCHANGED_RANKS:
        moved = {name: _to_the_other(regions) for name, regions in source.regions().items()}
        own = source._place.rank

        def elsewhere(segment: Segment) -> dict[str, Any]:
            by = moved[segment.name]
            return {"start": segment.start + (by if own == 0 else -by)}

        return _with_segments(manifest, elsewhere)
    return manifest


def _to_the_other(regions: Sequence[Region]) -> int:
    """Returns how far the second rank's block of a tensor is from the first rank's; 0 unless it is
    cut into two of one size.
    """
    if len(regions) != 2 or regions[0].size != regions[1].size:
        return 0
    return regions[1].start - regions[0].start


def _with_segments(manifest: Manifest, change: Callable[[Segment], dict[str, Any]]) -> Manifest:
    buckets = []
    for bucket in manifest.buckets:
        segments = [
            msgspec.structs.replace(segment, **change(segment)) for segment in bucket.segments
        ]
        buckets.append(msgspec.structs.replace(bucket, segments=tuple(segments)))
    return msgspec.structs.replace(manifest, buckets=tuple(buckets))


def _laid_out(source: Any, honest: Iterator[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
    """Yields the buckets as they would be without what is announced of them."""
    announced = source.manifest
    while True:
        source.manifest = source._laid_out_by_test
        try:
            bucket = next(honest)
        except StopIteration:
            return
        finally:
            source.manifest = announced
        yield bucket


def _with_fault(
    fault: str, source: Any, honest: Iterator[torch.Tensor | None]
) -> Iterator[torch.Tensor | None]:
    """Yields a publish's buckets: honest ones of version 0, which it keeps, and then others.

    Of a rank that sends nothing they are None.
    """
    kept = vars(source).setdefault("_kept_by_test", [])
    is_first = not kept
    before: torch.Tensor | None = None
    for number, bucket in enumerate(honest):
        if not is_first and number == 1:
            _stop(fault, source)
        if bucket is None:
            kept.append(None)
            yield None
            continue
        sent = bucket
        if is_first:
            kept.append(bucket.clone())
        elif fault == OLD:
            sent = kept[number]
        elif fault in (SHIFTED, TURNED):
            sent = _moved(fault, source.manifest, source.manifest.buckets[number], bucket)
        elif fault == REPEATED and before is not None:
            sent = before.repeat(-(-len(bucket) // len(before)))[: len(bucket)]
        before = bucket.clone()
        yield sent


def _stop(fault: str, source: Any) -> None:
    if fault == DIES:
        os.kill(os.getpid(), signal.SIGKILL)
    has_hung = vars(source).get("_hung_by_test", False)
    source._hung_by_test = True
    if fault == HANGS:
        time.sleep(3600)
    if fault == STUCK_ONCE and not has_hung:
        time.sleep(2.5 * PUBLISH_TIMEOUT_S)


def _moved(fault: str, manifest: Manifest, bucket: Bucket, buffer: torch.Tensor) -> torch.Tensor:
    """Returns the bucket with each row of its segments one row further on, or the last one first."""
    moved = buffer.clone()
    sizes = [segment.size for segment in bucket.segments]
    for segment, flat in zip(bucket.segments, moved.split(sizes), strict=True):
        rows = flat.view(-1, segment.width or row_size(manifest.shapes[segment.name]))
        rows.copy_(rows.roll(1, 0) if fault == SHIFTED else rows.flip(0))
    return moved

"""Faults of one of several ranks that send weights: the last one, from version 1 on.

tests.helpers.fault_in_run puts them into a whole run. Buckets are small there, so that each sender
has several.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from pa_npu.weight_transfer.manifest import Bucket, Manifest, row_size

BUCKET_BYTES = 8192
PUBLISH_TIMEOUT_S = 6.0
"""publish.timeout_s of a run whose sender hangs."""

OLD = "one sender sends its old weights"
SHIFTED = "one sender sends a shard shifted by a row"
REPEATED = "one sender sends a bucket in place of another"
DOUBLED = "one sender announces the place of another's shard"
DIES = "one sender dies in the middle"
HANGS = "one sender hangs in the middle"
STUCK_ONCE = "one sender hangs in the middle, once"

_OTHER_VALUES = r"I5: as weight version 1 the trainers sent other values than they train, .* in"
FAULTS = {
    OLD: r"I5: stage \d sent, as weight version 1, bit for bit what it sent as the version before|"
    rf"{_OTHER_VALUES} .* still those of version 0",
    SHIFTED: _OTHER_VALUES,
    REPEATED: _OTHER_VALUES,
    DOUBLED: r"the segments of \S+ do not cover",
    DIES: r"failed: trainer-1 ended: killed by SIGKILL",  # after the launcher's own restarts
    HANGS: r"weight version 1 could not be published in 4 attempts: .*rank 1 of stage",
}
"""Faults that end a run, and what its last lines say."""


def inject(fault: str, weights: type[Any]) -> None:
    """Changes GatheredWeights: what the last of the senders announces and sends."""
    make = weights.__init__

    def with_small_buckets(
        self: Any, tensors: Any, spec: Any, place: Any, _: int, *rest: Any, **keys: Any
    ) -> None:
        make(self, tensors, spec, place, BUCKET_BYTES, *rest, **keys)
        if fault == DOUBLED and _is_faulty(self):
            self.manifest = _at_the_beginning(self.manifest)

    weights.__init__ = with_small_buckets
    send = weights.buckets

    def changed(self: Any, deadline: Any, **keys: Any) -> Iterator[torch.Tensor | None]:
        buckets = send(self, deadline, **keys)
        return _with_fault(fault, self, buckets) if _is_faulty(self) else buckets

    weights.buckets = changed


def _is_faulty(source: Any) -> bool:
    """Returns whether this rank is the last of several senders."""
    place = source._place
    return bool(source._divides and place.rank == place.mesh.size - 1 > 0)


def _at_the_beginning(manifest: Manifest) -> Manifest:
    """Returns a manifest in which every block stands where the first sender's block does."""
    buckets = []
    for bucket in manifest.buckets:
        segments = tuple(msgspec.structs.replace(segment, start=0) for segment in bucket.segments)
        buckets.append(msgspec.structs.replace(bucket, segments=segments))
    return msgspec.structs.replace(manifest, buckets=tuple(buckets))


def _with_fault(
    fault: str, source: Any, honest: Iterator[torch.Tensor | None]
) -> Iterator[torch.Tensor]:
    """Yields a publish's buckets: honest ones of version 0, which it keeps, and then others."""
    kept = vars(source).setdefault("_kept_by_test", [])
    is_first = not kept
    before: torch.Tensor | None = None
    for number, bucket in enumerate(honest):
        assert bucket is not None
        sent = bucket
        if is_first:
            kept.append(bucket.clone())
        elif fault == OLD:
            sent = kept[number]
        elif fault == SHIFTED:
            sent = _shifted(source.manifest, source.manifest.buckets[number], bucket)
        elif fault == REPEATED and before is not None:
            sent = before.repeat(-(-len(bucket) // len(before)))[: len(bucket)]
        elif number == 1:
            _stop(fault, source)
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
        time.sleep(1.5 * PUBLISH_TIMEOUT_S)


def _shifted(manifest: Manifest, bucket: Bucket, buffer: torch.Tensor) -> torch.Tensor:
    """Returns the bucket with each row of its segments one row further on."""
    shifted = buffer.clone()
    sizes = [segment.size for segment in bucket.segments]
    for segment, flat in zip(bucket.segments, shifted.split(sizes), strict=True):
        rows = flat.view(-1, segment.width or row_size(manifest.shapes[segment.name]))
        rows.copy_(rows.roll(1, 0))
    return shifted

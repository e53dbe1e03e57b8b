"""How large the buckets of a publish should be, and how many seconds it should take, by arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pa_npu.families.spec import ModelSpec

# A publish keeps up to four buckets in the leader's memory: two on the wire, two being gathered over TP. With this share
# of the free memory for each they take a 64th. What is free is asked before the optimizer has made its state.
SHARE_OF_FREE_MEMORY = 1 / 256
SMALLEST_BUCKET_BYTES = 4 * 2**20


def auto_bucket_bytes(free_bytes: int, largest_bytes: int) -> int:
    """publish.bucket_mib=auto on a device with `free_bytes`, where larger ones than `largest_bytes` gain nothing."""
    return min(largest_bytes, max(SMALLEST_BUCKET_BYTES, int(free_bytes * SHARE_OF_FREE_MEMORY)))


@dataclass(frozen=True)
class Link:
    """What carries a publish. Rates in bytes per second, latency in seconds per bucket.

    wire: from a stage's leader to an engine worker, the slowest link on the way; workers pass on what they get.
    gather: between the ranks of a tensor-parallel group.
    """

    wire: float
    gather: float
    latency_s: float = 100e-6


def publish_seconds(weight_bytes: int, bucket_bytes: int, tensor_parallel: int, link: Link) -> float:
    """Seconds in which all stages' weights reach every engine worker.

    Engines read the stages one after another, so that all bytes pass the same wire. The gather of bucket i + 1 runs while
    bucket i is on the wire; only the first one's has nothing to hide behind:

        gather + n * max(gather, wire)      per bucket, with gather = (TP - 1) / TP * bucket / rate, wire = bucket / rate + latency
    """
    buckets = math.ceil(weight_bytes / bucket_bytes)
    bucket = weight_bytes / buckets
    gather = (tensor_parallel - 1) / tensor_parallel * bucket / link.gather
    return gather + buckets * max(gather, bucket / link.wire + link.latency_s)


def weight_bytes(spec: ModelSpec, element_bytes: int = 2) -> int:
    """Bytes of one publish of the whole model; bf16 unless told otherwise. A tied head is not sent."""
    return spec.num_parameters * element_bytes

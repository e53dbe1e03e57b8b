"""How many seconds a publish takes, by arithmetic on bytes and links."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pa_npu.families.spec import ModelSpec


@dataclass(frozen=True)
class Link:
    """The links that carry a publish. Rates in bytes per second, latency in seconds per bucket.

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

"""Sizes of buckets and expected seconds of a publish, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from pa_npu import platform as platforms
from pa_npu.planning.prediction.costs import PublishLink, publish_seconds
from pa_npu.trainer.assemble import SMALLEST_BUCKET_BYTES, auto_bucket_bytes
from tools.bench_publish import MODELS

MIB = 2**20
GIB = 2**30


@pytest.mark.parametrize(
    ("free_bytes", "largest_bytes", "expected_bytes"),
    [
        (8 * GIB, 64 * MIB, 32 * MIB),
        (60 * GIB, 64 * MIB, 64 * MIB),
        (10 * MIB, 64 * MIB, SMALLEST_BUCKET_BYTES),
    ],
)
def test_automatic_buckets_are_a_small_share_of_the_free_memory(
    free_bytes: int, largest_bytes: int, expected_bytes: int
) -> None:
    assert auto_bucket_bytes(free_bytes, largest_bytes) == expected_bytes


def test_free_memory_of_the_cpu_is_less_than_all_of_it() -> None:
    platform = platforms.get("cpu")
    assert 50 * MIB < platform.free_memory_bytes() < platform.total_memory_bytes()


def test_expected_seconds_by_hand() -> None:
    # ten buckets of 1 GB; half of each must come from the TP peer
    fast_gather = PublishLink(wire=2e9, gather=5e9, latency_s=0.01)
    assert publish_seconds(10**10, 10**9, 2, fast_gather) == pytest.approx(0.1 + 10 * 0.51)
    slow_gather = PublishLink(wire=2e9, gather=0.5e9, latency_s=0.0)
    assert publish_seconds(10**10, 10**9, 2, slow_gather) == pytest.approx(1.0 + 10 * 1.0)
    assert publish_seconds(10**10, 10**9, 1, slow_gather) == pytest.approx(5.0)
    # two senders take turns of half the buckets, which all pass the link of each worker
    both = {"senders": 2, "gathers": False}
    assert publish_seconds(10**10, 10**9, 2, slow_gather, **both) == pytest.approx(5.0)
    late = PublishLink(wire=2e9, gather=1e9, latency_s=0.9)
    assert publish_seconds(10**10, 10**9, 2, late, **both) == pytest.approx(5 * (0.5 + 0.9))


def test_benchmarks_models_have_as_many_parameters_as_the_published_ones() -> None:
    """The element counts in the safetensors headers of Qwen2.5-7B and 32B."""
    assert MODELS["7b"].num_parameters == 7_615_616_512
    assert MODELS["32b"].num_parameters == 32_763_876_352

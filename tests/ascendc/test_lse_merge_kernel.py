"""The Ascend C kernel under the CPU model gives the torch oracle's numbers, and breaks no rule of the hardware."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.ascendc.cpu_model.runner import Counters, LseMergeModel
from pa_npu.attention.lse_merge import lse_merge_
from tests.ascendc.cases import Merge, Result, from_ntd, random_merge, random_result, to_ntd

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = ["TND", "NTD"]
UB_BYTES = 192 * 1024
STAT_BYTES = 32
HEADER_WORDS = 16
CORE_WORDS = 4
NUM_CORES_WORD = 5


def merge_on_model(
    model: LseMergeModel, merge: Merge, layout: str, part_layout: str, max_cores: int
) -> tuple[Result, Counters]:
    """The six tensors after the kernel, statistics back in the TND layout, and what the launch did."""
    out, maximum, total, part_out, part_maximum, part_total = merge.clone()
    segments = merge.segments if layout == "NTD" else None
    part_segments = merge.part_segments if part_layout == "NTD" else None
    if segments is not None:
        maximum, total = to_ntd(maximum, segments), to_ntd(total, segments)
    if part_segments is not None:
        part_maximum, part_total = (
            to_ntd(part_maximum, part_segments),
            to_ntd(part_total, part_segments),
        )
    tokens, heads, dim = merge.shape
    table = model.table(
        merge.intervals,
        tokens,
        heads,
        dim,
        out.dtype,
        segments=segments,
        part_segments=part_segments,
        max_cores=max_cores,
    )
    counters = model.merge_((out, maximum, total, part_out, part_maximum, part_total), table)
    if segments is not None:
        maximum, total = from_ntd(maximum, segments), from_ntd(total, segments)
    return (out, maximum, total), counters


def oracle(merge: Merge) -> Result:
    tensors = merge.clone()
    lse_merge_(*tensors, merge.intervals)
    return tensors[:3]


def assert_equal_to_oracle(actual: Result, merge: Merge) -> None:
    """Statistics and fp32 outputs to round-off, 16-bit outputs to one unit in the last place, other
    rows untouched.
    """
    expected = oracle(merge)
    dtype = merge.tensors[0].dtype
    tolerance = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(actual[0], expected[0], rtol=tolerance, atol=1e-6)
    torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=0)
    torch.testing.assert_close(actual[2], expected[2], rtol=4e-7, atol=0)
    outside = torch.ones(merge.shape[0], dtype=torch.bool)
    for start, end in merge.intervals:
        outside[start:end] = False
    for after, before in zip(actual, merge.tensors[:3], strict=True):
        assert torch.equal(after[outside], before[outside]), "rows outside of the intervals changed"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_equals_oracle(
    model: LseMergeModel, dtype: torch.dtype, dim: int, layout: str
) -> None:
    merge = random_merge(tokens=70, heads=3, dim=dim, dtype=dtype, seed=dim, min_rows=25)
    actual, counters = merge_on_model(model, merge, layout, layout, max_cores=5)
    assert_equal_to_oracle(actual, merge)
    assert counters.ub_bytes <= UB_BYTES


@pytest.mark.parametrize(("layout", "part_layout"), [("TND", "NTD"), ("NTD", "TND")])
def test_the_two_sides_may_have_different_layouts(
    model: LseMergeModel, layout: str, part_layout: str
) -> None:
    merge = random_merge(tokens=60, heads=5, dim=32, dtype=torch.bfloat16, seed=3, min_rows=20)
    actual, _ = merge_on_model(model, merge, layout, part_layout, max_cores=4)
    assert_equal_to_oracle(actual, merge)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [1, 40])
def test_one_head_and_more_heads_than_rows(model: LseMergeModel, heads: int, layout: str) -> None:
    merge = random_merge(tokens=24, heads=heads, dim=16, dtype=torch.float32, seed=11, min_rows=10)
    actual, _ = merge_on_model(model, merge, layout, layout, max_cores=7)
    assert_equal_to_oracle(actual, merge)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_result_does_not_depend_on_the_number_of_cores(model: LseMergeModel, layout: str) -> None:
    merge = random_merge(tokens=150, heads=4, dim=48, dtype=torch.bfloat16, seed=5, min_rows=60)
    results = [
        merge_on_model(model, merge, layout, layout, max_cores=cores)[0]
        for cores in (1, 2, 3, 7, 20, 48)
    ]
    assert_equal_to_oracle(results[0], merge)
    for result in results[1:]:
        for actual, first in zip(result, results[0], strict=True):
            assert torch.equal(actual, first)


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dimensions_beyond_one_tile_are_cut_into_columns(
    model: LseMergeModel, dtype: torch.dtype
) -> None:
    merge = random_merge(tokens=9, heads=2, dim=2064, dtype=dtype, seed=1, min_rows=4)
    for layout in LAYOUTS:
        actual, counters = merge_on_model(model, merge, layout, layout, max_cores=2)
        assert_equal_to_oracle(actual, merge)
        assert counters.ub_bytes <= UB_BYTES


@given(
    tokens=st.integers(1, 40),
    heads=st.integers(1, 9),
    dim=st.sampled_from([16, 32, 80]),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    part_layout=st.sampled_from(LAYOUTS),
    cores=st.integers(1, 12),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_random_merges(
    model: LseMergeModel,
    tokens: int,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    layout: str,
    part_layout: str,
    cores: int,
    seed: int,
) -> None:
    merge = random_merge(tokens, heads, dim, dtype, seed)
    actual, _ = merge_on_model(model, merge, layout, part_layout, cores)
    assert_equal_to_oracle(actual, merge)


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_sides(model: LseMergeModel, dtype: torch.dtype, lowest: float) -> None:
    """Rows 0-4: running side empty; 5-9: partial side; 10-14: both; 15-19: none."""
    merge = random_merge(tokens=20, heads=3, dim=32, dtype=dtype)
    merge = Merge((*merge.tensors[:3], *random_result(20, 3, 32, dtype)), ((0, 20),), (20,), (20,))
    out, maximum, total, part_out, part_maximum, part_total = merge.tensors
    maximum[0:5], total[0:5] = lowest, 0
    part_maximum[5:10], part_total[5:10] = lowest, 0
    maximum[10:15], total[10:15], part_maximum[10:15], part_total[10:15] = lowest, 0, lowest, 0
    (merged, merged_max, merged_sum), _ = merge_on_model(model, merge, "TND", "TND", max_cores=3)
    assert_equal_to_oracle((merged, merged_max, merged_sum), merge)
    assert torch.equal(merged[0:5], part_out[0:5]) and torch.equal(
        merged_max[0:5], part_maximum[0:5]
    )
    assert torch.equal(merged[5:10], out[5:10]) and torch.equal(merged_sum[5:10], total[5:10])
    assert torch.equal(merged[10:15], torch.zeros_like(out[10:15])) and not merged_sum[10:15].any()


@pytest.mark.parametrize("intervals", [(), ((4, 4),), ((0, 0), (9, 9))])
def test_nothing_to_merge_launches_no_core(
    model: LseMergeModel, intervals: tuple[tuple[int, int], ...]
) -> None:
    table = model.table(intervals, tokens=9, heads=2, dim=16, dtype=torch.float32, max_cores=8)
    assert table[NUM_CORES_WORD] == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_moves_once(model: LseMergeModel, layout: str) -> None:
    """In place without gather or scatter copies: reads both sides once, writes the merged rows
    once.
    """
    dim, element = 128, 2
    merge = random_merge(tokens=100, heads=4, dim=dim, dtype=torch.bfloat16, seed=2, min_rows=40)
    _, counters = merge_on_model(model, merge, layout, layout, max_cores=1)
    row = dim * element + 2 * STAT_BYTES
    assert counters.written_bytes == merge.work_rows * row
    table_bytes = counters.read_bytes - merge.work_rows * 2 * row
    assert 0 < table_bytes < 2048, "the rest is the table"


def test_tile_fills_the_unified_buffer(model: LseMergeModel) -> None:
    merge = random_merge(tokens=120, heads=2, dim=576, dtype=torch.bfloat16, seed=4, min_rows=60)
    _, counters = merge_on_model(model, merge, "TND", "TND", max_cores=1)
    assert 0.85 * UB_BYTES < counters.ub_bytes <= UB_BYTES - 8 * 1024


@given(
    intervals=st.lists(st.integers(0, 5000), min_size=2, max_size=20, unique=True).map(sorted),
    heads=st.integers(1, 64),
    cores=st.integers(1, 48),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_cores_get_equal_shares(
    model: LseMergeModel, intervals: list[int], heads: int, cores: int
) -> None:
    spans = list(pairwise(intervals))[::2]
    table = model.table(
        spans, tokens=5000, heads=heads, dim=64, dtype=torch.bfloat16, max_cores=cores
    )
    used = int(table[NUM_CORES_WORD])
    shares = table[HEADER_WORDS : HEADER_WORDS + CORE_WORDS * used].view(-1, CORE_WORDS)[:, 2]
    total = heads * sum(end - start for start, end in spans)
    assert shares.sum() == total
    assert shares.max() - shares.min() <= 1
    assert used == min(cores, -(-total // 8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 24}, "head dimension must be a multiple of 16, is 24"),
        ({"dim": 0}, "head dimension must be a multiple of 16, is 0"),
        ({"heads": 0}, "heads >= 1"),
        ({"max_cores": 0}, "at least one vector core"),
        ({"intervals": [(4, 6), (5, 8)]}, r"row interval 1 \[5, 8\) must be ascending, disjoint"),
        ({"intervals": [(4, 2)]}, "row interval 0"),
        ({"intervals": [(4, 11)]}, "within the 10 rows"),
        ({"segments": [4, 5]}, "segments add up to 9 rows, the statistics have 10"),
        ({"segments": [11, -1]}, r"segments\[1\] is -1"),
        ({"part_segments": [3]}, "part_segments add up to 3 rows, the statistics have 5"),
        ({"tokens": 1 << 31, "heads": 64}, "exceeds 32 bits"),
        ({"heads": 1 << 12, "dim": 1 << 20}, "exceeds 32 bits"),
    ],
)
def test_invalid_merge_is_refused_by_the_host(
    model: LseMergeModel, change: dict[str, object], message: str
) -> None:
    problem: dict[str, object] = {
        "intervals": [(2, 5), (7, 9)],
        "tokens": 10,
        "heads": 2,
        "dim": 32,
        "dtype": torch.float32,
        "max_cores": 4,
    }
    with pytest.raises(ValueError, match=message):
        model.table(**(problem | change))  # type: ignore[arg-type]

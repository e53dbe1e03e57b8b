"""The torch counterpart of lse_merge is exact against dense attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pa_npu.attention.lse_merge import LIBRARY_VARIABLE, available, lse_merge_
from tests.ascendc.cases import WIDTH, Result, random_merge, to_ntd


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, width: int = 1) -> Result:
    """Dense attention of q over all of k, with its statistics."""
    scores = torch.einsum("qhd,khd->qhk", q, k) * q.shape[-1] ** -0.5
    maximum = scores.amax(-1, keepdim=True)
    total = (scores - maximum).exp().sum(-1, keepdim=True)
    out = torch.einsum("qhk,khd->qhd", (scores - maximum).exp() / total, v)
    return out, maximum.repeat(1, 1, width), total.repeat(1, 1, width)


def copy(result: Result) -> Result:
    out, maximum, total = result
    return out.clone(), maximum.clone(), total.clone()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_merging_equals_attention_over_all_keys(dtype: torch.dtype, tolerance: float) -> None:
    """Rows 3-7 and 9-12 see a prefix beside their own keys; the others only their own."""
    q, own_k, own_v = (torch.randn(12, 3, 16, dtype=dtype) for _ in range(3))
    prefix_k, prefix_v = (torch.randn(20, 3, 16, dtype=dtype) for _ in range(2))
    intervals = [(3, 7), (9, 12)]
    rows = torch.cat([torch.arange(*interval) for interval in intervals])

    own_out, own_max, own_sum = attend(q, own_k, own_v)
    out, maximum, total = own_out.clone(), own_max.clone(), own_sum.clone()
    lse_merge_(out, maximum, total, *attend(q[rows], prefix_k, prefix_v), intervals)

    all_k, all_v = torch.cat([prefix_k, own_k]), torch.cat([prefix_v, own_v])
    expected_out, expected_max, expected_sum = attend(q[rows], all_k, all_v)
    torch.testing.assert_close(out[rows], expected_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(maximum[rows], expected_max, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(total[rows], expected_sum, rtol=tolerance, atol=0)
    others = torch.tensor([row for row in range(12) if row not in rows])
    assert torch.equal(out[others], own_out[others]) and torch.equal(total[others], own_sum[others])
    assert (expected_out - own_out[rows]).abs().max() > 0.1, (
        "the prefix must matter for this test to mean anything"
    )


def test_order_of_merging_does_not_matter() -> None:
    q = torch.randn(5, 2, 16, dtype=torch.float64)
    keys = [torch.randn(length, 2, 16, dtype=torch.float64) for length in (3, 9, 1)]
    parts = [attend(q, k, torch.randn_like(k)) for k in keys]
    results = []
    for order in ((0, 1, 2), (2, 0, 1)):
        running = copy(parts[order[0]])
        for index in order[1:]:
            lse_merge_(*running, *parts[index], [(0, 5)])
        results.append(running[0])
    torch.testing.assert_close(results[0], results[1], rtol=1e-14, atol=1e-14)


def test_both_layouts_give_the_same() -> None:
    merge = random_merge(tokens=40, heads=3, dim=8, dtype=torch.float32, seed=7, min_rows=15)
    plain = merge.clone()
    lse_merge_(*plain, merge.intervals)
    out, maximum, total, part_out, part_max, part_sum = merge.clone()
    maximum, total = to_ntd(maximum, merge.segments), to_ntd(total, merge.segments)
    part_max, part_sum = (
        to_ntd(part_max, merge.part_segments),
        to_ntd(part_sum, merge.part_segments),
    )
    lse_merge_(
        out,
        maximum,
        total,
        part_out,
        part_max,
        part_sum,
        merge.intervals,
        merge.segments,
        merge.part_segments,
    )
    assert torch.equal(out, plain[0])
    assert torch.equal(maximum, to_ntd(plain[1], merge.segments))
    assert torch.equal(total, to_ntd(plain[2], merge.segments))


def test_a_side_without_keys_has_no_weight() -> None:
    running = (
        torch.zeros(2, 1, 16),
        torch.full((2, 1, WIDTH), -torch.inf),
        torch.zeros(2, 1, WIDTH),
    )
    part = (torch.randn(2, 1, 16), torch.randn(2, 1, WIDTH), torch.rand(2, 1, WIDTH) + 1)
    nothing = copy(running)
    lse_merge_(*running, *part, [(0, 2)])
    for merged, expected in zip(running, part, strict=True):
        assert torch.equal(merged, expected)
    lse_merge_(*running, *nothing, [(0, 2)])
    for merged, expected in zip(running, part, strict=True):
        assert torch.equal(merged, expected)
    empty = copy(nothing)
    lse_merge_(*empty, *nothing, [(0, 2)])
    assert not empty[0].any() and not empty[2].any()


def test_available_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = tmp_path / "operators.so"
    monkeypatch.setenv(LIBRARY_VARIABLE, str(library))
    status = available()
    assert (status.implementation, status.library) == ("torch", library)
    assert "is not built" in status.reason

    library.write_text("not a library")
    monkeypatch.delattr(torch, "npu", raising=False)
    assert "torch_npu is not imported" in available().reason

    monkeypatch.setattr(torch, "npu", object(), raising=False)
    assert "does not load" in available().reason

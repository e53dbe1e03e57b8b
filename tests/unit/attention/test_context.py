"""Attention of rows on two and three ranks, keys gathered over gloo: that of one rank, and the same to the bit twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pa_npu.attention.context import RankRows
from pa_npu.attention.division import divide
from pa_npu.attention.forms import dense_attention, shared_prompt_attention
from tests.helpers.context_rank import CASES, LAYOUTS, computed_by, tensors
from tests.unit.attention.test_forms import out_and_gradients


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_on_several_ranks_attend_as_on_one_in_every_form_and_recomputed(
    ranks: int, tmp_path: Path
) -> None:
    results = computed_by(ranks, tmp_path / "first")
    for case in CASES:
        layout = LAYOUTS[case[0]]
        q, k, v, grad = tensors(layout)
        grad[layout.total - layout.padding :] = 0.0
        expected = out_and_gradients(
            lambda q, k, v, layout=layout: dense_attention(q, k, v, layout, 0.25), q, k, v, grad
        )
        seen = torch.zeros(layout.total, dtype=torch.bool)
        for of_rank in results:
            own, ours = of_rank[case]
            seen[own] = True
            for x, whole in zip(ours, expected, strict=True):
                error = (x - whole[own]).abs().max() if len(own) else torch.zeros(())
                assert error <= 1e-13 * whole.abs().max().clamp(min=1.0), case
        assert int(seen.sum()) == layout.total - layout.padding
    if ranks == 2:
        again = computed_by(ranks, tmp_path / "second")
        for first, second in zip(results, again, strict=True):
            for case in CASES:
                pairs = zip(first[case][1], second[case][1], strict=True)
                assert all(torch.equal(a, b) for a, b in pairs), f"{case} differs between two runs"


def test_rows_without_a_group_and_wrong_shapes_are_refused() -> None:
    rows = RankRows(divide(LAYOUTS["group"], 2), 1)
    q = torch.zeros(rows.total, 2, 16)
    with pytest.raises(ValueError, match="no process group to gather keys over"):
        shared_prompt_attention(q, q, q, rows)
    with pytest.raises(ValueError, match="the rows of rank 1 of 2"):
        shared_prompt_attention(q[:-1], q, q, rows)

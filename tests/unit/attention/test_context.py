"""Attention of rows on two and three ranks, keys gathered over gloo: that of one rank, and the same to the bit twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pa_npu.attention import context
from pa_npu.attention.context import ContextGroup, RankRows
from pa_npu.attention.division import divide
from pa_npu.attention.forms import dense_attention, shared_prompt_attention
from pa_npu.attention.layout import PrefixLayout
from pa_npu.platform.pieces import gathering_bytes
from tests.helpers.context_rank import CASES, LAYOUTS, computed_by, tensors
from tests.helpers.live_memory import LiveMemory
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


class RankOfEight(ContextGroup):
    """Of ranks that are not there."""

    rank = 0
    size = 8


class Arrived:
    """A collective that copies nothing, as devices' collectives do."""

    def wait(self) -> None:
        pass


def gather_of_one(whole: torch.Tensor, own: torch.Tensor, **_: Any) -> Arrived:
    for part in whole.view(8, *own.shape):
        part.copy_(own)
    return Arrived()


def scatter_of_one(own: torch.Tensor, whole: torch.Tensor, **_: Any) -> Arrived:
    own.copy_(whole[: len(own)])
    return Arrived()


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_no_more_of_the_whole_sequence_is_alive_than_the_planner_counts(
    kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 4,096 rows on eight ranks, by tensors as long as the whole sequence, forward and backward;
    heads of 64, of which four are gathered one by one.
    """
    monkeypatch.setattr(context, "_all_gather", gather_of_one)
    monkeypatch.setattr(context, "_reduce_scatter", scatter_of_one)
    layout = PrefixLayout.from_groups([(256, [256] * 15)])
    rows = RankOfEight(torch.distributed.group.WORLD).rows_of(layout)
    q = torch.randn(rows.total, kv_heads, 64, requires_grad=True)
    k, v = (torch.randn(rows.total, kv_heads, 64, requires_grad=True) for _ in range(2))
    with LiveMemory(least=layout.total * 64 * 4) as memory:
        shared_prompt_attention(q, k, v, rows).sum().backward()
    counted = gathering_bytes(kv_heads, head_dim=64, rows=layout.total, element_bytes=4)
    assert 0.6 * counted < memory.peak <= counted

"""Rows divided among ranks: balanced, complete, and attention of each rank's rows equals dense attention in fp64."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from pa_npu.attention import PrefixLayout
from pa_npu.attention.calls import attend, gradients
from pa_npu.attention.context import RankRows
from pa_npu.attention.division import divide
from pa_npu.attention.forms import dense_attention
from pa_npu.attention.kernels.cpu import CpuFlash
from pa_npu.attention.kernels.portable import Portable
from pa_npu.platform.pieces import pieces_of_heads
from tests.unit.attention.test_forms import LAYOUTS, inputs_for, out_and_gradients

KERNELS = {"cpu-flash": CpuFlash(), "portable": Portable()}


def random_layout(generator: random.Random) -> PrefixLayout:
    """Groups and trees with heavy tails: a few segments are much longer than the others."""
    lengths: list[int] = []
    parents: list[int] = []
    is_tree = generator.random() < 0.5
    for _ in range(generator.choice([1, 1, 1, 2, 4, 8])):
        path = [len(lengths)]
        lengths.append(min(int(generator.lognormvariate(5.5, 1.2)) + 1, 60_000))
        parents.append(-1)
        for _ in range(generator.choice([0, 1, 2, 4, 8, 16])):
            parent = generator.choice(path) if is_tree else path[0]
            path = [*path[: path.index(parent) + 1], len(lengths)]
            lengths.append(min(int(generator.paretovariate(1.1) * 100), 60_000))
            parents.append(parent)
    return PrefixLayout(tuple(lengths), tuple(parents))


@pytest.mark.parametrize("ranks", [2, 4])
def test_work_and_rows_of_the_fullest_rank_are_near_the_mean_over_1000_random_layouts(
    ranks: int,
) -> None:
    generator = random.Random(ranks)
    seen = 0
    while seen < 1000:
        layout = random_layout(generator)
        if layout.total < 256 * ranks:  # a row more or less is a percent of fewer
            continue
        seen += 1
        division = divide(layout, ranks)
        rows = [division.real_rows(rank) for rank in range(ranks)]
        assert max(division.work) <= 1.02 * sum(division.work) / ranks, layout
        assert max(rows) <= 1.05 * layout.total / ranks, layout
        if seen % 20:
            continue
        # counted row by row, not by the division's own formula
        pairs = layout.position_ids() + 1
        for own, rows_of_rank, work in zip(division.rows, rows, division.work, strict=True):
            real = own[own < layout.total]
            assert (len(real), int(pairs[real].sum())) == (rows_of_rank, work), layout
        assert sum(division.work) == int(pairs.sum())


@pytest.mark.parametrize(("ranks", "multiple"), [(1, 1), (2, 1), (3, 4)])
def test_every_row_has_one_rank_and_every_rank_equally_many_rows(ranks: int, multiple: int) -> None:
    for layout in LAYOUTS.values():
        assert_divided(layout, ranks, multiple)


def assert_divided(layout: PrefixLayout, ranks: int, multiple: int) -> None:
    division = divide(layout, ranks, multiple)
    assert division.rows_per_rank % multiple == 0
    assert division.rows.shape == (ranks, division.rows_per_rank)
    assert torch.equal(division.rows.flatten().sort().values, torch.arange(division.layout.total))
    assert division.num_rows == layout.total - layout.padding
    assert (
        division.layout.lengths[: len(layout.lengths) - bool(layout.padding)]
        == (layout.lengths[: len(layout.lengths) - bool(layout.padding)])
    )
    flat = division.rows.flatten()
    assert torch.equal(flat[division.places], torch.arange(len(flat)))
    for rank in range(ranks):
        rows = RankRows(division, rank)
        real = rows.total - rows.padding
        own = division.rows[rank]
        assert bool((own[:real] < division.num_rows).all()), "padding comes last"
        assert bool((own[real:] >= division.num_rows).all())
        assert torch.equal(rows.position_ids()[:real], layout.position_ids()[own[:real]])
        places = rows.places()
        assert torch.equal(places[own], torch.arange(rows.total))
        assert int((places >= 0).sum()) == rows.total


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    ("form", "kernel"),
    [("merge", "cpu-flash"), ("merge per depth", "portable"), ("gather", "cpu-flash")],
)
def test_attention_of_the_ranks_rows_is_dense_attention(name: str, form: str, kernel: str) -> None:
    layout = LAYOUTS[name]
    division = divide(layout, 3, 2)
    whole = division.layout
    q, k, v, grad = inputs_for(whole, 4, 2, torch.float64)
    grad[division.num_rows :] = 0.0
    scale = 0.3
    expected = out_and_gradients(
        lambda q, k, v: dense_attention(q, k, v, whole, scale), q, k, v, grad
    )
    out = torch.zeros_like(q)
    dq = torch.zeros_like(q)
    dk = torch.zeros_like(k)
    dv = torch.zeros_like(v)
    for rank in range(3):
        own = division.rows[rank]
        plan = RankRows(division, rank).plan(
            gathers=form == "gather", per_depth=form == "merge per depth"
        )
        result = attend(q[own], k, v, plan, scale, KERNELS[kernel])
        out[own] = result.out
        parts = gradients(
            grad[own], q[own], k, v, result, plan, scale, KERNELS[kernel], wide_sums=True
        )
        dq[own] = parts[0]
        dk += parts[1]
        dv += parts[2]
    for ours, theirs in zip((out, dq, dk, dv), expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-13 * theirs.abs().max().clamp(min=1.0)


def test_a_rank_that_lacks_the_earlier_rows_of_its_segment_would_show() -> None:
    """The control of the test above: without the cross calls to earlier rows outputs are wrong."""
    layout = PrefixLayout.from_sequences([64])
    division = divide(layout, 2)
    q, k, v, _ = inputs_for(layout, 2, 2, torch.float64)
    expected = dense_attention(q, k, v, layout, 0.3)
    own = division.rows[1]
    plan = RankRows(division, 1).plan(gathers=False, per_depth=False)
    complete = attend(q[own], k, v, plan, 0.3, CpuFlash()).out
    blind = attend(q[own], k, v, replace(plan, crosses=()), 0.3, CpuFlash()).out
    assert (complete - expected[own]).abs().max() < 1e-13
    assert (blind - expected[own]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("kv_heads", "mib", "sizes"),
    [(8, 0, [8]), (8, 2, [4, 4]), (8, 64, [2, 2, 2, 2]), (3, 64, [1, 1, 1]), (1, 64, [1])],
)
def test_heads_are_gathered_in_pieces_that_are_worth_a_collective(
    kv_heads: int, mib: int, sizes: list[int]
) -> None:
    pieces = pieces_of_heads(kv_heads, mib * 2**20)
    assert [piece.stop - piece.start for piece in pieces] == sizes
    assert pieces[0].start == 0 and pieces[-1].stop == kv_heads

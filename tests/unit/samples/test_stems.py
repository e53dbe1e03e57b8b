"""Stems: which rows a group's pieces leave to them, when they are worth a pass, and what plan and balance make of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pa_npu.attention.stems import PathRows
from pa_npu.dispatch.assignment import GroupWork
from pa_npu.planning.amounts import work
from pa_npu.planning.plan_text import derived_lines
from pa_npu.samples.microbatch import Microbatch, cut, pack
from pa_npu.samples.stems import Branch, Stem, with_stems
from tests.helpers.stems import depth_first, long_group
from tests.unit.launcher.test_placement import QWEN_7B
from tests.unit.samples.test_packing import iterator, make_config


def assert_same(one: Microbatch, other: Microbatch) -> None:
    assert one.layout == other.layout
    for name in ("tokens", "rows", "targets", "ages", "response_index"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    for name, column in other.columns.items():
        assert torch.equal(one.columns[name], column), name
    assert one.packed.keys() == other.packed.keys()
    assert one.sources == other.sources
    assert one.num_computed_tokens == other.num_computed_tokens


@given(
    prompt=st.integers(2, 30),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    responses=st.integers(1, 3),
    multiple=st.sampled_from([1, 4]),
    stem_tokens=st.none() | st.integers(1, 12),
)
@settings(max_examples=60, deadline=None)
def test_a_piece_with_its_stems_is_the_piece_with_its_prompt(
    prompt: int, lengths: list[int], responses: int, multiple: int, stem_tokens: int | None
) -> None:
    """Whole again, padded alike; stems hold the prompt but for the row before the responses."""
    group = long_group(prompt, lengths)
    parts = depth_first(group, responses, multiple=multiple, stem_tokens=stem_tokens)
    stems = [part for part in parts if part.is_stem]
    pieces = [part for part in parts if not part.is_stem]
    rows = (prompt - 1) // multiple * multiple
    if len(pieces) == 1 or not rows:
        assert not stems
    else:
        assert sum(stem.layout.total for stem in stems) == rows
        tokens = torch.cat([stem.tokens for stem in stems])
        assert torch.equal(tokens, pieces[0].whole().tokens[:rows])
        assert [piece.ends_stems for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        computed = sum(piece.num_computed_tokens for piece in pieces)
        assert computed == rows + len(pieces) * (prompt - rows) + sum(lengths)
    for stem in stems:
        largest = max(multiple, (stem_tokens or rows) // multiple * multiple)
        assert stem.is_filler and stem.layout.total <= largest
    positions = torch.cat([part.layout.position_ids() for part in [*stems, pieces[0]]])
    assert torch.equal(positions, pieces[0].whole().whole_layout.position_ids())
    for piece, samples in zip(pieces, cut(group, responses), strict=True):
        assert_same(piece.whole(), pack([samples], True, multiple))


def test_a_stem_ends_before_the_first_row_that_predicts_a_target() -> None:
    """Also where a sample trains tokens of what is shared, or begins unlike the others."""
    group = long_group(20, [3, 3, 3])
    component = group.component.copy()
    component[group.offsets()[1] + 12] = 1
    inside = replace(group, component=component)
    stem, *_ = with_stems(cut(inside, 1), inside, 1, None, min_saved_rows=1)
    assert isinstance(stem, Stem) and (stem.start, stem.end) == (0, 11)

    tokens = group.tokens.copy()
    tokens[group.offsets()[2] + 7] += 1
    unlike = replace(group, tokens=tokens)
    stem, *_ = with_stems(cut(unlike, 1), unlike, 1, None, min_saved_rows=1)
    assert isinstance(stem, Stem) and (stem.start, stem.end) == (0, 7)


def test_a_stem_is_computed_only_where_it_saves_as_much_as_a_pass_costs() -> None:
    group = long_group(343, [2, 2, 2, 2])
    assert isinstance(with_stems(cut(group, 1), group, 1, None)[0], Stem), "3 x 342 rows"
    short = long_group(342, [2, 2, 2, 2])
    parts = with_stems(cut(short, 1), short, 1, None)
    assert [part.num_samples for part in parts if not isinstance(part, Stem | Branch)] == [1] * 4


@pytest.mark.parametrize("depth_first", [True, False])
def test_an_iterator_gives_stems_in_turn_and_whole_microbatches_to_measure_by(
    depth_first: bool,
) -> None:
    """The first ones are handed out whole and stay in their place; groups are packed as ever where
    they are not cut.
    """
    microbatches, _ = iterator(
        [[5, 5, 5], [2, 2, 2]],
        order="prompt",
        responses_per_microbatch=2,
        depth_first=depth_first,
        min_saved_rows=1,
    )
    first = microbatches.first(2)
    assert not any(isinstance(microbatch.layout, PathRows) for microbatch in first)
    assert [microbatch.num_samples for microbatch in first] == [2, 1]
    kinds = []
    for microbatch in microbatches:
        kinds.append("stem" if microbatch.is_stem else len(microbatch.sources))
        if len(kinds) == 3 and depth_first:
            assert not microbatches.is_last
    assert kinds == (["stem", 2, 1] * 2 if depth_first else [2, 1] * 2)
    assert microbatches.is_last
    microbatches.finish()


def test_plan_and_balance_count_a_prompt_once_and_say_why_where_it_is_not() -> None:
    sections: dict[str, Any] = {"microbatch": {"responses": 2}, "trainer": {"devices": 2}}
    config = make_config(**sections)
    each = make_config(**{**sections, "microbatch": {"responses": 2, "depth_first": False}})
    pieces = config.rollout.responses_per_prompt // 2
    groups = config.schedule.prompts_per_iteration
    prompt = config.data.max_prompt_tokens
    saved = work(each).computed_tokens - work(config).computed_tokens
    assert saved == groups * (pieces - 1) * (prompt - 1)
    assert work(config).stem_tokens == prompt - 1
    assert work(each).stem_tokens == 0

    def said(chosen: Any) -> str:
        return next(x for x in derived_lines(chosen, None, None, False) if "microbatches" in x)

    assert f"; a prompt is computed once for its {pieces}, depth first" in said(config)
    assert f"; a prompt is computed {pieces} times (microbatch.depth_first=false)" in said(each)
    piped = {**sections, "trainer": {"devices": 2, "pipeline_parallel": 2}}
    assert f"{pieces} times (trainer.pipeline_parallel=2)" in said(make_config(**piped))

    lengths = [64] * config.rollout.responses_per_prompt
    once = GroupWork(QWEN_7B, config)(prompt, lengths)
    uncut = GroupWork(QWEN_7B, make_config(trainer={"devices": 2}))(prompt, lengths)
    assert once == pytest.approx(uncut)
    assert GroupWork(QWEN_7B, each)(prompt, lengths) > 1.5 * once
    assert np.isfinite(once)

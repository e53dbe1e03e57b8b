"""Each target is predicted from a row that sees exactly its prompt and the tokens of its own response before it.

So too when pieces of several groups share a microbatch.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import Microbatch, build_microbatches, cut, num_packed_tokens, pack
from tools.groups import group_of_responses
from tools.groups import separate as separate_layout


def make_group(prompt: int, lengths: tuple[int, ...], index: int = 7) -> Group:
    """All tokens of the group differ, so that a token says where it comes from; so do those of
    groups 0 to 9.
    """
    total = sum(lengths)
    return group_of_responses(
        iteration=3,
        version=3,
        index=index,
        prompt_id=0,
        prompt_tokens=np.arange(1, prompt + 1, dtype=np.int32) + 100 * index,
        response_tokens=np.arange(1000, 1000 + total, dtype=np.int32) + 1000 * index,
        response_lengths=np.array(lengths, dtype=np.int32),
        logprobs=-np.arange(total, dtype=np.float32),
        rewards=np.zeros(len(lengths), np.float32),
        advantages=np.arange(len(lengths), dtype=np.float32) + 0.5,
        finished=np.ones(len(lengths), np.uint8),
    )


def context(microbatch: Microbatch, row: int) -> list[int]:
    """The tokens that a row sees, in the order of their positions: what its prediction is
    conditioned on.
    """
    visible = microbatch.layout.dense_mask()[row].nonzero().flatten()
    order = microbatch.layout.position_ids()[visible].argsort()
    return microbatch.tokens[visible[order]].tolist()


Trained = tuple[list[int], int, float, float, int]


def trained(microbatch: Microbatch) -> list[Trained]:
    """Per target: its context, itself, engine log-prob, advantage, response number."""
    return [
        (
            context(microbatch, int(microbatch.rows[number])),
            int(microbatch.targets[number]),
            float(microbatch.engine_logprobs[number]),
            float(microbatch.advantages[number]),
            int(microbatch.response_index[number]),
        )
        for number in range(len(microbatch.rows))
    ]


def expected(pieces: list[Group]) -> list[Trained]:
    """The same from the groups, response by response, token by token."""
    actual = []
    number = 0
    for piece in pieces:
        for start, end in itertools.pairwise(piece.offsets().tolist()):
            for row in range(start, end):
                if piece.trained[row]:
                    before = piece.tokens[start:row].tolist()
                    actual.append(
                        (
                            before,
                            piece.tokens[row],
                            piece.logprobs[row],
                            piece.advantages[row],
                            number,
                        )
                    )
            number += 1
    return actual


@given(
    prompt=st.integers(1, 6),
    lengths=st.lists(st.integers(1, 5), min_size=2, max_size=6).map(tuple),
    parts=st.sampled_from([1, 2, 3]),
    shared=st.booleans(),
    pad=st.sampled_from([1, 2, 8]),
)
@settings(max_examples=120, deadline=None)
def test_targets_are_predicted_from_their_own_context(
    prompt: int, lengths: tuple[int, ...], parts: int, shared: bool, pad: int
) -> None:
    lengths = lengths[: len(lengths) // parts * parts] or (1,) * parts
    group = make_group(prompt, lengths)
    pieces = cut(group, len(lengths) // parts)
    microbatches = build_microbatches(group, len(lengths) // parts, shared, pad)
    assert len(microbatches) == parts
    for microbatch, piece in zip(microbatches, pieces, strict=True):
        assert (
            microbatch.layout.total == len(microbatch.tokens) and microbatch.layout.total % pad == 0
        )
        assert trained(microbatch) == expected([piece])


@given(
    groups=st.lists(
        st.tuples(
            st.integers(1, 4), st.lists(st.integers(1, 4), min_size=4, max_size=4).map(tuple)
        ),
        min_size=1,
        max_size=3,
    ),
    first=st.integers(0, 1),
    shared=st.booleans(),
    pad=st.sampled_from([1, 8]),
)
@settings(max_examples=60, deadline=None)
def test_packed_pieces_see_nothing_of_each_other(
    groups: list[tuple[int, tuple[int, ...]]], first: int, shared: bool, pad: int
) -> None:
    """The pack begins with the first or the second half of its first group, as it does after a full
    microbatch.
    """
    pieces = [
        piece
        for index, (prompt, lengths) in enumerate(groups)
        for piece in cut(make_group(prompt, lengths, index), 2)
    ]
    pieces = pieces[first:]
    microbatch = pack(pieces, shared, pad)
    assert trained(microbatch) == expected(pieces)
    assert microbatch.layout.total == len(microbatch.tokens) and microbatch.layout.total % pad == 0
    assert microbatch.layout.padding < pad, "padding belongs to the end of the pack only"
    assert microbatch.num_computed_tokens == sum(
        num_packed_tokens(piece, shared) for piece in pieces
    )
    assert sorted(set(microbatch.response_index.tolist())) == list(range(microbatch.num_samples))
    alone = [pack([piece], shared, 1) for piece in pieces]
    for count in ("num_samples", "num_computed_tokens"):
        assert getattr(microbatch, count) == sum(getattr(part, count) for part in alone), count
    assert microbatch.group_indices == tuple(range(len(groups)))


def test_counts_tell_samples_from_computed_tokens() -> None:
    group = make_group(5, (2, 3, 4, 1))
    (shared,) = build_microbatches(group, 4, True, 8)
    (separate,) = build_microbatches(group, 4, False, 8)
    for microbatch in (shared, separate):
        assert (microbatch.num_samples, separate_layout(microbatch.layout).total) == (4, 30)
        assert microbatch.response_lengths == (2, 3, 4, 1)
    assert (shared.num_computed_tokens, shared.layout.total) == (15, 16)
    assert (separate.num_computed_tokens, separate.layout.total) == (30, 32)
    first, second = build_microbatches(group, 2, True, 1)
    assert (first.num_computed_tokens, second.num_computed_tokens) == (10, 10)
    assert (first.response_lengths, second.response_lengths) == ((2, 3), (4, 1))
    assert (second.iteration, second.versions, second.group_indices) == (3, (3, 3), (7,))


def test_dtypes_are_those_of_the_model_and_the_loss() -> None:
    (microbatch,) = build_microbatches(make_group(3, (2, 2)), 2, True, 1)
    moved = microbatch.to("meta")
    for name in ("tokens", "rows", "targets", "response_index"):
        assert getattr(microbatch, name).dtype == torch.int64
        assert getattr(moved, name).device.type == "meta"
    for name in ("engine_logprobs", "advantages"):
        assert getattr(microbatch, name).dtype == torch.float32
    assert moved.layout is microbatch.layout


def test_microbatches_do_not_alias_the_group() -> None:
    group = make_group(3, (2, 2))
    (microbatch,) = build_microbatches(group, 2, True, 1)
    group.logprobs[:] = 9.0
    assert microbatch.engine_logprobs.tolist() == [0.0, -1.0, -2.0, -3.0]


@pytest.mark.parametrize(("responses", "sizes"), [(3, [3, 3, 1]), (7, [7]), (8, [7]), (1, [1] * 7)])
def test_a_group_of_any_size_is_cut_into_pieces_of_at_most_so_many_samples(
    responses: int, sizes: list[int]
) -> None:
    microbatches = build_microbatches(make_group(2, (1, 2, 1, 3, 1, 1, 2)), responses, True, 1)
    assert [microbatch.num_samples for microbatch in microbatches] == sizes
    assert [place for microbatch in microbatches for place in microbatch.sources] == [
        (7, number) for number in range(7)
    ]


def test_the_cut_does_not_change_what_is_trained() -> None:
    group = replace(make_group(4, (3, 1, 2, 2, 1, 3)), rewards=np.zeros(6, np.float32))
    whole = [
        torch.cat([getattr(m, name) for m in build_microbatches(group, size, shared, 1)])
        for name in ("targets", "engine_logprobs", "advantages")
        for size, shared in ((6, True), (3, True), (2, False), (1, True))
    ]
    for start in range(0, len(whole), 4):
        assert all(torch.equal(whole[start], another) for another in whole[start + 1 : start + 4])

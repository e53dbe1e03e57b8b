"""Each target is predicted from a row that sees exactly its prompt and the tokens of its own response before it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pa_npu.buffer.group import Group
from pa_npu.buffer.microbatch import Microbatch, build_microbatches


def make_group(prompt: int, lengths: tuple[int, ...]) -> Group:
    """All tokens of the group differ, so that a token says where it comes from."""
    total = sum(lengths)
    return Group(
        iteration=3,
        version=3,
        index=7,
        prompt_id=0,
        prompt_tokens=np.arange(1, prompt + 1, dtype=np.int32),
        response_tokens=np.arange(1000, 1000 + total, dtype=np.int32),
        response_lengths=np.array(lengths, dtype=np.int32),
        logprobs=-np.arange(total, dtype=np.float32),
        rewards=np.zeros(len(lengths), np.float32),
        advantages=np.arange(len(lengths), dtype=np.float32) + 0.5,
        finished=np.ones(len(lengths), np.uint8),
    )


def context(microbatch: Microbatch, row: int) -> list[int]:
    """The tokens that a row sees, in the order of their positions: what its prediction is conditioned on."""
    visible = microbatch.layout.dense_mask()[row].nonzero().flatten()
    order = microbatch.layout.position_ids()[visible].argsort()
    return microbatch.tokens[visible[order]].tolist()


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
    microbatches = build_microbatches(group, len(lengths) // parts, shared, pad)
    assert len(microbatches) == parts
    found = []
    for microbatch in microbatches:
        assert microbatch.layout.total == len(microbatch.tokens) and microbatch.layout.total % pad == 0
        for number in range(len(microbatch.rows)):
            found.append(
                (
                    context(microbatch, int(microbatch.rows[number])),
                    int(microbatch.targets[number]),
                    float(microbatch.engine_logprobs[number]),
                    float(microbatch.advantages[number]),
                    int(microbatch.response_index[number]),
                )
            )
    expected = []
    offset = 0
    for response, length in enumerate(lengths):
        tokens = group.response_tokens[offset : offset + length].tolist()
        for position in range(length):
            expected.append(
                (
                    group.prompt_tokens.tolist() + tokens[:position],
                    tokens[position],
                    float(-(offset + position)),
                    response + 0.5,
                    response,
                )
            )
        offset += length
    assert found == expected


def test_counts_tell_samples_from_computed_tokens() -> None:
    group = make_group(5, (2, 3, 4, 1))
    (shared,) = build_microbatches(group, 4, True, 8)
    (separate,) = build_microbatches(group, 4, False, 8)
    for microbatch in (shared, separate):
        assert (microbatch.num_sequences, microbatch.num_prompt_tokens, microbatch.num_response_tokens) == (4, 20, 10)
        assert microbatch.response_lengths == (2, 3, 4, 1)
    assert (shared.num_computed_tokens, shared.layout.total) == (15, 16)
    assert (separate.num_computed_tokens, separate.layout.total) == (30, 32)
    first, second = build_microbatches(group, 2, True, 1)
    assert (first.num_computed_tokens, second.num_computed_tokens) == (10, 10)
    assert (first.response_lengths, second.response_lengths) == ((2, 3), (4, 1))
    assert (second.iteration, second.version, second.group_index) == (3, 3, 7)


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


@pytest.mark.parametrize("responses", [0, 3, 8])
def test_a_size_that_does_not_divide_the_group_is_refused(responses: int) -> None:
    with pytest.raises(ValueError, match=rf"4 responses cannot be cut into microbatches of {responses}; .*must divide"):
        build_microbatches(make_group(2, (1, 1, 1, 1)), responses, True, 1)


def test_the_cut_does_not_change_what_is_trained() -> None:
    group = replace(make_group(4, (3, 1, 2, 2, 1, 3)), rewards=np.zeros(6, np.float32))
    whole = [
        torch.cat([getattr(m, name) for m in build_microbatches(group, size, shared, 1)])
        for name in ("targets", "engine_logprobs", "advantages", "response_index")
        for size, shared in ((6, True), (3, True), (2, False), (1, True))
    ]
    for start in range(0, len(whole), 4):
        assert all(torch.equal(whole[start], other) for other in whole[start + 1 : start + 4])

"""microbatch.tokens: groups are cut by their lengths, and what they cost is counted as they are cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pa_npu.algorithm.rules import broken_rules
from pa_npu.config.pieces import samples_of_pieces
from pa_npu.dispatch.assignment import GroupWork
from pa_npu.planning.amounts import work
from tests.unit.launcher.test_placement import QWEN_7B
from tests.unit.samples.test_packing import PROMPT, content, iterator, make_config

LENGTHS = st.lists(st.lists(st.integers(1, 40), min_size=4, max_size=4), min_size=1, max_size=5)


@given(groups=LENGTHS, tokens=st.integers(1, 90), pad=st.sampled_from([1, 4]), shared=st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_microbatch_takes_the_next_responses_as_long_as_they_fit(
    groups: list[list[int]], tokens: int, pad: int, shared: bool
) -> None:
    microbatches, _ = iterator(
        groups,
        order="prompt",
        max_tokens=tokens,
        piece_tokens=tokens,
        pad_multiple=pad,
        shared_prompt=shared,
    )
    actual = list(microbatches)
    microbatches.finish()
    order = [response for microbatch in actual for response in content(microbatch)]
    assert order == [(index, length) for index, group in enumerate(groups) for length in group]
    for microbatch, following in zip(actual, [*actual[1:], None], strict=True):
        assert microbatch.layout.total <= tokens or microbatch.num_samples == 1
        if following is None:
            continue
        # the next response of the same group would have made it too long
        (last, _), (first, length) = content(microbatch)[-1], content(following)[0]
        if last == first:
            further = length + (0 if shared else PROMPT)
            real = microbatch.layout.total - microbatch.layout.padding
            assert real + further > tokens // pad * pad


@pytest.mark.parametrize(
    ("shared", "max_samples", "max_tokens", "counts"),
    [
        (10, 8, None, [5]),
        (10, 2, None, [2, 2, 1]),
        (10, 8, 30, [2, 1, 2]),  # 10 + 5 + 6; 10 + 50; 10 + 7 + 8
        (0, 8, 33, [2, 1, 1, 1]),  # every prompt again: 15 + 16; 60; 17; 18
        (10, 8, 1, [1, 1, 1, 1, 1]),
    ],
)
def test_samples_of_pieces(
    shared: int, max_samples: int, max_tokens: int | None, counts: list[int]
) -> None:
    lengths = [10 + response for response in (5, 6, 50, 7, 8)]
    assert samples_of_pieces(lengths, [shared] * 5, max_samples, max_tokens) == counts


def test_work_counts_the_prompt_once_for_each_piece() -> None:
    whole = make_config()
    cut = make_config(microbatch={"tokens": 1024, "depth_first": False})
    lengths = [400, 400, 400, 400, 100, 100, 100, 100]
    of_whole = GroupWork(QWEN_7B, whole)
    of_cut = GroupWork(QWEN_7B, cut)
    assert of_cut.pieces(512, lengths) == [1, 1, 1, 2, 3]
    prompts = sum(
        of_whole(512, part) for part in ([400], [400], [400], [400, 100], [100, 100, 100])
    )
    assert of_cut(512, lengths) == prompts > of_whole(512, lengths)
    depth_first = GroupWork(QWEN_7B, make_config(microbatch={"tokens": 1024}))
    assert depth_first(512, lengths) == of_whole(512, lengths)


def test_a_plan_takes_the_bound_and_refusals_name_the_remedy() -> None:
    amount = work(make_config(microbatch={"tokens": 640}))
    assert amount.microbatch_tokens == 640, "512 of the prompt, and two responses of 64"
    assert amount.microbatches_per_replica == 16 * 4
    refused: list[tuple[dict[str, Any], str]] = [
        (
            {
                "microbatch": {"tokens": 640},
                "trainer": {"devices": 2, "pipeline_parallel": 2},
            },
            r"microbatch\.tokens: 640: .*pipeline_parallel = 2 .* set microbatch\.responses",
        ),
        (
            {"microbatch": {"tokens": 640, "max_tokens": 640}},
            r"microbatch\.max_tokens: 640 beside microbatch\.tokens = 640.*remove one",
        ),
        (
            {"microbatch": {"tokens": 640}, "algorithm": {"kl_in": "reward", "kl_coef": 0.1}},
            r"algorithm\.kl_in: reward .* microbatch\.tokens = 640 may cut it",
        ),
    ]
    for sections, message in refused:
        with pytest.raises(ValueError, match=message):
            config = make_config(**sections)
            raise ValueError("; ".join(broken_rules(config)))

"""microbatch.max_tokens: which pieces share a microbatch, what decides it, and what a configuration makes of the key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pa_npu.config.schema import Config
from pa_npu.errors import InvariantViolation
from pa_npu.planning.amounts import work
from pa_npu.planning.plan_text import derived_lines
from pa_npu.samples.group import Group
from pa_npu.samples.iterator import MicrobatchIterator
from pa_npu.samples.microbatch import Microbatch
from pa_npu.samples.replica_feed import Parsed, Traffic
from pa_npu.samples.wire import to_bytes
from tests.helpers.shelf import Shelf
from tools.groups import group_of_responses

PROMPT = 2
# per microbatch (group, tokens of one response) of each response
Packs = list[list[tuple[int, int]]]


def make_group(index: int, lengths: list[int]) -> Group:
    """A prompt of PROMPT tokens; the advantage of a response is its own length, so that a
    microbatch tells its content.
    """
    total = sum(lengths)
    return group_of_responses(
        iteration=0,
        version=0,
        index=index,
        prompt_id=index,
        prompt_tokens=np.array([1, 2], np.int32),
        response_tokens=np.full(total, index, np.int32),
        response_lengths=np.array(lengths, np.int32),
        logprobs=np.zeros(total, np.float32),
        rewards=np.zeros(len(lengths), np.float32),
        advantages=np.array(lengths, np.float32),
        finished=np.ones(len(lengths), np.uint8),
    )


class ScriptedFeed:
    """In the place of ReplicaFeed: it has everything, and `ready` decides of a slot whether it has
    arrived. waits: for others.
    """

    traffic = Traffic()

    def __init__(
        self, groups: list[Group], ready: Callable[[int], bool], parse: Callable[[bytes], Parsed]
    ) -> None:
        self.groups = groups
        self._ready = ready
        self._parse = parse
        self.waits: list[int] = []

    def next_group(self, slot: int, wait: bool) -> tuple[Parsed, float] | None:
        if not self._ready(slot):
            if not wait:
                return None
            self.waits.append(slot)
        return self._parse(to_bytes(self.groups[slot])), 0.0

    def close(self) -> None:
        pass


def iterator(
    groups: list[list[int]], ready: Callable[[int], bool] = lambda slot: True, **changes: Any
) -> tuple[MicrobatchIterator, ScriptedFeed]:
    members = [make_group(index, lengths) for index, lengths in enumerate(groups)]
    arguments: dict[str, Any] = {
        "replica": 0,
        "num_replicas": 1,
        "iteration": 0,
        "groups": len(groups),
        "order": "completion",
        "responses_per_microbatch": len(groups[0]),
        "shared_prompt": True,
        "pad_multiple": 1,
        "timeout_s": 1.0,
    }
    feeds: list[ScriptedFeed] = []

    def feed(*_: Any, parse: Callable[[bytes], Parsed], **__: Any) -> ScriptedFeed:
        feeds.append(ScriptedFeed(members, ready, parse))
        return feeds[0]

    with patch("pa_npu.samples.iterator.ReplicaFeed", feed):
        microbatches = MicrobatchIterator(Shelf(members), **{**arguments, **changes})
    return microbatches, feeds[0]


def content(microbatch: Microbatch) -> list[tuple[int, int]]:
    """(group, length) of each response, read from the targets."""
    first = [
        microbatch.response_index.tolist().index(number) for number in range(microbatch.num_samples)
    ]
    return [(int(microbatch.targets[row]), int(microbatch.advantages[row])) for row in first]


def next_fit(groups: list[list[int]], responses: int, shared: bool, pad: int, budget: int) -> Packs:
    """The rule again, on numbers alone: into the open pack if the padded total fits, else into a
    new one.
    """
    packs: Packs = []
    total = 0
    for index, lengths in enumerate(groups):
        for start in range(0, len(lengths), responses):
            piece = lengths[start : start + responses]
            size = PROMPT * (1 if shared else len(piece)) + sum(piece)
            if not packs or -(-(total + size) // pad) * pad > budget:
                packs.append([])
                total = 0
            packs[-1] += [(index, length) for length in piece]
            total += size
    return packs


GROUPS = st.integers(1, 2).flatmap(
    lambda half: st.lists(
        st.lists(st.integers(1, 9), min_size=2 * half, max_size=2 * half), min_size=1, max_size=6
    )
)


@given(
    groups=GROUPS,
    halves=st.booleans(),
    shared=st.booleans(),
    pad=st.sampled_from([1, 4]),
    budget=st.integers(1, 60),
    arrivals=st.lists(st.booleans(), min_size=1),
)
@settings(max_examples=100, deadline=None)
def test_order_prompt_packs_by_the_groups_alone(
    groups: list[list[int]], halves: bool, shared: bool, pad: int, budget: int, arrivals: list[bool]
) -> None:
    """Whatever has arrived when: the same microbatches, in order, each within the budget or a
    single piece.
    """
    responses = len(groups[0]) // 2 if halves else len(groups[0])
    changes = {
        "order": "prompt",
        "responses_per_microbatch": responses,
        "shared_prompt": shared,
        "pad_multiple": pad,
        "max_tokens": budget,
    }
    calls = iter(arrivals * 100)
    microbatches, feed = iterator(groups, lambda slot: next(calls), **changes)
    actual = list(microbatches)
    microbatches.finish()
    assert [content(m) for m in actual] == next_fit(groups, responses, shared, pad, budget)
    assert all(m.layout.total <= budget or m.num_samples == responses for m in actual)
    assert feed.waits == sorted(set(feed.waits)), "no slot is waited for twice"


@given(groups=GROUPS, budget=st.integers(1, 60), arrivals=st.lists(st.booleans(), min_size=1))
@settings(max_examples=100, deadline=None)
def test_order_completion_trains_every_response_once_within_the_budget(
    groups: list[list[int]], budget: int, arrivals: list[bool]
) -> None:
    calls = iter(arrivals * 100)
    microbatches, _ = iterator(groups, lambda slot: next(calls), max_tokens=budget)
    actual = list(microbatches)
    microbatches.finish()
    everything = [(index, length) for index, lengths in enumerate(groups) for length in lengths]
    assert [response for m in actual for response in content(m)] == everything
    assert all(m.layout.total <= budget or m.num_samples == len(groups[0]) for m in actual)


def test_order_completion_goes_as_soon_as_the_next_group_has_not_arrived() -> None:
    """It waits only when it has nothing: for a group that begins a microbatch."""
    arrived = {0}
    groups = [[1, 1]] * 6  # 4 tokens each; room for three
    microbatches, feed = iterator(groups, lambda slot: slot in arrived, max_tokens=12)
    assert next(microbatches).group_indices == (0,)
    arrived |= {1, 2, 3, 4}
    assert next(microbatches).group_indices == (1, 2, 3), "full"
    assert feed.waits == [], "they were there, nobody may wait for them"
    assert next(microbatches).group_indices == (4,), "5 has not arrived"
    assert next(microbatches).group_indices == (5,)
    assert feed.waits == [5]
    microbatches.finish()


def test_what_did_not_fit_begins_the_next_microbatch_without_a_wait() -> None:
    """Pieces of one response: 3 tokens each.

    The second of group 1 waits for room, not for group 2.
    """
    microbatches, feed = iterator(
        [[1, 1]] * 3, lambda slot: slot < 2, max_tokens=9, responses_per_microbatch=1
    )
    assert [m.group_indices for m in (next(microbatches), next(microbatches))] == [(0, 1), (1,)]
    assert feed.waits == []
    assert next(microbatches).group_indices == (2,)
    assert feed.waits == [2]


def test_a_piece_larger_than_the_budget_goes_alone() -> None:
    actual = [
        m.group_indices for m in iterator([[1, 1], [50, 1], [1, 1], [1, 1]], max_tokens=10)[0]
    ]
    assert actual == [(0,), (1,), (2, 3)]


def test_the_budget_counts_padding_and_every_copy_of_a_prompt() -> None:
    groups = [[1, 1, 1, 1]] * 3  # 6 tokens with a shared prompt, 12 without

    def packs(**changes: Any) -> list[tuple[int, ...]]:
        return [m.group_indices for m in iterator(groups, **changes)[0]]

    assert packs(max_tokens=12) == [(0, 1), (2,)]
    assert packs(max_tokens=12, pad_multiple=8) == [(0,), (1,), (2,)], "12 tokens are padded to 16"
    assert packs(max_tokens=16, pad_multiple=8) == [(0, 1), (2,)]
    assert packs(max_tokens=23, shared_prompt=False) == [(0,), (1,), (2,)]
    assert packs(max_tokens=24, shared_prompt=False) == [(0, 1), (2,)]


def test_without_the_key_every_piece_is_a_microbatch_and_nothing_is_waited_for_early() -> None:
    for order in ("prompt", "completion"):
        late = lambda slot: False  # noqa: E731
        microbatches, feed = iterator([[1, 1]] * 2, late, order=order, responses_per_microbatch=1)
        seen = [(m.group_indices, len(feed.waits)) for m in microbatches]
        assert seen == [((0,), 1), ((0,), 1), ((1,), 2), ((1,), 2)]


def test_a_group_that_comes_twice_inside_a_microbatch_stops_the_run() -> None:
    microbatches, feed = iterator([[1, 1]] * 2, max_tokens=100)
    feed.groups[1] = feed.groups[0]
    with pytest.raises(
        InvariantViolation, match=r"I2 exactly once: group 0 .* already trained from slot 0"
    ):
        next(microbatches)


def test_packing_adds_nothing_but_the_layout() -> None:
    """The loss sees the same of an iteration packed and unpacked, response numbers apart."""
    groups = [[3, 1], [2, 5], [1, 1]]
    (packed,) = iterator(groups, max_tokens=1000)[0]
    single = list(iterator(groups)[0])
    for name in ("targets", "engine_logprobs", "advantages"):
        assert torch.equal(getattr(packed, name), torch.cat([getattr(m, name) for m in single])), (
            name
        )
    assert packed.response_lengths == tuple(length for m in single for length in m.response_lengths)


def make_config(**sections: dict[str, Any]) -> Config:
    """G = 8 responses of at most 64 tokens on prompts of at most 512: 1024 packed tokens per group."""
    tree: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"train": "questions.jsonl", "max_prompt_tokens": 512},
        "rollout": {"max_response_tokens": 64},
        "schedule": {"prompts_per_iteration": 16},
    }
    return Config.model_validate({**tree, **sections})


def test_pipeline_parallelism_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        ValueError,
        match=r"microbatch\.max_tokens: 4096: .*pipeline_parallel = 2.*remove the key or set",
    ):
        make_config(microbatch={"max_tokens": 4096}, trainer={"devices": 2, "pipeline_parallel": 2})
    assert make_config(
        microbatch={"max_tokens": 4096}, trainer={"devices": 2, "tensor_parallel": 2}
    )


@pytest.mark.parametrize(
    ("max_tokens", "microbatch_tokens"),
    [(None, 1024), (100, 1024), (4096, 4096), (10**9, 16 * 1024)],
    ids=["unpacked", "smaller than a piece", "packed", "everything"],
)
def test_arithmetic_of_a_packed_iteration(max_tokens: int | None, microbatch_tokens: int) -> None:
    config = make_config(microbatch={"max_tokens": max_tokens})
    amount = work(config)
    assert amount.microbatch_tokens == microbatch_tokens
    assert amount.computed_tokens == 16 * 1024, "packing computes no token more or less"
    (line,) = [
        line for line in derived_lines(config, None, None, False) if line.startswith("microbatches")
    ]
    assert f"{microbatch_tokens} tokens" in line
    assert ("at most 16 per replica" in line) == (max_tokens is not None)

"""PromptStream: every prompt once per epoch, in an order that seed and position determine (I6)."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from pa_npu.data.prompts import Prompt
from pa_npu.data.stream import PromptStream
from pa_npu.errors import DataError


def make_prompts(number: int, first_token: int = 0) -> list[Prompt]:
    return [
        Prompt(i, np.array([first_token + i, 7], np.int32), str(i), f"prompt {i}", {})
        for i in range(number)
    ]


def ids(prompts: list[Prompt]) -> list[int]:
    return [prompt.prompt_id for prompt in prompts]


def test_each_epoch_holds_every_prompt_once_in_a_new_order() -> None:
    stream = PromptStream(make_prompts(10), seed=3)
    epochs = [ids(stream.next_items(10)) for _ in range(4)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_batches_that_cross_epochs_lose_and_repeat_nothing() -> None:
    prompts = make_prompts(7)
    in_one_go = ids(PromptStream(prompts, seed=1).next_items(70))
    stream = PromptStream(prompts, seed=1)
    assert [i for _ in range(14) for i in ids(stream.next_items(5))] == in_one_go
    assert set(Counter(in_one_go).values()) == {10}


def test_order_depends_on_the_seed_and_only_on_it() -> None:
    prompts = make_prompts(50)
    assert ids(PromptStream(prompts, seed=1).next_items(50)) == ids(
        PromptStream(prompts, seed=1).next_items(50)
    )
    assert ids(PromptStream(prompts, seed=1).next_items(50)) != ids(
        PromptStream(prompts, seed=2).next_items(50)
    )


def test_the_order_stays_what_saved_positions_mean() -> None:
    assert ids(PromptStream(make_prompts(8), seed=1).next_items(16)) == [
        6,
        3,
        7,
        1,
        4,
        0,
        2,
        5,
        7,
        2,
        0,
        6,
        3,
        1,
        4,
        5,
    ]


def test_without_shuffling_prompts_come_in_dataset_order() -> None:
    assert ids(PromptStream(make_prompts(3), seed=5, shuffle=False).next_items(7)) == [
        0,
        1,
        2,
        0,
        1,
        2,
        0,
    ]


@pytest.mark.parametrize("taken", [0, 3, 7, 8, 19])
def test_a_restored_stream_continues_where_the_other_stopped(taken: int) -> None:
    prompts = make_prompts(7)
    original = PromptStream(prompts, seed=9)
    original.next_items(taken)
    state = json.loads(json.dumps(original.state()))
    again = PromptStream(prompts, seed=9)
    again.restore(state)
    assert ids(again.next_items(20)) == ids(original.next_items(20))


@pytest.mark.parametrize(
    "another",
    [
        PromptStream(make_prompts(7), seed=2),
        PromptStream(make_prompts(7), seed=1, shuffle=False),
        PromptStream(make_prompts(8), seed=1),
        PromptStream(make_prompts(7, first_token=1), seed=1),
        PromptStream(list(reversed(make_prompts(7))), seed=1),
    ],
)
def test_a_state_of_other_data_or_another_order_is_refused(another: PromptStream) -> None:
    stream = PromptStream(make_prompts(7), seed=1)
    stream.restore(PromptStream(make_prompts(7), seed=1).state())
    with pytest.raises(DataError, match="differ from those of the checkpoint"):
        stream.restore(another.state())


def test_no_prompts_are_refused() -> None:
    with pytest.raises(DataError, match="no prompts"):
        PromptStream([], seed=1)

"""Several datasets as one stream: shares by weight at every moment, epochs of each, one state that resumes all (I6)."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from pa_npu.config.sections.inputs import DataConfig
from pa_npu.data.prompts import Prompt, PromptSet
from pa_npu.data.stream import Outcome, PromptStream, TrainingStream
from pa_npu.errors import DataError


def loaded(sizes: dict[str, int]) -> list[PromptSet]:
    sets = []
    first = 0
    for name, size in sizes.items():
        prompts = tuple(
            Prompt(first + i, np.array([first + i], np.int32), str(i), "", {}, name)
            for i in range(size)
        )
        sets.append(PromptSet(name, prompts, size, 0, 0))
        first += size
    return sets


def stream(sizes: dict[str, int], weights: list[float]) -> TrainingStream:
    train = [{"path": name, "weight": weight} for name, weight in zip(sizes, weights, strict=True)]
    config = DataConfig.model_validate({"train": train})
    return TrainingStream(config, loaded(sizes), 1)


@pytest.mark.parametrize(
    "weights", [[1, 1, 1], [3, 1, 1], [0.7, 0.2, 0.1], [1e-3, 5, 80], [1, 1 / 3, 1 / 7]]
)
def test_every_stretch_has_the_shares_of_the_weights_to_a_prompt(weights: list[float]) -> None:
    mixed = stream({"a": 50, "b": 20, "c": 7}, weights)
    sources = [prompt.source for prompt in mixed.next_items(400)]
    for end in range(1, 401):
        counts = Counter(sources[:end])
        for name, weight in zip("abc", weights, strict=True):
            expected = end * weight / sum(weights)
            assert abs(counts[name] - expected) <= 1.0 + 1e-9, (
                f"{name}: {counts[name]} of {end}, not {expected}"
            )


def test_each_dataset_has_epochs_of_its_own_in_the_order_that_it_has_alone() -> None:
    mixed = stream({"a": 10, "b": 4}, [1, 1]).next_items(80)
    for name, prompts in zip("ab", loaded({"a": 10, "b": 4}), strict=True):
        own = [prompt.prompt_id for prompt in mixed if prompt.source == name]
        assert own == [
            prompt.prompt_id for prompt in PromptStream(prompts.prompts, 1).next_items(40)
        ]


@pytest.mark.parametrize("taken", [0, 1, 13, 64])
def test_a_restored_mixture_goes_on_where_the_other_stopped(taken: int) -> None:
    sizes = {"a": 11, "b": 5}
    weights = [2.0, 1.0]
    original = stream(sizes, weights)
    again = stream(sizes, weights)
    original.next_items(taken)
    again.restore(json.loads(json.dumps(original.state())))
    assert [p.prompt_id for p in again.next_items(50)] == [
        p.prompt_id for p in original.next_items(50)
    ]


def test_other_weights_count_from_the_checkpoint_on_and_other_datasets_are_refused() -> None:
    first = stream({"a": 11, "b": 5}, [9, 1])
    first.next_items(100)
    second = stream({"a": 11, "b": 5}, [1, 1])
    second.restore(first.state())
    assert Counter(prompt.source for prompt in second.next_items(10)) == {"a": 5, "b": 5}, (
        "nothing is made up for"
    )
    for another in (stream({"a": 11, "c": 5}, [9, 1]), stream({"a": 12, "b": 5}, [9, 1])):
        with pytest.raises(DataError, match="the checkpoint"):
            another.restore(first.state())
    with pytest.raises(DataError, match="the checkpoint is of other datasets"):
        second.restore(PromptStream(loaded({"a": 11})[0].prompts, 1).state())
    with pytest.raises(DataError, match="the checkpoint"):
        PromptStream(loaded({"a": 11})[0].prompts, 1).restore(first.state())


def test_the_record_counts_each_dataset() -> None:
    mixed = stream({"a": 10, "b": 10}, [3, 1])
    outcomes = [
        Outcome(prompt.source, 1.0 if prompt.source == "a" else None, 0.5)
        for prompt in mixed.next_items(8)
    ]
    assert mixed.observe(outcomes) == {
        "sources": {
            "a": {"share": 0.75, "prompts": 6, "accuracy": 1.0, "reward_mean": 0.5},
            "b": {"share": 0.25, "prompts": 2, "accuracy": None, "reward_mean": 0.5},
        }
    }


def test_one_dataset_is_a_plain_stream_whose_old_states_are_understood() -> None:
    alone = stream({"a": 9}, [1])
    plain = PromptStream(loaded({"a": 9})[0].prompts, 1)
    assert [p.prompt_id for p in alone.next_items(4)] == [
        p.prompt_id for p in plain.next_items(4)
    ] and alone.state() == plain.state()
    again = stream({"a": 9}, [2])
    again.restore(plain.state())
    assert [p.prompt_id for p in again.next_items(20)] == [
        p.prompt_id for p in plain.next_items(20)
    ]
    assert alone.observe([]) == {}

"""Several datasets as one stream: shares by weight at every moment, epochs of each, one state that resumes all (I6)."""

from __future__ import annotations

import base64
import json
import zlib
from collections import Counter
from typing import Any

import numpy as np
import pytest

from pa_npu.config.sections import DataConfig
from pa_npu.data.difficulty import Difficulty, Outcome
from pa_npu.data.mixture import Mixture, training_stream
from pa_npu.data.prompts import Prompt, PromptSet
from pa_npu.data.stream import PromptStream
from pa_npu.errors import DataError


def loaded(sizes: dict[str, int]) -> list[PromptSet]:
    found, first = [], 0
    for name, size in sizes.items():
        prompts = tuple(Prompt(first + i, np.array([first + i], np.int32), str(i), "", {}, name) for i in range(size))
        found.append(PromptSet(name, prompts, size, 0, 0))
        first += size
    return found


def stream(sizes: dict[str, int], weights: list[float], iteration: int = 8, **settings: Any) -> Any:
    train = [{"path": name, "weight": weight} for name, weight in zip(sizes, weights, strict=True)]
    config = DataConfig.model_validate({"train": train, **settings})
    return training_stream(config, loaded(sizes), 1, iteration)


@pytest.mark.parametrize("weights", [[1, 1, 1], [3, 1, 1], [0.7, 0.2, 0.1], [1e-3, 5, 80], [1, 1 / 3, 1 / 7]])
def test_every_stretch_has_the_shares_of_the_weights_to_a_prompt(weights: list[float]) -> None:
    mixed = stream({"a": 50, "b": 20, "c": 7}, weights)
    sources = [prompt.source for prompt in mixed.take(400)]
    for end in range(1, 401):
        counts = Counter(sources[:end])
        for name, weight in zip("abc", weights, strict=True):
            expected = end * weight / sum(weights)
            assert abs(counts[name] - expected) <= 1.0 + 1e-9, f"{name}: {counts[name]} of {end}, not {expected}"


def test_each_dataset_has_epochs_of_its_own_in_the_order_that_it_has_alone() -> None:
    mixed = stream({"a": 10, "b": 4}, [1, 1]).take(80)
    for name, prompts in zip("ab", loaded({"a": 10, "b": 4}), strict=True):
        own = [prompt.prompt_id for prompt in mixed if prompt.source == name]
        assert own == [prompt.prompt_id for prompt in PromptStream(prompts, 1).take(40)]


@pytest.mark.parametrize("taken", [0, 1, 13, 64])
def test_a_restored_mixture_goes_on_where_the_other_stopped(taken: int) -> None:
    sizes, weights = {"a": 11, "b": 5}, [2.0, 1.0]
    original, again = stream(sizes, weights), stream(sizes, weights)
    original.take(taken)
    again.restore(json.loads(json.dumps(original.state())))
    assert [p.prompt_id for p in again.take(50)] == [p.prompt_id for p in original.take(50)]


def test_other_weights_count_from_the_checkpoint_on_and_other_datasets_are_refused() -> None:
    first = stream({"a": 11, "b": 5}, [9, 1])
    first.take(100)
    second = stream({"a": 11, "b": 5}, [1, 1])
    second.restore(first.state())
    assert Counter(prompt.source for prompt in second.take(10)) == {"a": 5, "b": 5}, "nothing is made up for"
    for other in (stream({"a": 11, "c": 5}, [9, 1]), stream({"a": 12, "b": 5}, [9, 1])):
        with pytest.raises(DataError, match="the checkpoint"):
            other.restore(first.state())
    with pytest.raises(DataError, match="the checkpoint is of other datasets"):
        second.restore(PromptStream(loaded({"a": 11})[0], 1).state())
    with pytest.raises(DataError, match="the checkpoint"):
        PromptStream(loaded({"a": 11})[0], 1).restore(first.state())


def test_the_record_counts_each_dataset() -> None:
    mixed = stream({"a": 10, "b": 10}, [3, 1])
    outcomes = [
        Outcome(prompt.prompt_id, prompt.source, 1.0 if prompt.source == "a" else None, 0.5) for prompt in mixed.take(8)
    ]
    assert mixed.observe(outcomes) == {
        "sources": {
            "a": {"share": 0.75, "prompts": 6, "accuracy": 1.0, "reward_mean": 0.5},
            "b": {"share": 0.25, "prompts": 2, "accuracy": None, "reward_mean": 0.5},
        }
    }


def test_one_dataset_is_a_plain_stream_whose_old_states_are_understood() -> None:
    alone = stream({"a": 9}, [1])
    assert isinstance(alone, PromptStream) and set(alone.state()) == {"position", "fingerprint"}
    assert alone.observe([]) == {}


def filtered(count: int, **settings: Any) -> PromptStream:
    config = DataConfig.model_validate({"train": "a", **settings})
    found = training_stream(config, loaded({"a": count}), 1, 4)
    assert isinstance(found, PromptStream)
    return found


def epoch(prompts: PromptStream, right: dict[int, float | None], count: int) -> list[int]:
    """The next prompts, whose responses are as `right` says, else some of each."""
    taken = prompts.take(count)
    prompts.observe([Outcome(p.prompt_id, "a", right.get(p.prompt_id, 0.5), 0.0) for p in taken])
    return sorted(prompt.prompt_id for prompt in taken)


@pytest.mark.parametrize(
    ("skip", "left"), [("solved", {2, 3, 4, 5, 6, 7}), ("unsolved", {0, 1, 4, 5, 6, 7}), ("both", {4, 5, 6, 7})]
)
def test_prompts_that_were_always_right_or_wrong_are_passed_over(skip: str, left: set[int]) -> None:
    prompts, right = filtered(8, skip=skip), {0: 1.0, 1: 1.0, 2: 0.0, 3: 0.0, 4: None}
    assert epoch(prompts, right, 8) == list(range(8)), "the first epoch holds all"
    for _ in range(3):
        assert epoch(prompts, right, len(left)) == sorted(left)


def test_when_less_than_an_iteration_remains_all_are_asked_again() -> None:
    prompts = filtered(8, skip="solved")  # of four prompts an iteration
    assert epoch(prompts, dict.fromkeys(range(4), 1.0), 8) == list(range(8))
    assert epoch(prompts, {7: 1.0}, 4) == [4, 5, 6, 7], "four are enough"
    assert epoch(prompts, {}, 8) == list(range(8)), "three are not"


def test_what_is_passed_over_is_counted() -> None:
    prompts = filtered(8, skip="both")
    taken = prompts.take(8)
    right = {0: 1.0, 1: 1.0, 2: 0.0}
    said = prompts.observe([Outcome(p.prompt_id, "a", right.get(p.prompt_id, 0.5), 0.0) for p in taken])
    assert said == {"prompts_passed": 0, "prompts_solved": 2, "prompts_unsolved": 1}
    prompts.take(6)  # five in the second epoch, at least one in the third
    said = prompts.observe([])
    assert 3 <= said["prompts_passed"] <= 6 and (said["prompts_solved"], said["prompts_unsolved"]) == (2, 1)


@pytest.mark.parametrize("seed", range(5))
def test_a_filtered_stream_resumes_from_any_iteration_as_if_nothing_had_happened(seed: int) -> None:
    def run(prompts: PromptStream, iterations: range, states: dict[int, str]) -> list[list[int]]:
        asked = []
        for iteration in iterations:
            taken = prompts.take(4)
            rng = np.random.default_rng([seed, iteration])
            outcomes = [Outcome(p.prompt_id, "a", float(rng.choice([0, 0.5, 1])), 0.0) for p in taken]
            prompts.observe(outcomes)
            states[iteration + 1] = json.dumps(prompts.state())
            asked.append([p.prompt_id for p in taken])
        return asked

    settings = {"skip": ("both", "solved", "unsolved")[seed % 3]}
    states: dict[int, str] = {}
    whole = run(filtered(13, **settings), range(30), states)
    for start in (1, 7, 13, 22):
        again, later = filtered(13, **settings), {}
        again.restore(json.loads(states[start]))
        assert run(again, range(start, 30), later) == whole[start:]
        assert later[30] == states[30]


def test_the_state_stays_small_and_a_damaged_one_is_refused() -> None:
    known = Difficulty(200_000, "both")
    rng = np.random.default_rng(1)
    for index in rng.choice(200_000, 100_000, replace=False):
        known.observe(int(index), float(rng.integers(0, 2)))
    state = known.state()
    assert len(json.dumps(state)) < 200_000, "less than a byte a prompt, whatever was answered"
    again = Difficulty(200_000, "both")
    again.restore(state)
    assert again.counts() == known.counts()
    older = np.zeros(3, np.int8), np.zeros(3, "<i4")
    older[0][:], older[1][1:] = (2, -1, 1), 2**31 - 1
    text = base64.b64encode(zlib.compress(b"".join(part.tobytes() for part in older))).decode()
    (few := Difficulty(3, "both")).restore({"passed": 5, "prompts": text})
    assert few.counts() == (1, 1) and few.num_passed == 5, "of release 0.1"
    for damaged in ({}, {**state, "prompts": "AAAA"}, {**state, "prompts": 3}, {**state, "passed": "x"}):
        with pytest.raises(DataError, match="record of prompts is damaged"):
            again.restore(damaged)
    with pytest.raises(DataError, match="record of prompts is damaged"):
        Difficulty(7, "both").restore(state)


def test_mixtures_filter_each_dataset_by_its_own_outcomes() -> None:
    mixed = stream({"a": 8, "b": 4}, [2, 1], iteration=6, skip="solved")
    assert isinstance(mixed, Mixture)
    taken = mixed.take(12)
    said = mixed.observe([Outcome(p.prompt_id, p.source, float(p.prompt_id in (0, 1, 8)), 0.0) for p in taken])
    assert said["prompts_passed"] == 0
    assert (said["sources"]["a"]["prompts_solved"], said["sources"]["b"]["prompts_solved"]) == (2, 1)
    later = [p.prompt_id for p in mixed.take(9)]
    assert sorted(later) == [2, 3, 4, 5, 6, 7, 9, 10, 11]

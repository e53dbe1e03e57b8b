"""What leaves the coordinator is what engines answered, and its rewards are those of its texts; nothing else gets past it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pa_npu.coordinator.answers import Answers, answers_of
from pa_npu.coordinator.delivery import Production
from pa_npu.coordinator.episode import ScoredGroup, score
from pa_npu.data.prompts import Prompt
from pa_npu.engines.protocol import Generation
from pa_npu.environments.single_turn import SingleTurn, samples_of
from pa_npu.errors import InvariantViolation
from pa_npu.rewards.functions import RewardInput, RewardResult, scored_digest
from pa_npu.rewards.pool import RewardPool
from pa_npu.rewards.worker import sealed
from pa_npu.samples.seeds import group_seed, turn_seed
from pa_npu.samples.types import Sample, SampleBuilder

RUN_SEED, ITERATION, INDEX, RESPONSES = 7, 3, 5, 4
PROMPT = Prompt(11, np.arange(3, dtype=np.int32), "4", "What is 2+2?", {})


def generation(number: int, length: int | None = None) -> Generation:
    rng = np.random.default_rng(number)
    length = 2 + number if length is None else length
    return Generation(
        tokens=rng.integers(0, 90, length).astype(np.int32),
        logprobs=-rng.random(length).astype(np.float32),
        text=f"text {number}",
        finish_reason="stop",
        version=ITERATION,
    )


def answered(
    generations: Sequence[Generation], *, all_trained: bool = True, index: int = INDEX
) -> Answers:
    answers = Answers(all_trained=all_trained)
    first = group_seed(RUN_SEED, ITERATION, index)
    for number, generation in enumerate(generations):
        answers.note(number, 0, turn_seed(first, number, 0), generation)
    return answers


def result_of(samples: Sequence[Sample]) -> RewardResult:
    total = np.arange(len(samples)).astype(np.float32) * np.float32(0.5)
    digest = scored_digest(
        PROMPT.text, PROMPT.answer, [sample.text for sample in samples], total.tolist()
    )
    return RewardResult(total, {"math": total}, total > 0.5, (), scored=digest)


def scored_group(
    samples: list[Sample], answers: Answers | None, result: RewardResult | None = None
) -> ScoredGroup:
    return ScoredGroup(PROMPT, samples, result or result_of(samples), answers=answers)


def without(number: int, place: int) -> Callable[[list[Sample]], list[Sample]]:
    """Leaves a token of a response without loss. place: from the response's beginning, or end."""

    def change(samples: list[Sample]) -> list[Sample]:
        sample = samples[number]
        where = np.flatnonzero(sample.trained)[place]
        component, logprobs, versions = (
            sample.component.copy(),
            sample.logprobs.copy(),
            sample.versions.copy(),
        )
        component[where], logprobs[where], versions[where] = 0, 0, -1
        return replaced(
            samples, number, Sample(sample.tokens, component, logprobs, versions, True, sample.text)
        )

    return change


def replaced(samples: list[Sample], number: int, sample: Sample) -> list[Sample]:
    return [*samples[:number], sample, *samples[number + 1 :]]


def with_value(name: str, value: Any) -> Callable[[list[Sample]], list[Sample]]:
    """One trained token, or its log-prob, is another."""

    def change(samples: list[Sample]) -> list[Sample]:
        sample = samples[1]
        arrays = {
            key: getattr(sample, key).copy()
            for key in ("tokens", "component", "logprobs", "versions")
        }
        arrays[name][int(sample.trained.argmax())] = value
        return replaced(samples, 1, Sample(**arrays, finished=True, text=sample.text))

    return change


FAULTS: dict[str, tuple[Callable[[list[Sample]], list[Sample]], str]] = {
    "the first token of a response is not trained": (without(2, 0), "are no answers of an engine"),
    "the last token of a response is not trained": (without(2, -1), "are no answers of an engine"),
    "a token in the middle is not trained": (without(2, 1), "are no answers of an engine"),
    "a response is there twice": (
        lambda samples: [samples[0], samples[0], *samples[2:]],
        "trained a second time",
    ),
    "a response is missing": (
        lambda samples: samples[:-1],
        "1 of 4 answers of engines are not trained",
    ),
    "a token is another": (with_value("tokens", 99), "has others, or other log-probs"),
    "a log-prob is another": (with_value("logprobs", -9.0), "has others, or other log-probs"),
    "two responses are joined": (
        lambda samples: [joined(samples[0], samples[1]), samples[2], samples[3], samples[0]],
        "trained a second time",
    ),
}


def joined(first: Sample, second: Sample) -> Sample:
    builder = SampleBuilder(PROMPT.tokens)
    for sample in (first, second):
        builder.write(sample.tokens[sample.trained], sample.logprobs[sample.trained], ITERATION)
    return builder.finish(True, first.text)


def test_samples_that_are_the_engines_answers_pass() -> None:
    generations = [generation(number) for number in range(RESPONSES)]
    samples = samples_of(PROMPT.tokens, generations)
    group = scored_group(samples, answered(generations)).group(RUN_SEED, ITERATION, INDEX)
    assert group.num_samples == RESPONSES
    answered(generations).check_seeds(RUN_SEED, ITERATION, INDEX)


@pytest.mark.parametrize("fault", FAULTS)
def test_samples_that_are_others_than_the_engines_answers_end_the_run(fault: str) -> None:
    change, message = FAULTS[fault]
    generations = [generation(number) for number in range(RESPONSES)]
    samples = change(samples_of(PROMPT.tokens, generations))
    with pytest.raises(
        InvariantViolation, match=f"I2 exactly once: group 5 of iteration 3 .*{message}"
    ):
        scored_group(samples, answered(generations)).group(RUN_SEED, ITERATION, INDEX)


def test_answers_may_follow_one_another_or_be_left_out_where_an_environment_makes_samples() -> None:
    generations = [generation(number) for number in range(RESPONSES)]
    samples = samples_of(PROMPT.tokens, generations)
    answers = answered(generations, all_trained=False)
    scored_group([joined(samples[2], samples[0])], answers).group(RUN_SEED, ITERATION, INDEX)


def test_a_turn_that_two_branches_share_is_trained_in_one_of_them() -> None:
    first, second, third = (generation(number) for number in range(3))

    def branch(last: Generation, trains_first: bool) -> Sample:
        builder = SampleBuilder(PROMPT.tokens)
        if trains_first:
            builder.write(first.tokens, first.logprobs, ITERATION)
        else:
            builder.show(first.tokens)
        builder.show(np.array([91, 92], np.int32))
        builder.write(last.tokens, last.logprobs, ITERATION)
        return builder.finish(True, "")

    answers = answered([first, second, third], all_trained=False)
    scored_group([branch(second, True), branch(third, False)], answers).group(
        RUN_SEED, ITERATION, INDEX
    )
    with pytest.raises(InvariantViolation, match="trained a second time"):
        scored_group([branch(second, True), branch(third, True)], answers).group(
            RUN_SEED, ITERATION, INDEX
        )


def test_an_answer_is_trained_behind_what_the_engine_was_asked_with() -> None:
    """Of one turn, of two turns, and of two answers that follow one another."""
    first, second = generation(1), generation(2)

    def sample(shown: Sequence[int], *, between: bool = True) -> Sample:
        builder = SampleBuilder(PROMPT.tokens)
        builder.write(first.tokens, first.logprobs, ITERATION)
        if between:
            builder.show(np.array(shown, np.int32))
        builder.write(second.tokens, second.logprobs, ITERATION)
        return builder.finish(True, "")

    for between in (False, True):
        asked = np.concatenate(
            [PROMPT.tokens, first.tokens, np.array([91, 92] * between, np.int32)]
        ).astype(np.int32)
        answers = Answers(in_context=True)
        answers.note(0, 0, 0, first, answers.context_of(PROMPT.tokens))
        answers.note(0, 1, 1, second, answers.context_of(asked))
        right = scored_group([sample([91, 92], between=between)], answers)
        right.group(RUN_SEED, ITERATION, INDEX)
    answers = Answers(in_context=True)
    answers.note(0, 0, 0, first, answers.context_of(PROMPT.tokens))
    answers.note(0, 1, 1, second, answers.context_of(asked))
    for shown in ([91], [91, 93], [92, 91]):
        with pytest.raises(
            InvariantViolation, match="wrote them for sample 0, turn 1, behind other tokens"
        ):
            scored_group([sample(shown)], answers).group(RUN_SEED, ITERATION, INDEX)


def test_tokens_under_another_version_than_the_engine_named_end_the_run() -> None:
    generations = [generation(number) for number in range(RESPONSES)]
    samples = samples_of(PROMPT.tokens, generations)
    versions = samples[2].versions.copy()
    versions[-1] -= 1
    samples[2] = replace(samples[2], versions=versions)
    with pytest.raises(InvariantViolation, match=r"I1 version: .* versions 2 to 3, .* version 3"):
        scored_group(samples, answered(generations)).group(RUN_SEED, ITERATION, INDEX)


class TrainsParts(SingleTurn):
    trains_whole_answers = False


class Plain:
    async def rollout(self, *_: Any) -> list[Sample]:
        return []


def test_an_environment_may_say_that_it_trains_parts_of_answers() -> None:
    generations = [generation(number) for number in range(RESPONSES)]
    samples = without(2, -1)(samples_of(PROMPT.tokens, generations))
    for kind, passes in ((TrainsParts, True), (Plain, False), (SingleTurn, False)):
        answers = answers_of(object.__new__(kind))
        for number, one in enumerate(generations):
            answers.note(number, 0, number, one)
        group = scored_group(samples, answers)
        if passes:
            group.group(RUN_SEED, ITERATION, INDEX)
        else:
            with pytest.raises(InvariantViolation, match="trains_whole_answers = False"):
                group.group(RUN_SEED, ITERATION, INDEX)


@pytest.mark.parametrize(
    ("run_seed", "iteration", "index"),
    [
        (RUN_SEED, ITERATION - 1, INDEX),
        (RUN_SEED, ITERATION, INDEX + 1),
        (RUN_SEED + 1, ITERATION, INDEX),
    ],
    ids=["the iteration before", "the group beside it", "another run"],
)
def test_seeds_of_another_place_end_the_run(run_seed: int, iteration: int, index: int) -> None:
    answers = Answers()
    first = group_seed(run_seed, iteration, index)
    answers.note(0, 0, turn_seed(first, 0, 0), generation(0))
    answers.note(1, 2, turn_seed(first, 1, 2), generation(1))
    answers.check_seeds(run_seed, iteration, index)
    with pytest.raises(InvariantViolation, match="sample 0, turn 0 was asked for with the seed"):
        answers.check_seeds(RUN_SEED, ITERATION, INDEX)


def test_one_answer_to_two_seeds_ends_the_run_unless_it_may_be_chance() -> None:
    long, short = generation(1, length=400), generation(2, length=3)
    answered([short, short]).check_seeds(RUN_SEED, ITERATION, INDEX)
    with pytest.raises(
        InvariantViolation, match="samples 0 and 1 have the same 400 tokens and log-probs"
    ):
        answered([long, long]).check_seeds(RUN_SEED, ITERATION, INDEX)


# Rewards


RESULTS: dict[str, Callable[[RewardResult, RewardResult], RewardResult]] = {
    "the group's before": lambda result, another: another,
    "the neighbour's": lambda result, another: replace(result, total=np.roll(result.total, 1)),
    "one reward changed": lambda result, another: replace(
        result, total=result.total + np.eye(RESPONSES)[0] * 0.5
    ),
}


@pytest.mark.parametrize("fault", RESULTS)
def test_rewards_of_other_texts_end_the_run(fault: str) -> None:
    generations = [generation(number) for number in range(RESPONSES)]
    samples = samples_of(PROMPT.tokens, generations)
    others = samples_of(PROMPT.tokens, [generation(10 + number) for number in range(RESPONSES)])
    result = RESULTS[fault](result_of(samples), result_of(others))
    with pytest.raises(
        InvariantViolation, match=r"I7 rewards: group 5 .* were given to other texts"
    ):
        scored_group(samples, answered(generations), result).group(RUN_SEED, ITERATION, INDEX)


class StubWorkers:
    """Replies what `change` makes of the right reply, as JSON brings it."""

    def __init__(self, change: Callable[[RewardInput, dict[str, Any]], dict[str, Any]]) -> None:
        self._change = change

    async def score(self, group: RewardInput) -> dict[str, Any]:
        rewards = {"math": [float(len(text)) for text in group.responses]}
        return self._change(group, sealed(group, {"rewards": rewards, "errors": {}, "fatal": None}))


def _of_another(group: RewardInput, reply: dict[str, Any]) -> dict[str, Any]:
    return sealed(replace(group, responses=["another", *group.responses[1:]]), reply)


def _with_another_answer(group: RewardInput, reply: dict[str, Any]) -> dict[str, Any]:
    return sealed(replace(group, answer="5"), reply)


def _in_another_order(group: RewardInput, reply: dict[str, Any]) -> dict[str, Any]:
    return {**reply, "rewards": {"math": reply["rewards"]["math"][::-1]}}


@pytest.mark.parametrize("change", [_of_another, _with_another_answer, _in_another_order])
async def test_a_worker_that_scored_other_texts_ends_the_run(
    change: Callable[..., dict[str, Any]],
) -> None:
    from pa_npu.config.sections.reward import RewardConfig

    group = RewardInput("question", "4", ["a", "bb", "ccc"], [1, 2, 3], {})
    for kind, passes in ((lambda _, reply: reply, True), (change, False)):
        pool = RewardPool(RewardConfig.model_validate({"functions": [{"name": "math"}]}))
        pool._workers = [({"math"}, StubWorkers(kind))]  # type: ignore[list-item]
        if passes:
            assert (await pool.score(group)).total.tolist() == [1, 2, 3]
        else:
            with pytest.raises(
                InvariantViolation, match="I7 rewards: a reward worker answered for other texts"
            ):
                await pool.score(group)


async def test_rewards_that_an_environment_gives_are_bound_to_its_texts_too() -> None:
    samples = [
        replace(one, reward=float(n))
        for n, one in enumerate(samples_of(PROMPT.tokens, [generation(0)] * 2))
    ]
    scored = await score(None, PROMPT, samples)  # type: ignore[arg-type]
    scored.group(RUN_SEED, ITERATION, INDEX)
    scored.samples = scored.samples[::-1]
    scored.group(RUN_SEED, ITERATION, INDEX)  # the texts are equal
    scored.samples = [replace(scored.samples[0], text="another"), scored.samples[1]]
    with pytest.raises(InvariantViolation, match="were given to other texts"):
        scored.group(RUN_SEED, ITERATION, INDEX)


# Records


def test_records_are_made_of_the_group_that_was_dispatched() -> None:
    generations = [generation(number) for number in range(RESPONSES)]
    samples = samples_of(PROMPT.tokens, generations)
    scored = scored_group(samples, None)
    group = scored.group(
        RUN_SEED, ITERATION, INDEX, lambda group: group.spread(np.arange(4, dtype=np.float32))
    )
    others = samples_of(PROMPT.tokens, [generation(20 + number) for number in range(RESPONSES)])
    result = result_of(others)
    result.total[:] = 9
    production = Production(ITERATION, num_kept=100)
    production.put(group, scored_group(others, None, result), {(0, 0): None})
    for kept, inputs in zip(production._kept, generations, strict=True):
        assert (kept.index, kept.iteration, kept.prompt_id) == (INDEX, ITERATION, PROMPT.prompt_id)
        assert list(kept.tokens) == inputs.tokens.tolist()
        assert np.array_equal(np.float32(kept.logprobs), inputs.logprobs)
        assert kept.reward == kept.response / 2 and kept.advantage == kept.response
    (short,) = production._samples or [None]
    if short is not None:
        assert [one["tokens"] for one in short["responses"]] == [
            len(generation.tokens) for generation in generations
        ]
        assert [one["reward"] for one in short["responses"]] == [0.0, 0.5, 1.0, 1.5]

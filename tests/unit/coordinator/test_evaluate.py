"""Evaluation on scripted engines: what is asked, what comes out of it, and what an overlapped one leaves when it must end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pa_npu.config.schema import Config
from pa_npu.control.milestones import Milestones
from pa_npu.coordinator.evaluate import BackgroundEvaluations, Evaluator
from pa_npu.data.prompts import Prompt
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import Generation, Sampling
from pa_npu.environments.protocol import EnvironmentContext, EnvironmentFailed, write
from pa_npu.environments.single_turn import SingleTurn
from pa_npu.errors import InvariantViolation, PaNpuError
from pa_npu.evaluation.results import Judged
from pa_npu.rewards.functions import RewardInput, RewardResult
from pa_npu.samples.types import SampleBuilder
from pa_npu.telemetry.timeline import Timeline
from tests.helpers.stuck import comes

# what waits for room on an engine has the deadlines of a run, which are longer
pytestmark = pytest.mark.timeout(60)

QUESTIONS = 12


class Engine:
    """Answers each question with its number, sampled ones rightly where the seed is even; keeps
    what `held` says in flight.
    """

    name = "scripted"

    def __init__(self, held: set[int] | None = None) -> None:
        self.asked: list[tuple[int, int, int, Sampling]] = []
        self.held = held or set()
        self.cancelled: list[int] = []
        self.version = 4

    async def generate(self, prompt_tokens, n, seed, sampling, *, deadline_s):
        question = int(prompt_tokens[1])
        self.asked.append((question, n, seed, sampling))
        try:
            if question in self.held:
                await comes(
                    asyncio.Event(),
                    lambda: f"question {question} was held, and nobody gave up on it",
                )
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.append(question)
            raise
        right = [sampling.temperature == 0 or number % 2 == 0 for number in range(n)]
        tokens = np.array([7, 8, 2][: 3 if n == 1 else 2], np.int32)
        return [
            Generation(
                tokens,
                np.zeros(0, np.float32),
                f"so #### {question if ok else -question - 1}",
                "stop",
                version=self.version,
            )
            for ok in right
        ]

    async def close(self):
        pass


class Rewards:
    async def score(self, group: RewardInput) -> RewardResult:
        right = np.array([text.endswith(f"#### {group.answer}") for text in group.responses])
        return RewardResult(right.astype(np.float32), {"math": right.astype(np.float32)}, right, ())


class TooLong(SingleTurn):
    """Shows the policy more than any engine holds."""

    async def rollout(self, prompt, num_samples, generate):
        sample = SampleBuilder(prompt.tokens)
        (first,) = await generate(sample.tokens)
        write(sample, first)
        sample.show(np.ones(30, np.int32))
        (second,) = await generate(sample.tokens, turn=1)
        write(sample, second)
        return [sample.finish(second.finished, second.text)] * num_samples


def make(engine: Engine, kind: type[SingleTurn] = SingleTurn, **evaluate: Any) -> Evaluator:
    config = Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t", "test": "a", "max_prompt_tokens": 8},
            "rollout": {"max_response_tokens": 24},
            "evaluate": {"sets": {"other": "b"}, **evaluate},
        }
    )
    sets = {
        name: [
            Prompt(number, np.array([1, number + offset], np.int32), str(number + offset), "q", {})
            for number in range(QUESTIONS // 2)
        ]
        for name, offset in (("test", 0), ("other", QUESTIONS // 2))
    }
    pool = EnginePool([engine])
    environment = kind(EnvironmentContext(None, 24))
    return Evaluator(config, sets, pool, environment, Rewards(), Sampling(24, 1.0, (2,)))


async def test_greedy_answers_and_samples_of_every_set_with_their_own_temperature() -> None:
    engine = Engine()
    actual = await make(
        engine, samples=4, temperature=0.7, top_p=0.9, max_response_tokens=16
    ).evaluate(4)
    assert (actual.version, actual.questions, actual.planned) == (4, QUESTIONS, QUESTIONS)
    assert sorted((q, n) for q, n, _, _ in engine.asked) == sorted(
        (q, n) for q in range(QUESTIONS) for n in (1, 4)
    )
    for _, n, _, sampling in engine.asked:
        assert (sampling.temperature, sampling.top_p) == ((0.0, 1.0) if n == 1 else (0.7, 0.9))
        assert sampling.max_tokens == 16 and not sampling.logprobs
    record = actual.record("other/pass@2")
    assert record["accuracy"] == 1.0 and list(record["sets"]) == ["test", "other"]
    metrics = record["sets"]["other"]["metrics"]
    values = {name: metrics[name]["value"] for name in metrics}
    assert values == pytest.approx(
        {"greedy": 1.0, "avg@4": 0.5, "pass@2": 5 / 6, "pass@4": 1.0, "maj@4": 0.5}
    )
    assert record["best_by"] == pytest.approx(5 / 6)
    assert {
        response.final
        for response in actual.responses
        if response.question == 0 and response.name == "test"
    } == {
        "0",
        "-1",
    }


async def test_two_versions_meet_the_same_seeds_and_the_same_order() -> None:
    first = Engine()
    two = Engine()
    await make(first, samples=2).evaluate(4)
    two.version = 9
    await make(two, samples=2).evaluate(9)
    assert (
        first.asked == two.asked and len({seed for _, _, seed, _ in first.asked}) == QUESTIONS // 2
    )


class Records:
    """The records: each evaluation and its responses."""

    def __init__(self) -> None:
        self.written: list[tuple[dict[str, Any], Sequence[Judged]]] = []
        self.came = asyncio.Event()

    def write_evaluation(self, record: dict[str, Any], responses: Sequence[Judged]) -> None:
        self.written.append((record, responses))
        self.came.set()


def in_background(engine: Engine) -> tuple[BackgroundEvaluations, Records]:
    """Evaluations while versions are trained; every version is due."""
    records: Any = Records()
    due = Milestones(last=100, evaluate_every=1)
    evaluator = make(engine, overlap=True)
    return BackgroundEvaluations(evaluator, records, Timeline(None, ""), due), records


async def test_an_overlapped_evaluation_that_ends_in_time_is_whole() -> None:
    evaluations, records = in_background(Engine())
    evaluations.after_producing(4)
    assert evaluations.is_running
    await asyncio.wait_for(records.came.wait(), 5)
    await asyncio.sleep(0)
    assert not evaluations.is_running and records.written[0][0]["questions"] == QUESTIONS
    await evaluations.make_way(5)
    assert len(records.written) == 1, "it was told already"


async def test_one_that_is_cut_short_counts_the_questions_before_the_first_that_is_missing() -> (
    None
):
    engine = Engine()
    evaluations, records = in_background(engine)
    await evaluations.evaluator.evaluate(4)
    order = list(dict.fromkeys(question for question, *_ in engine.asked))
    engine.held = {order[5], order[8]}
    evaluations.after_producing(4)
    await asyncio.sleep(0.2)
    await asyncio.wait_for(evaluations.make_way(5), 5)
    record, responses = records.written.pop()
    assert (record["questions"], record["planned"]) == (5, QUESTIONS) and not records.written
    assert {int(response.answer) for response in responses} == set(order[:5]), (
        "not the short ones behind it"
    )
    assert sorted(engine.cancelled) == sorted(engine.held) and len(asyncio.all_tasks()) == 1, (
        "nothing goes on"
    )
    engine.held = {order[0]}
    engine.cancelled = []
    evaluations.after_producing(4)
    await asyncio.sleep(0.2)
    await evaluations.make_way(5)
    assert not records.written, "not one question is complete"


async def test_an_answer_of_other_weights_ends_the_evaluation() -> None:
    with pytest.raises(InvariantViolation, match="version 4 answered, version 5 is evaluated"):
        await make(Engine()).evaluate(5)


async def test_a_sample_beyond_the_runs_limits_ends_the_evaluation() -> None:
    with pytest.raises(
        EnvironmentFailed,
        match=r"sample 0 has 36 tokens .*, more than rollout.max_response_tokens = 24",
    ):
        await make(Engine(), TooLong).evaluate(4)


async def test_without_questions_there_is_no_evaluation() -> None:
    with pytest.raises(PaNpuError, match="no held-out prompts"):
        Evaluator(
            Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}}),
            {},
            None,
            None,
            None,
            None,
        )


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"sets": {"test": "b"}}, "is the name of data.test"),
        ({"sets": {"a b": "b"}}, "no name of a set"),
        ({"metric": "test/pass@3"}, "is none of test with one of greedy"),
        ({"metric": "aime/greedy"}, "SET/NAME"),
        ({"max_response_tokens": 1000}, "rollout.max_response_tokens = 256"),
        ({"top_p": 0.0}, "greater than 0"),
    ],
)
def test_keys_that_mean_nothing_are_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as raised:
        Config.model_validate(
            {"model": {"path": "m"}, "data": {"train": "t", "test": "a"}, "evaluate": keys}
        )
    assert words in str(raised.value)


def test_names_of_metrics_are_those_that_results_have() -> None:
    from pa_npu.config.rules.inputs import metric_names
    from pa_npu.evaluation.results import values_by_question
    from tests.unit.evaluation.test_results import judged

    for samples in (0, 1, 2, 3, 4, 5, 8, 12):
        responses = [judged(0, number, True) for number in range(samples)] + [
            judged(0, 0, True, kind="greedy")
        ]
        assert list(values_by_question(responses)) == metric_names(samples)

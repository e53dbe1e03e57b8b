"""Tasks of reasoning-gym make rows, the same again in every process, and score answers to them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pa_npu.config.schema import Config
from pa_npu.config.sections.inputs import DataConfig, Dataset, TrainingDataset
from pa_npu.config.sections.reward import RewardConfig, RewardFunction
from pa_npu.data import made_rows
from pa_npu.data.prompts import Prompt, load_prompts
from pa_npu.errors import DataError
from pa_npu.rewards.functions import RewardInput
from pa_npu.rewards.gym_reward import gym_reward
from pa_npu.rewards.pool import RewardPool

STAND_INS = str(Path(__file__).parents[2] / "helpers/stand_ins")
BESIDE = Path(__file__).parents[3] / ".venv-gym"
BOTH = "reasoning_gym:sums,letters"


@pytest.fixture(params=["stand-in", "package"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The library or its stand-in; the name of a task that adds numbers."""
    made_rows._cached_task.cache_clear()
    made_rows._cached_entry.cache_clear()
    if request.param == "package":
        if BESIDE.is_dir():
            monkeypatch.syspath_prepend(str(BESIDE))
        pytest.importorskip("reasoning_gym", reason="bash tests/run.sh nightly installs it")
        yield "chain_sum"
    else:
        monkeypatch.syspath_prepend(STAND_INS)
        monkeypatch.setenv("PYTHONPATH", STAND_INS, prepend=":")
        yield "sums"
    for name in list(sys.modules):
        if name.partition(".")[0] == "reasoning_gym":
            del sys.modules[name]


def load(dataset: Dataset, tokenizer: Any) -> tuple[Prompt, ...]:
    config = DataConfig(train="unused", max_prompt_tokens=4096, chat_template="never")
    return load_prompts(dataset, tokenizer, config, "data.train", needs_answer=False).prompts


def group_of(prompt: Prompt, *responses: str) -> RewardInput:
    return RewardInput(prompt.text, prompt.answer, responses, [3] * len(responses), prompt.row)


def test_rows_are_the_same_again_and_those_of_other_seeds_and_splits_are_others(
    library: str, tokenizer: Any
) -> None:
    path = f"reasoning_gym:{library}"
    first = load(TrainingDataset(path=path, max_rows=20), tokenizer)
    again = load(TrainingDataset(path=path, max_rows=20), tokenizer)
    assert len(first) == 20
    assert [prompt.identity for prompt in first] == [prompt.identity for prompt in again]
    questions = {prompt.text for prompt in first}
    held_out = load(Dataset(path=path, max_rows=20), tokenizer)
    other_seed = load(TrainingDataset(path=path, max_rows=20, seed=1), tokenizer)
    assert len(questions) > 15, "a task that asks the same shows nothing"
    for others in (held_out, other_seed):
        assert len(questions & {prompt.text for prompt in others}) < 5


def test_a_task_scores_the_answers_to_its_own_rows(library: str, tokenizer: Any) -> None:
    (prompt, *_) = load(TrainingDataset(path=f"reasoning_gym:{library}", max_rows=3), tokenizer)
    right = [
        prompt.answer,
        f"<answer>{prompt.answer}</answer> 7",
        f"so\n#### {prompt.answer}",
        rf"thus \boxed{{{prompt.answer}}}",
        f"<think>1</think>{prompt.answer}",
    ]
    wrong = [f"{prompt.answer}1", "", "<think>" + prompt.answer, "<answer>no</answer>"]
    rewards = gym_reward(group_of(prompt, *right, *wrong))
    assert rewards[: len(right)] == [1.0] * len(right)
    assert max(rewards[len(right) :]) < 0.9, "some tasks reward a part"


async def test_rows_without_an_answer_are_scored_and_rows_of_other_data_as_math_does(
    library: str, tokenizer: Any
) -> None:
    if library != "sums":
        pytest.skip("the stand-in has the task")
    _, letters = load(TrainingDataset(path=BOTH, max_rows=2), tokenizer)
    assert letters.answer == ""
    answer = "".join(reversed(letters.row["metadata"]["letters"]))
    math = RewardInput("1+1?", "2", ["#### 2", "#### 3"], [3, 3], {"question": "1+1?"})
    functions = (RewardFunction(name="reasoning_gym"),)
    async with RewardPool(RewardConfig(functions=functions)) as pool:
        of_task = await pool.score(group_of(letters, answer, "xyz"))
        of_math = await pool.score(math)
    assert of_task.total.tolist() == [1, 0] and of_task.correct.tolist() == [True, False]
    assert of_math.total.tolist() == [1, 0]
    assert of_task.errors == of_math.errors == ()


def test_another_release_that_makes_other_questions_is_an_error_and_no_zero(
    library: str, tokenizer: Any
) -> None:
    (prompt, *_) = load(TrainingDataset(path=f"reasoning_gym:{library}", max_rows=3), tokenizer)
    row = {**prompt.row, "question": "what the release before asked"}
    with pytest.raises(DataError, match="another question"):
        gym_reward(RewardInput(prompt.text, prompt.answer, [prompt.answer], [3], row))


def test_the_scorer_is_the_reward_unless_another_is_chosen() -> None:
    def names(reward: dict[str, Any], **algorithm: str) -> list[str]:
        tree = {
            "model": {"path": "m"},
            "data": {"train": [{"path": BOTH}, {"path": "other.jsonl"}]},
            "reward": reward,
            "algorithm": algorithm,
        }
        return [function.name for function in Config.model_validate(tree).reward.functions]

    assert names({}) == ["reasoning_gym"]
    assert names({"workers": 2}, name="dapo") == ["reasoning_gym", "overlong"]
    assert names({"functions": [{"name": "math"}]}) == ["math"]


@pytest.mark.parametrize(
    ("dataset", "named"),
    [
        ({"path": "reasoning_gym:"}, "names no task"),
        ({"path": "reasoning_gym:sums,,letters"}, "names no task"),
        ({"path": "reasoning_gym:summs"}, "did you mean sums?"),
        ({"path": "reasoning_gym:sums", "task_options": {"letters": {}}}, "task_options"),
        ({"path": "reasoning_gym:sums", "task_options": {"sums": {"max_trem": 3}}}, "max_trem"),
    ],
)
def test_wrong_tasks_and_options_are_one_line(
    dataset: dict[str, Any], named: str, library: str, tokenizer: Any
) -> None:
    if library != "sums":
        pytest.skip("the stand-in has the tasks")
    with pytest.raises(DataError, match=named) as refused:
        load(TrainingDataset(**dataset), tokenizer)
    assert "data.train" in str(refused.value) and "\n" not in str(refused.value)


def test_without_the_package_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match="pip install reasoning-gym"):
        load(TrainingDataset(path="reasoning_gym:sums"), tokenizer)

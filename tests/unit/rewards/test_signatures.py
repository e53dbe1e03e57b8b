"""Reward functions that were written for verl or TRL run unchanged; a signature that nobody knows is refused in one line."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from pa_npu.config.schema import Config
from pa_npu.config.sections.reward import RewardConfig, RewardFunction
from pa_npu.errors import DataError
from pa_npu.rewards.check import check_reward_functions
from pa_npu.rewards.functions import RewardInput
from pa_npu.rewards.pool import RewardPool

THEIRS = """
import asyncio, functools, re

# as in verl's documentation and recipes
def verl_plain(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k" and extra_info["index"] == 7
    return 1.0 if solution_str.strip().endswith(ground_truth) else 0.0

def verl_dictionary(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    right = solution_str.strip().endswith(ground_truth)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": solution_str}

def verl_short(solution_str, ground_truth, method="strict", format_score=0.1, score=1.0):
    return score if solution_str.endswith(ground_truth) else format_score

async def verl_async(data_source, solution_str, ground_truth, extra_info, reward_router_address=None):
    await asyncio.sleep(0)
    return {"score": float(solution_str.endswith(ground_truth))}

def verl_batch(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    assert len(data_sources) == len(ground_truths) == len(extra_infos)
    return [{"score": float(s.endswith(g))} if number else float(s.endswith(g))
            for number, (s, g) in enumerate(zip(solution_strs, ground_truths))]

def verl_without_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1.0}

def verl_with_more(data_source, solution_str, ground_truth, extra_info, temperature):
    return 1.0

class VerlObject:
    def __call__(self, data_source, solution_str, ground_truth, extra_info=None):
        return float(solution_str.endswith(ground_truth))

verl_object = VerlObject()
verl_partial = functools.partial(verl_short, format_score=0.25)

# as in TRL's documentation and examples
def trl_text(completions, **kwargs):
    return [float(len(completion)) for completion in completions]

def trl_columns(prompts, completions, ground_truth, **kwargs):
    matches = [re.search(r"\\\\boxed\\{(.*?)\\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]

def trl_conversation(completions, answer, **kwargs):
    responses = [completion[0]["content"] for completion in completions]
    assert all(completion[0]["role"] == "assistant" for completion in completions)
    return [1.0 if response.endswith(a) else 0.0 for response, a in zip(responses, answer)]

def trl_prompts(prompts, completions, level, **kwargs):
    assert prompts[0][-1] == {"role": "user", "content": "What is 6*7?"} and level == [3, 3]
    return [0.5 for _ in completions]

def trl_none(completions, task, **kwargs):
    return [1.0 if t == "math" else None for c, t in zip(completions, task)]

async def trl_async(prompts, completions, **kwargs):
    await asyncio.sleep(0)
    return [None if completion.endswith("41") else 1.0 for completion in completions]

def trl_logs(completions, log_metric=None, log_extra=None, **kwargs):
    log_metric("accuracy", 0.5)
    log_extra("length", [1, 2])
    return [1.0] * len(completions)

def trl_ids(completions, completion_ids, **kwargs):
    return [1.0] * len(completions)

def trl_default_ids(completions, completion_ids=None, trainer_state=None):
    return [1.0] * len(completions)

# of nobody
def unknown(response, reference):
    return 1.0

def openrlhf(queries, prompts, labels):
    return [1.0]

def keywords(**kwargs):
    return [1.0]

def of_the_group(group, scale=2.0):
    return [scale] * len(group.responses)
"""

VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "What is 6*7?"}],
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"index": 7},
}
TEXT_ROW = {"prompt": "What is 6*7?", "ground_truth": "42", "task": "code"}
CHAT_ROW = {
    "prompt": [{"role": "user", "content": "What is 6*7?"}],
    "answer": "42",
    "level": 3,
    "task": "math",
}
GSM8K_ROW = {"question": "What is 6*7?", "answer": "42", "level": 3}


@pytest.fixture(autouse=True)
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_rewards.py").write_text(THEIRS)
    monkeypatch.chdir(tmp_path)


def group(row: dict[str, Any], *responses: str) -> RewardInput:
    responses = responses or (r"So it is \boxed{42}", "So it is 41", "So it is 42")
    return RewardInput("<user>What is 6*7?<assistant>", "42", responses, [3] * len(responses), row)


def functions(*names: str) -> RewardConfig:
    return RewardConfig(
        functions=tuple(RewardFunction(name=f"their_rewards:{name}") for name in names)
    )


async def test_functions_of_verl_run_unchanged() -> None:
    rewards = {
        "verl_plain": [0.0, 0.0, 1.0],
        "verl_dictionary": [-1.0, -1.0, 1.0],
        "verl_short": [0.1, 0.1, 1.0],
        "verl_async": [0.0, 0.0, 1.0],
        "verl_batch": [0.0, 0.0, 1.0],
        "verl_object": [0.0, 0.0, 1.0],
        "verl_partial": [0.25, 0.25, 1.0],
    }
    async with RewardPool(functions(*rewards)) as pool:
        result = await pool.score(group(VERL_ROW))
    assert result.errors == ()
    for name, expected in rewards.items():
        assert result.functions[f"their_rewards:{name}"].tolist() == pytest.approx(expected), name


async def test_a_function_of_verl_gets_the_reference_answer_of_rows_of_another_layout() -> None:
    async with RewardPool(functions("verl_short")) as pool:
        assert (await pool.score(group(GSM8K_ROW))).total.tolist() == pytest.approx([0.1, 0.1, 1.0])


async def test_functions_of_trl_run_unchanged_on_texts() -> None:
    rewards = {
        "trl_text": [19.0, 11.0, 11.0],
        "trl_columns": [1.0, 0.0, 0.0],
        "trl_none": [0.0, 0.0, 0.0],
        "trl_async": [1.0, 0.0, 1.0],
        "trl_logs": [1.0, 1.0, 1.0],
        "trl_default_ids": [1.0, 1.0, 1.0],
    }
    async with RewardPool(functions(*rewards)) as pool:
        result = await pool.score(group(TEXT_ROW))
    assert result.errors == () and not result.no_verdict
    for name, expected in rewards.items():
        assert result.functions[f"their_rewards:{name}"].tolist() == expected, name


@pytest.mark.parametrize("row", [CHAT_ROW, GSM8K_ROW])
async def test_functions_of_trl_run_unchanged_on_conversations(row: dict[str, Any]) -> None:
    async with RewardPool(functions("trl_conversation", "trl_prompts")) as pool:
        result = await pool.score(group(row, "It is 42", "It is 41"))
    assert result.errors == () and result.total.tolist() == [1.5, 0.5]


async def test_a_dictionary_without_a_score_and_a_column_that_is_missing_say_so() -> None:
    async with RewardPool(functions("verl_without_score", "trl_columns")) as pool:
        result = await pool.score(group(GSM8K_ROW))
    assert result.total.tolist() == [0.0, 0.0, 0.0]
    reasons = " ".join(result.errors)
    assert "returned a dictionary without 'score' (it has 'acc')" in reasons
    assert (
        "takes ground_truth, which is no column of the row (it has question, answer, level)"
        in reasons
    )
    assert "their_rewards.py:" in reasons


def full(name: str) -> Config:
    reward = {"functions": [{"name": f"their_rewards:{name}"}]}
    return Config.model_validate({"model": {"path": "m"}, "data": {"train": "d"}, "reward": reward})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("unknown", r"takes \(response, reference\), which is neither one group, nor verl's"),
        ("openrlhf", r"takes \(queries, prompts, labels\), which is neither"),
        ("keywords", r"takes \(\*\*kwargs\), which is neither"),
        (
            "verl_with_more",
            "takes temperature, which verl's compute_score is not called with here; give it a "
            "default",
        ),
        (
            "trl_ids",
            "takes completion_ids, the tokens of the responses, which reward functions do not get "
            "here",
        ),
        ("trl_columns", "takes ground_truth, which is no column of the row"),
        ("verl_without_score", "returned a dictionary without 'score'"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_the_run_in_one_line(
    name: str, reason: str
) -> None:
    with pytest.raises(
        DataError, match=rf"reward\.functions: their_rewards:{name}.*{reason}"
    ) as refused:
        check_reward_functions(full(name), group(CHAT_ROW))
    assert "\n" not in str(refused.value) and "their_rewards.py:" in str(refused.value)


@pytest.mark.parametrize(
    "name", ["verl_dictionary", "verl_async", "trl_conversation", "of_the_group"]
)
def test_a_function_that_can_be_called_passes_the_check_before_a_run(name: str) -> None:
    row = VERL_ROW if name.startswith("verl") else CHAT_ROW
    assert check_reward_functions(full(name), group(row, "42", "41")) == []


def test_the_functions_of_this_test_have_the_signatures_that_their_names_say() -> None:
    """A control: none is called with a group by accident."""
    module: dict[str, Any] = {}
    exec(THEIRS, module)
    for name, function in module.items():
        if name.startswith(("verl_", "trl_")):
            with pytest.raises(TypeError):
                inspect.signature(function).bind(*[None] * 9)

"""The examples of docs/rewards.md do what the page says of them."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from pa_npu.config.load import load_config
from pa_npu.config.sections.reward import RewardConfig, RewardFunction
from pa_npu.data.prompts import load_training
from pa_npu.errors import DataError
from pa_npu.rewards.check import check_reward_functions
from pa_npu.rewards.functions import RewardInput, needs_answers
from pa_npu.rewards.pool import RewardPool
from tests.helpers.fake_judge import Answer, fake_judge
from tools.make_tiny_model import make_tokenizer

PAGE = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}[^\n]*\n(.*?)```", PAGE, flags=re.DOTALL)


def config(directory: Path, text: str, *overrides: str) -> Any:
    file = directory / "documented.yaml"
    file.write_text(text)
    return load_config([str(file)], ["model.path=m", "data.train=d.jsonl", *overrides])


def test_the_data_of_the_page_are_read_as_a_run_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = next(block for block in blocks("yaml") if "code:" in block)
    (tmp_path / "problems.jsonl").write_text(
        next(block for block in blocks("json") if "tests" in block)
    )
    (tmp_path / "documented.yaml").write_text(text)
    inputs = load_config([str(tmp_path / "documented.yaml")], ["model.path=m"])
    (prompts,) = load_training(
        inputs.data, make_tokenizer(), needs_answers(inputs.reward, inputs.environment)
    )
    assert [len(prompt.row["tests"]) for prompt in prompts.prompts] == [2, 2]
    compared = load_config(
        [str(tmp_path / "documented.yaml")],
        ["model.path=m", "reward.functions=[{name: code}, {name: math}]"],
    )
    with pytest.raises(DataError, match=r"no answer .*; rewards need one"):
        load_training(
            compared.data, make_tokenizer(), needs_answers(compared.reward, compared.environment)
        )


async def test_the_judge_of_the_page_reads_a_column_and_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "k")
    text = next(block for block in blocks("yaml") if "judge:" in block)
    with fake_judge(
        lambda message, _: Answer("fine. Score: 4" if "Translation: Dog" in message else "Score: 1")
    ) as judge:
        arguments = config(tmp_path, text, f"reward.judge.url={judge.url}")
        async with RewardPool(arguments.reward) as pool:
            group = RewardInput(
                "Translate", "", ["Dog. Answer: Dog", "Cat"], [3, 1], {"german": "Hund"}
            )
            result = await pool.score(group)
    assert result.functions["judge"].tolist() == [0.75, 0.0]
    assert result.total.tolist() == pytest.approx([0.7 * 0.75 + 0.3, 0.0])
    assert (
        all("Original: Hund" in message for message, _, _ in judge.asked)
        and judge.asked[0][1]["Authorization"] == "Bearer k"
    )


async def test_the_code_of_the_page_is_tested_by_its_rows(tmp_path: Path) -> None:
    inputs = config(
        tmp_path,
        next(block for block in blocks("yaml") if "name: code" in block),
        "reward.code.timeout_s=60",
    )
    rows = [json.loads(line) for line in blocks("json")[0].splitlines()]
    right = [
        "```python\nprint(2 * int(input()))\n```",
        "```python\ndef f(x):\n    return x + x\n```",
    ]
    async with RewardPool(inputs.reward) as pool:
        for row, program in zip(rows, right, strict=True):
            result = await pool.score(
                RewardInput(row["prompt"], "", [program, "no program"], [9, 2], row)
            )
            assert result.total.tolist() == [1.0, 0.0] and result.errors == ()


async def test_the_waiting_function_of_the_page_reads_a_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_waiting.py").write_text(
        next(block for block in blocks("python") if "async def" in block)
    )
    monkeypatch.chdir(tmp_path)
    functions = (RewardFunction(name="my_waiting:relevance"),)
    group = RewardInput("p", "", ["of cats", "of dogs"], [2, 2], {"topic": "cats"})
    async with RewardPool(RewardConfig(functions=functions)) as pool:
        assert (await pool.score(group)).total.tolist() == [1.0, 0.0]
    chosen = config(tmp_path, "", "reward.functions=[{name: 'my_waiting:relevance'}]")
    await asyncio.to_thread(check_reward_functions, chosen, group)


PORTING = (Path(__file__).parents[3] / "docs" / "porting_rewards.md").read_text(encoding="utf-8")


async def test_the_functions_of_the_page_on_porting_run_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in re.findall(r"```python file=(\S+)\n(.*?)```", PORTING, flags=re.DOTALL):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    (chosen,) = re.findall(r"```yaml\n(.*?)```", PORTING, flags=re.DOTALL)
    row = {"question": "What is 6*7?", "answer": "42", "task": "math"}
    group = RewardInput("What is 6*7?", "42", [r"It is \boxed{42}", "It is 42"], [3, 3], row)
    async with RewardPool(config(tmp_path, chosen).reward) as pool:
        result = await pool.score(group)
    assert result.errors == () and result.total.tolist() == [0.5, 1.0]
    async with RewardPool(
        RewardConfig(functions=(RewardFunction(name="my_trl_reward:only_code"),))
    ) as pool:
        result = await pool.score(group)
    assert result.errors == () and result.total.tolist() == [0.0, 0.0]

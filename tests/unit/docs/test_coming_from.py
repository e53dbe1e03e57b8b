"""What docs/coming_from.md shows runs as it stands there, beside what it is for: servers and packages are stand-ins."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.data.prompts import Prompt, load_training
from pa_npu.environments.registry import make_environment, opened
from pa_npu.rewards.functions import RewardInput, needs_answers
from pa_npu.rewards.pool import RewardPool
from pa_npu.samples.types import Sample
from tests.helpers.agents import TOKENIZER, Policy
from tests.unit.agents.test_openenv import Counting
from tools.make_tiny_model import END_OF_TURN

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
STAND_INS = ROOT / "tests" / "helpers" / "stand_ins"
QUESTION = {"role": "user", "content": "What is 6*7?"}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's files, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{STAND_INS}:{ROOT}")
    monkeypatch.syspath_prepend(str(STAND_INS))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in re.findall(r"```\w+ file=(\S+)\n(.*?)```", PAGE, flags=re.DOTALL):
        (tmp_path / name).write_text(text)
    (tmp_path / "train.jsonl").write_text('{"question": "What is 6*7?", "answer": "42"}\n')


def config(name: str, **others: object) -> Config:
    keys = {"model.path": "m", "data.max_prompt_tokens": 64, **others}
    if "data.train" not in keys and "train:" not in Path(name).read_text():
        keys["data.train"] = "train.jsonl"
    return load_config([name], [f"{key}={value}" for key, value in keys.items()])


def prompts_of(chosen: Config) -> list[Prompt]:
    needed = needs_answers(chosen.reward, chosen.environment)
    (prompts,) = load_training(chosen.data, TOKENIZER, needed)
    return list(prompts.prompts)


async def played(chosen: Config, prompt: Prompt, script: Any) -> Sample:
    async with opened(make_environment(chosen, TOKENIZER), 60.0) as environment:
        rollout = environment.rollout(prompt, 1, Policy(script))
        (sample,) = await asyncio.wait_for(rollout, 60.0)
    return sample


async def rewarded(chosen: Config, row: dict[str, Any]) -> list[float]:
    async with RewardPool(chosen.reward) as pool:
        group = RewardInput("What is 6*7?", "42", ["it is 42", "it is 41"], [3, 3], row)
        return (await pool.score(group)).total.tolist()


async def test_a_taskset_of_verifiers() -> None:
    text = Path("verifiers.yaml").read_text()
    named = "/opt/verifiers/bin/python"
    assert named in text
    Path("verifiers.yaml").write_text(text.replace(named, sys.executable))
    chosen = config("verifiers.yaml")
    prompt = prompts_of(chosen)[7]
    assert prompt.row["verifiers"]["environment"] == "train"
    sample = await played(chosen, prompt, lambda shown: f"#### 42{END_OF_TURN}")
    assert sample.reward == 1.0


async def test_a_server_of_openenv() -> None:
    server = Counting()
    app = web.Application()
    app.router.add_get("/ws", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        text = Path("openenv.yaml").read_text()
        assert "127.0.0.1:8000" in text
        address = f"127.0.0.1:{runner.addresses[0][1]}"
        Path("openenv.yaml").write_text(text.replace("127.0.0.1:8000", address))
        prompt = Prompt(4, np.zeros(3, np.int32), "", "q", {})
        sample = await played(
            config("openenv.yaml"),
            prompt,
            lambda shown: f"#{shown.count('<|user|>')}{END_OF_TURN}",
        )
    finally:
        await runner.cleanup()
    assert sample.reward == 1.5


async def test_a_class_of_trl() -> None:
    row = {"question": "Spend it.", "budget": 3}
    prompt = Prompt(0, np.zeros(3, np.int32), "", "q", row, messages=(QUESTION,))
    call = '<tool_call>{"name": "buy", "arguments": {"price": 3}}</tool_call>'
    sample = await played(
        config("trl_class.yaml"),
        prompt,
        lambda shown: f"{'done' if '0 left' in shown else call}{END_OF_TURN}",
    )
    assert sample.reward == 1.0


async def test_a_reward_function_of_trl() -> None:
    row = {"question": "What is 6*7?", "answer": "42"}
    assert await rewarded(config("trl_reward.yaml"), row) == [1.0, 0.0]


async def test_a_reward_function_of_verl() -> None:
    import json

    row = {
        "data_source": "sums",
        "prompt": [QUESTION],
        "reward_model": {"style": "rule", "ground_truth": "42"},
        "extra_info": {"split": "train"},
    }
    Path("train.jsonl").write_text(json.dumps(row) + "\n")
    chosen = config("verl_reward.yaml")
    (prompt,) = prompts_of(chosen)
    assert prompt.answer == "42" and await rewarded(chosen, prompt.row) == [1.0, 0.0]


def test_tasks_of_reasoning_gym() -> None:
    chosen = config("reasoning_gym.yaml")
    assert [function.name for function in chosen.reward.functions] == ["reasoning_gym"]
    assert len(prompts_of(chosen)) == 1000


async def test_an_agent() -> None:
    shutil.copy(ROOT / "examples" / "agent_client.py", "agent_client.py")
    chosen = config("agent.yaml")
    (prompt,) = prompts_of(chosen)
    sample = await played(chosen, prompt, lambda shown: f"#### 42{END_OF_TURN}")
    assert sample.reward == 1.0

"""verifiers itself plays episodes: a taskset with tools, named as on its hub, one with several turns, and a run that learns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from pa_npu.config.schema import Config
from pa_npu.data.prompts import Prompt, load_prompts
from pa_npu.environments.registry import make_environment, opened
from pa_npu.samples.types import Sample
from tests.helpers.agents import TOKENIZER, Policy, ids
from tests.helpers.environments import needs, python_of
from tests.helpers.launched import Launched
from tools import make_tiny_model
from tools.make_tiny_model import END_OF_TURN

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.integration,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    needs("verifiers"),
]

TIMEOUT_S = 300.0
SUBPROCESS = {"runtime": {"type": "subprocess"}}
CALL = '<tool_call>{"name": "calculator", "arguments": {"x": "6*7"}}</tool_call>'


@pytest.fixture(autouse=True)
def with_tasksets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "helpers" / "tasksets"), prepend=":")
    (tmp_path / "questions.jsonl").write_text(
        '{"question": "What is 6*7?", "answer": "#### 42"}\n' * 3
    )


def calculator(directory: Path, harness: str, **more: Any) -> dict[str, Any]:
    """The environment of the taskset with a tool. Its id is that of a package of the hub."""
    taskset = {"id": "someone/calculator-v1@0.1.0", "questions": str(directory / "questions.jsonl")}
    return {
        "taskset": {**taskset, **more},
        "agent": {"harness": {"id": harness}, **SUBPROCESS},
    }


def config(env: dict[str, Any], **select: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "verifiers:train", "max_prompt_tokens": 512},
            "rollout": {"max_response_tokens": 400},
            "environment": {
                "name": "verifiers",
                "timeout_s": TIMEOUT_S,
                "options": {
                    "python": str(python_of("verifiers")),
                    "environments": {"train": {"env": env, "select": select}},
                },
            },
        }
    )


async def played(
    chosen: Config, script: Callable[[str], str], max_rows: int | None = None
) -> tuple[list[Sample], Prompt]:
    """Two sessions of the first task."""
    dataset = chosen.data.datasets[0].model_copy(update={"max_rows": max_rows})
    prompt, *_ = load_prompts(
        dataset, TOKENIZER, chosen.data, "data.train", needs_answer=False
    ).prompts
    async with opened(make_environment(chosen, TOKENIZER), 60.0) as environment:
        rollout = environment.rollout(prompt, 2, Policy(script))
        return await asyncio.wait_for(rollout, TIMEOUT_S), prompt


def assert_trained_as_written(samples: list[Sample], *texts: str) -> None:
    """Every sample trains these answers, byte by byte as the policy wrote them, and no other."""
    written = [token for text in texts for token in ids(text)]
    for sample in samples:
        assert sample.tokens[sample.trained].tolist() == written


@pytest.mark.parametrize("harness", ["null", "calculator-v1"])
async def test_a_taskset_with_a_tool_named_as_on_the_hub(harness: str, tmp_path: Path) -> None:
    """With verifiers' own harness, whose tool is a server, and with the taskset's."""
    first, then = f"so {CALL}{END_OF_TURN}", f"#### 42{END_OF_TURN}"
    samples, prompt = await played(
        config(calculator(tmp_path, harness), limit=2),
        lambda shown: then if "<|user|>42" in shown else first,
    )
    assert prompt.answer == "42" and prompt.row["question"] == "What is 6*7?"
    assert [sample.reward for sample in samples] == [1.0, 1.0]
    assert_trained_as_written(samples, first, then)


async def test_a_taskset_whose_user_asks_again() -> None:
    env = {"taskset": {"id": "dialogue-v1"}, "solver": SUBPROCESS, "turns": 3}
    samples, prompt = await played(
        config(env), lambda shown: f"{42 if 'Again.' in shown else 41}{END_OF_TURN}", max_rows=4
    )
    assert prompt.row["question"] == "Guess, 0."
    assert [sample.reward for sample in samples] == [0.5, 0.5]
    assert_trained_as_written(samples, f"41{END_OF_TURN}", f"42{END_OF_TURN}")


async def test_a_task_that_cannot_be_scored_fails_its_session(tmp_path: Path) -> None:
    env = calculator(tmp_path, "calculator-v1", broken=True)
    samples, _ = await played(config(env), lambda shown: f"#### 42{END_OF_TURN}")
    assert [sample.reward for sample in samples] == [0.0, 0.0], "nothing is left to train"


def test_a_run_learns_to_call_the_tool_of_a_taskset(tmp_path: Path) -> None:
    made = tmp_path / "made"
    arguments = ["--out", str(made), "--task", "agent", "--train-questions", "256"]
    assert make_tiny_model.main(arguments) == 0
    (tmp_path / "questions.jsonl").write_text((made / "train.jsonl").read_text())
    keys = {
        "run": {"dir": str(tmp_path / "run"), "device": "cpu"},
        "model": {"path": str(made / "model"), "dtype": "fp32"},
        "data": {"train": "verifiers:train", "max_prompt_tokens": 64},
        "environment": {
            "name": "verifiers",
            "max_turns": 3,
            "options": {
                "python": str(python_of("verifiers")),
                "environments": {"train": {"env": calculator(tmp_path, "calculator-v1")}},
            },
        },
        "rollout": {
            "backend": "vllm",
            "responses_per_prompt": 8,
            "max_response_tokens": 120,
            "kv_cache_gib": 0.25,
        },
        "optimizer": {"learning_rate": 1e-3, "warmup_iterations": 2},
        "schedule": {"iterations": 10, "prompts_per_iteration": 8},
        "telemetry": {"trackers": []},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(keys))
    run = Launched(tmp_path, "run", "--config", str(file))
    try:
        assert run.popen.wait(800) == 0, run.output
    finally:
        run.close()
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in metrics]
    assert all(record["logprob_diff_max"] < 1e-3 for record in records), (
        "the trainer saw what the engine wrote"
    )
    rewards = [record["reward_mean"] for record in records]
    assert rewards[0] > 0 and np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1, rewards

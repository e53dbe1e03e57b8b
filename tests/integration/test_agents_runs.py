"""Runs of agents end to end: periodic equals synchronous bit for bit, also where an engine or the coordinator is killed."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.launched import ENGINE_SERVERS, Launched, find, settings
from tools import make_tiny_model

# two runs each; in CI one process is killed beside stand-in engines (test_coordinator_matrix.py)
pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 400.0
GROUPS, RESPONSES, ITERATIONS = 4, 2, 2

# Three requests to a task, eight tasks at once: a question, a sub-agent's, and one that goes on
# with the first.
AGENT = """
import json, os, threading, urllib.request
def ask(url, key, body=None):
    headers = {"Authorization": "Bearer " + key, "x-program": os.environ["PROGRAM"]}
    data = None if body is None else json.dumps(body).encode()
    return json.load(urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60))
def say(role, content): return {"role": role, "content": content}
def serve():
    while True:
        taken = ask(os.environ["GATEWAY_URL"] + "/tasks?wait_s=20", os.environ["OPENAI_API_KEY"])
        if taken["task"] is None: continue
        url, key, asked = taken["base_url"], taken["api_key"], say("user", taken["task"]["row"]["question"])
        def chat(*messages):
            body = {"messages": messages, "max_tokens": 6}
            return ask(url + "/chat/completions", key, body)["choices"][0]["message"]["content"]
        first = chat(asked)
        aside = chat(say("user", "aside " + first[:2]))
        last = chat(asked, say("assistant", first), say("user", "more"))
        ask(url.removesuffix("/v1") + "/reward", key, {"reward": len(set(first + aside + last)) / 8})
        ask(url.removesuffix("/v1") + "/end", key, {})
for _ in range(8): threading.Thread(target=serve).start()
"""


@pytest.fixture
def launch(tiny: Path, tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    started: list[Launched] = []

    def start(name: str, **others: object) -> Launched:
        keys: dict[str, object] = {
            "environment.name": "agents",
            "environment.max_turns": 3,
            "agent.command": shlex.join([sys.executable, str(agent)]),
            "agent.programs": 1,
            "data.max_prompt_tokens": 64,
            "data.test": "null",
            "rollout.responses_per_prompt": RESPONSES,
            "rollout.max_response_tokens": 48,
            "schedule.iterations": ITERATIONS,
            "schedule.prompts_per_iteration": GROUPS,
            "schedule.order": "prompt",
            "optimizer.learning_rate": "1e-3",
            "telemetry.trackers": "[]",
        }
        (tmp_path / name).mkdir()
        started.append(
            Launched(
                tmp_path / name, "run", *settings(tiny, tmp_path / name / "run", **(keys | others))
            )
        )
        return started[-1]

    yield start
    for run in started:
        run.close()


def ended(run: Launched) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Final weights, and the records of a run that has ended well."""
    assert run.popen.wait(TIMEOUT_S) == 0, run.output
    directory = run.output_file.parent / "run"
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        environment = record["environment"]
        assert environment["sessions_done"] == GROUPS * RESPONSES and record["unique_ratio"] < 1
        assert environment["tokens"] == record["tokens_prompt"] + record["tokens_response"]
    return load_file(directory / "hf" / "model.safetensors"), records


def assert_equal(first: Any, second: Any) -> None:
    assert [(r["loss"], r["reward_mean"]) for r in first[1]] == [
        (r["loss"], r["reward_mean"]) for r in second[1]
    ]
    different = [
        name for name, tensor in second[0].items() if not torch.equal(first[0][name], tensor)
    ]
    assert not different, f"tensors that differ: {different}"
    assert any(record["reward_std"] > 0 for record in first[1]), (
        "negative control: there is something to learn"
    )


def test_periodic_equals_synchronous_to_the_bit(launch: Callable[..., Launched]) -> None:
    synchronous = ended(launch("synchronous", schedule__stream="false"))
    assert_equal(ended(launch("periodic")), synchronous)


@pytest.mark.parametrize(
    ("victim", "message"),
    [
        (ENGINE_SERVERS["transformers"], "; started again (1 of run.restarts"),
        ("coordinator.main", "starting coordinator and trainers again"),
    ],
)
def test_a_run_with_a_killed_process_equals_the_quiet_one(
    launch: Callable[..., Launched], victim: str, message: str
) -> None:
    quiet = ended(launch("quiet"))
    run = launch("disturbed", checkpoint__every=1)
    log = run.output_file.parent / "run" / "logs" / "coordinator.log"
    run.wait_for(
        lambda: log.is_file() and "weight version 1 on 1 engine " in log.read_text(),
        "iteration 1",
        TIMEOUT_S,
    )
    process = find(run, victim)
    assert process is not None
    os.kill(process, signal.SIGKILL)
    disturbed = ended(run)
    assert message in run.output, run.output
    assert_equal(disturbed, quiet)


def test_the_example_trains_what_was_sampled_and_learns_to_call_its_tool(tmp_path: Path) -> None:
    """configs/grpo_tiny_agent.yaml with an engine of transformers."""
    made = tmp_path / "made"
    assert (
        make_tiny_model.main(["--out", str(made), "--task", "agent", "--train-questions", "256"])
        == 0
    )
    keys = {
        "run.dir": tmp_path / "run",
        "model.path": made / "model",
        "data.train": made / "train.jsonl",
        "data.test": f"{{path: {made / 'test.jsonl'}, max_rows: 50}}",
        "rollout.backend": "transformers",
        "schedule.iterations": 12,
    }
    config = ["--config", str(ROOT / "configs" / "grpo_tiny_agent.yaml")]
    run = Launched(tmp_path, "run", *config, *(f"{key}={value}" for key, value in keys.items()))
    try:
        assert run.popen.wait(800) == 0, run.output
    finally:
        run.close()
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert all(record["logprob_diff_max"] < 1e-3 for record in records), (
        "the trainer saw what the engine wrote"
    )
    rewards = [record["reward_mean"] for record in records]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1, rewards
    before, *_, after = (
        json.loads(line)
        for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()
    )
    assert before["accuracy"] < 0.1 and after["accuracy"] > 0.4, (
        before["accuracy"],
        after["accuracy"],
    )

"""Runs with images: engines and trainers agree after each publish, schedules change nothing, a resumed run is the same."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pa_npu.checkpoints.directories import directory_name
from pa_npu.telemetry.image_store import DIRECTORY
from pa_npu.telemetry.sample_store import read_samples, sample_iterations
from tests.helpers.engine_process import KEY
from tests.helpers.launched import ROOT, Launched, settings
from tests.helpers.vision import make_vision, write_squares
from tools import make_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

TIMEOUT_S = 500.0
HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
needs_torchvision = pytest.mark.skipif(
    not HAS_TORCHVISION, reason="launch/install_cpu.sh vision installs torchvision"
)

Run = Callable[..., tuple[Path, list[dict[str, Any]]]]

# Two turns with an image each, the first one's by the row.
AGENT = """
import json, os, urllib.request
def ask(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
task = json.load(open(os.environ["TASK_FILE"]))
def shown(text):
    image = {"type": "image_url", "image_url": {"url": task["images"][0]}}
    return {"role": "user", "content": [image, {"type": "text", "text": text}]}
def chat(*messages):
    body = {"messages": messages, "max_tokens": 4}
    return ask(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]
first = chat(shown("How many?"))
last = chat(shown("How many?"), first, shown("Sure?"))
reward = len(set(first["content"] + last["content"])) / 8
ask(os.environ["SESSION_URL"] + "/reward", {"reward": reward})
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a random model on drawn images; gives the run's directory and its records. killed: part
    of the command line of a process that is killed after the first iteration.
    """
    launched: list[Launched] = []

    def start(
        tied: bool = False, killed: str | None = None, **keys: object
    ) -> tuple[Path, list[dict[str, Any]]]:
        directory = tmp_path_factory.mktemp("run")
        make_vision(directory, tied=tied)
        write_squares(directory, 12)
        chosen: dict[str, object] = {
            "trainer__backend": "fsdp",
            "model__vision": "trained",
            "data__max_prompt_tokens": 64,
            "data__test": "null",
            "schedule__iterations": 3,
            "schedule__order": "prompt",
            "rollout__responses_per_prompt": 4,
            "reward__functions": '[{name: format, pattern: "[0-4]"}]',
            "optimizer__learning_rate": "1e-3",
            "telemetry__trackers": "[]",
        }
        arguments = settings(directory, directory / "run", **{**chosen, **keys})
        launched.append(Launched(directory, "run", *arguments, variables=KEY))
        metrics = directory / "run" / "metrics.jsonl"
        if killed is not None:
            launched[-1].wait_for(metrics.exists, "the first iteration", TIMEOUT_S)
            family = launched[-1].family()
            victim = next(pid for pid, command in family.items() if killed in command)
            os.kill(victim, signal.SIGKILL)
        launched[-1].popen.wait(TIMEOUT_S)
        assert launched[-1].popen.returncode == 0, launched[-1].output
        lines = metrics.read_text().splitlines()
        return directory / "run", [json.loads(line) for line in lines]

    yield start
    for item in launched:
        item.close()


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "hf" / "model.safetensors")


@pytest.fixture(scope="module")
def periodic(run: Run) -> tuple[Path, list[dict[str, Any]]]:
    return run(checkpoint__every=1)


def test_a_periodic_run_ends_with_the_synchronous_runs_weights(run: Run, periodic: Any) -> None:
    directory, records = periodic
    synchronous, _ = run(schedule__stream="false")
    ours, theirs = weights(directory), weights(synchronous)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(record["logprob_diff_max"] < 1e-5 for record in records), records
    before = load_file(directory.parent / "model" / "model.safetensors")
    changed = {name.split(".")[0] for name in ours if not torch.equal(ours[name], before[name])}
    assert {"visual", "model"} <= changed
    assert list((directory / DIRECTORY).glob("*.png")), "images of kept samples, for the viewer"


@pytest.mark.nightly  # checkpoints of towers: test_images_fsdp.py
def test_a_run_that_goes_on_from_a_checkpoint_ends_with_the_same_weights(
    run: Run, periodic: Any
) -> None:
    directory, _ = periodic
    checkpoint = directory / "checkpoints" / directory_name(1)
    resumed, _ = run(checkpoint__load=checkpoint)
    ours, theirs = weights(directory), weights(resumed)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.nightly
@pytest.mark.parametrize("killed", ["pa_npu.trainer", "engines.transformers.server"])
def test_a_run_whose_process_is_killed_ends_with_the_same_weights(
    run: Run, periodic: Any, killed: str
) -> None:
    directory, _ = periodic
    disturbed, records = run(killed=killed, checkpoint__every=1, schedule__iterations=3)
    ours, theirs = weights(directory), weights(disturbed)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [record["iteration"] for record in records] == [0, 1, 2]


@pytest.mark.nightly
def test_agents_that_show_images_in_two_turns_train_alike_in_periodic_and_synchronous_runs(
    run: Run, tmp_path: Path
) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    keys = {
        "environment__name": "agents",
        "environment__max_turns": 2,
        "agent__command": shlex.join([sys.executable, str(agent)]),
        "agent__concurrent": 2,
        "rollout__max_response_tokens": 64,
        "rollout__responses_per_prompt": 2,
        "schedule__iterations": 2,
        "schedule__prompts_per_iteration": 2,
    }
    periodic, records = run(**keys)
    synchronous, _ = run(schedule__stream="false", **keys)
    ours, theirs = weights(periodic), weights(synchronous)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(record["logprob_diff_max"] < 1e-5 for record in records), records
    samples = [
        sample
        for iteration in sample_iterations(periodic)
        for sample in read_samples(periodic, iteration)
    ]
    assert len(samples) == 8
    assert all(len(sample["attachments"]) == 2 for sample in samples), "one image a turn"


@pytest.mark.nightly  # after each of ten publishes, with controls: test_images_vllm.py
@needs_torchvision
@pytest.mark.parametrize(("vision", "tied"), [("frozen", False), ("trained", True)])
def test_vllm_and_trainers_agree_and_a_frozen_tower_is_sent_once(
    run: Run, vision: str, tied: bool
) -> None:
    keys = {"rollout__backend": "vllm", "model__vision": vision, "schedule__iterations": 3}
    directory, records = run(tied, **keys)
    assert len(records) == 3
    assert all(record["logprob_diff_max"] < 1e-4 for record in records), records
    logs = "".join(file.read_text() for file in (directory / "logs").glob("*trainer*"))
    sent = [float(size) for size in re.findall(r"published version \d+, ([\d.]+) MiB", logs)]
    assert len(sent) >= 3, logs
    if vision == "frozen":
        assert sent[1] == sent[2] < sent[0]
    else:
        assert sent[0] == sent[1] == sent[2]


@pytest.mark.nightly
def test_the_tiny_task_is_learned(tmp_path: Path) -> None:
    made = tmp_path / "tiny_vision"
    options = ["--task", "vision", "--out", str(made), "--train-questions", "512"]
    assert make_tiny_model.main(options) == 0
    arguments = [
        "--config",
        str(ROOT / "configs" / "grpo_tiny_vision.yaml"),
        f"run.dir={tmp_path / 'run'}",
        f"model.path={made / 'model'}",
        f"data.train={made / 'train.parquet'}",
        "data.answer_column=reward_model.ground_truth",
        f"data.test={made / 'test.jsonl'}",
    ]
    launched = Launched(tmp_path, "run", *arguments, variables=KEY)
    try:
        launched.popen.wait(TIMEOUT_S)
        assert launched.popen.returncode == 0, launched.output
    finally:
        launched.close()
    lines = (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()
    first, *_, last = [json.loads(line)["accuracy"] for line in lines]
    assert first < 0.3 and last > 0.9

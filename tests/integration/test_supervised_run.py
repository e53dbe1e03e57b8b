"""Whole runs of the supervised stage: no engine, a loss that falls, and the same weights after a kill as without one."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.launched import ENGINE_SERVERS, Launched, find, random_tiny

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc"),
]

ITERATIONS = 6
TIMEOUT_S = 600.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_tiny(tmp_path_factory.mktemp("tiny"))


def arguments(tiny: Path, run_dir: Path, backend: str, **others: object) -> list[str]:
    keys: dict[str, object] = {
        "run.dir": run_dir,
        "run.device": "cpu",
        "model.path": tiny / "model",
        "model.dtype": "fp32",
        "data.train": tiny / "train.jsonl",
        "data.test": tiny / "test.jsonl",
        "data.max_prompt_tokens": 32,
        "algorithm.name": "sft",
        "trainer.backend": backend,
        "rollout.responses_per_prompt": 4,
        "rollout.max_response_tokens": 32,
        "schedule.iterations": ITERATIONS,
        "schedule.prompts_per_iteration": 4,
        "schedule.evaluate_every": 3,
        "checkpoint.every": 2,
        "optimizer.learning_rate": 3e-3,
        "telemetry.trackers": "[]",
    } | {name.replace("__", "."): value for name, value in others.items()}
    return [f"{key}={value}" for key, value in keys.items()]


def records(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    file = run_dir / name
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    (file,) = (run_dir / "hf").glob("*.safetensors")
    return load_file(file)


def ends(run: Launched) -> set[str]:
    """Waits for the run's end; returns the command lines of all processes that it had."""
    seen: set[str] = set()

    def ended() -> bool:
        seen.update(run.family().values())
        return "Total time" in run.output

    run.wait_for(ended, "the run's end", TIMEOUT_S)
    assert run.popen.wait(60) == 0, run.output
    return seen


@pytest.mark.parametrize(
    ("backend", "keys"),
    [
        pytest.param("fsdp", {}, id="fsdp"),
        # in CI a run on pairs is killed on megatron: test_preferences_run.py
        pytest.param("megatron", {}, id="megatron", marks=pytest.mark.nightly),
        pytest.param("fsdp", {"lora__rank": 4}, id="adapters", marks=pytest.mark.nightly),
    ],
)
def test_a_run_that_was_killed_ends_with_the_weights_of_one_that_was_not(
    backend: str, keys: dict[str, object], tiny: Path, tmp_path: Path
) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    run = Launched(tmp_path, "run", *arguments(tiny, undisturbed, backend, **keys))
    try:
        seen = ends(run)
    finally:
        run.close()
    assert any("coordinator.main" in line for line in seen), "the family was looked at"
    assert not [line for line in seen if any(name in line for name in ENGINE_SERVERS.values())]

    overrides = arguments(tiny, killed, backend, **keys)
    run = Launched(tmp_path, "run", *overrides)
    try:
        run.wait_for(lambda: len(records(killed)) >= 3, "three iterations", TIMEOUT_S)
        trainer = find(run, "trainer.main")
        assert trainer is not None
        os.kill(trainer, signal.SIGKILL)  # the run goes on by itself
        run.wait_for(lambda: len(records(killed)) >= 5, "five iterations", TIMEOUT_S)
        run.family()
        os.killpg(run.popen.pid, signal.SIGKILL)
        run.popen.wait()
    finally:
        run.close()
    run = Launched(tmp_path, "run", *overrides, "checkpoint.resume=auto")
    try:
        ends(run)
    finally:
        run.close()

    first, second = weights(undisturbed), weights(killed)
    assert first.keys() == second.keys()
    assert not [name for name in first if not torch.equal(first[name], second[name])]
    for name in ("loss", "grad_norm", "rows", "epoch", "tokens_response"):
        expected = [record[name] for record in records(undisturbed)]
        assert [record[name] for record in records(killed)] == expected, name
    evaluations = [
        [(e["version"], e["sets"]) for e in records(directory, "evaluations.jsonl")]
        for directory in (undisturbed, killed)
    ]
    assert evaluations[0] == evaluations[1]
    versions = [version for version, _ in evaluations[0]]
    assert versions == [0, 3, ITERATIONS]
    losses = [record["loss"] for record in records(undisturbed)]
    assert losses[-1] < 0.8 * losses[0]
    held_out = [sets["test"]["loss"] for _, sets in evaluations[0]]
    assert held_out[-1] < 0.8 * held_out[0]

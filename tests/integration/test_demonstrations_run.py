"""Whole runs with demonstrations beside the reward: periodic equals synchronous to the bit, and so does a run that was killed."""

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

from tests.helpers.launched import Launched, find, random_tiny, settings

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc"),
]

ITERATIONS, TIMEOUT_S = 4, 500.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_tiny(tmp_path_factory.mktemp("tiny"))


def arguments(tiny: Path, run_dir: Path, backend: str, **others: object) -> list[str]:
    keys: dict[str, object] = {
        "data__test": "null",
        "data__demonstrations": f"{{path: {tiny / 'train.jsonl'}, weight: 0.1, share: 0.5}}",
        "trainer__backend": backend,
        "rollout__max_response_tokens": 32,
        "reward__functions": '[{name: format, pattern: "[0-4]"}]',
        "schedule__iterations": ITERATIONS,
        "schedule__order": "prompt",
        "checkpoint__every": 1,
        "optimizer__learning_rate": "1e-3",
        "telemetry__trackers": "[]",
    }
    return settings(tiny, run_dir, **(keys | others))


def records(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    (file,) = (run_dir / "hf").glob("*.safetensors")
    return load_file(file)


def run_to_the_end(directory: Path, *arguments: str) -> None:
    run = Launched(directory, "run", *arguments)
    try:
        run.wait_for(lambda: "Total time" in run.output, "the run's end", TIMEOUT_S)
        assert run.popen.wait(60) == 0, run.output
    finally:
        run.close()


# a run on rows that is killed: test_supervised_run.py; updates: unit/algorithm/test_demonstrations.py
@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_periodic_synchronous_and_killed_runs_end_with_the_same_weights(
    backend: str, tiny: Path, tmp_path: Path
) -> None:
    periodic, synchronous, killed, without = (
        tmp_path / name for name in ("periodic", "synchronous", "killed", "without")
    )
    run_to_the_end(tmp_path, *arguments(tiny, periodic, backend))
    run_to_the_end(tmp_path, *arguments(tiny, synchronous, backend, schedule__stream="false"))

    overrides = arguments(tiny, killed, backend)
    run = Launched(tmp_path, "run", *overrides)
    try:
        run.wait_for(lambda: len(records(killed)) >= 1, "an iteration", TIMEOUT_S)
        trainer = find(run, "trainer.main")
        assert trainer is not None
        os.kill(trainer, signal.SIGKILL)  # the run goes on by itself
        run.wait_for(lambda: len(records(killed)) >= 2, "two iterations", TIMEOUT_S)
        run.family()
        os.killpg(run.popen.pid, signal.SIGKILL)
        run.popen.wait()
    finally:
        run.close()
    run_to_the_end(tmp_path, *overrides, "checkpoint.resume=auto")

    expected = weights(periodic)
    for another in (synchronous, killed):
        actual = weights(another)
        assert expected.keys() == actual.keys()
        assert not [name for name in expected if not torch.equal(expected[name], actual[name])]
    for record in records(periodic):
        assert record["demonstrations"]["rows"] == 2 * 2
        assert record["groups"] == 4
        assert record["demonstration_loss"] > 0
        assert record["loss"] == pytest.approx(
            record["policy_loss"] + record["demonstration_loss"], rel=1e-4, abs=1e-6
        )
    if backend == "megatron":
        bare = arguments(tiny, without, backend, data__demonstrations="null")
        run_to_the_end(tmp_path, *bare)
        others = weights(without)
        assert [name for name in expected if not torch.equal(expected[name], others[name])]

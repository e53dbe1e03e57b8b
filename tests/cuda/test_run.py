"""Whole runs on one GPU, engine and trainer on it in turn (placement.colocate), weights between them by CUDA's IPC handles.

The engine is the transformers one, which needs nothing that trainers do not need.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pa_npu.telemetry.records import read_records
from tests.helpers.launched import ENGINE_SERVERS, Launched, find, random_tiny, settings

pytestmark = pytest.mark.timeout(600)
TIMEOUT_S = 400.0
ITERATIONS = 4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_tiny(tmp_path_factory.mktemp("tiny"))


Launch = Callable[..., Launched]
Result = tuple[list[dict[str, Any]], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def launch(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    started: list[Launched] = []

    def start(**others: object) -> Launched:
        keys = {
            "run__device": "cuda",
            "placement__colocate": "true",
            "schedule__stream": "false",
            "schedule__order": "prompt",
            "rollout__responses_per_prompt": 4,
            "rollout__max_response_tokens": 16,
            "schedule__prompts_per_iteration": 8,
            "schedule__iterations": ITERATIONS,
            "reward__functions": '[{name: format, pattern: "[0-4]"}]',
            "data__test": "null",
            "optimizer__learning_rate": "1e-3",
        }
        directory = tmp_path_factory.mktemp("run")
        started.append(
            Launched(directory, "run", *settings(tiny, directory / "run", **(keys | others)))
        )
        return started[-1]

    yield start
    for run in started:
        run.close()


@pytest.fixture(scope="module")
def in_fp32(launch: Launch) -> Result:
    return ended(launch(model__dtype="fp32"))


@pytest.fixture(scope="module")
def in_bf16(launch: Launch) -> Result:
    return ended(launch(model__dtype="bf16"))


def ended(run: Launched) -> Result:
    """Its records and its last weights."""
    directory = run.output_file.parent / "run"
    logs = "".join(
        f"\n--- {file.name}\n{file.read_text()[-3000:]}"
        for file in sorted(directory.glob("logs/*.log"))
    )
    assert run.popen.wait(TIMEOUT_S) == 0, run.output + logs
    return read_records(directory), load_file(directory / "hf" / "model.safetensors")


@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-4), ("bf16", 5e-2)])
def test_engine_and_trainer_agree_on_one_gpu(
    dtype: str, bound: float, request: pytest.FixtureRequest
) -> None:
    records, _ = request.getfixturevalue(f"in_{dtype}")
    assert len(records) == ITERATIONS and len({record["loss"] for record in records}) > 1, (
        "there is something to learn"
    )
    for record in records:
        assert record["devices"] == 1
        assert 0 <= record["logprob_diff_mean"] < bound, "both compute with the same weights"
        assert record["memory_trainer_device_bytes"] > 0


def test_two_runs_end_with_the_same_bits(launch: Launch, in_bf16: Result) -> None:
    _, weights = ended(launch(model__dtype="bf16"))
    assert all(torch.equal(weights[name], tensor) for name, tensor in in_bf16[1].items())


def test_an_engine_that_is_killed_changes_nothing(launch: Launch, in_fp32: Result) -> None:
    run = launch(model__dtype="fp32")
    run.wait_for(lambda: f"2/{ITERATIONS})" in run.output, "the second iteration", TIMEOUT_S)
    engine = find(run, ENGINE_SERVERS["transformers"])
    assert engine is not None
    os.kill(engine, signal.SIGKILL)
    records, weights = ended(run)
    assert (
        len(records) == ITERATIONS and "engine-0: killed by SIGKILL; started again" in run.output
    ), run.output
    assert all(torch.equal(weights[name], tensor) for name, tensor in in_fp32[1].items())

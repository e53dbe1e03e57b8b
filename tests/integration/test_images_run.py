"""Runs with images: engines and trainers agree after each publish, schedules change nothing, a resumed run is the same."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pa_npu.checkpoints.directories import directory_name
from pa_npu.telemetry.image_store import DIRECTORY
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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a random model on drawn images; gives the run's directory and its records."""
    launched: list[Launched] = []

    def start(tied: bool = False, **keys: object) -> tuple[Path, list[dict[str, Any]]]:
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
        launched[-1].popen.wait(TIMEOUT_S)
        assert launched[-1].popen.returncode == 0, launched[-1].output
        lines = (directory / "run" / "metrics.jsonl").read_text().splitlines()
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
@needs_torchvision
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_vllm_and_trainers_agree_after_every_one_of_ten_publishes(run: Run, tied: bool) -> None:
    keys = {"rollout__backend": "vllm", "schedule__iterations": 10}
    _, records = run(tied, **keys)
    assert len(records) == 10
    assert all(record["logprob_diff_max"] < 1e-4 for record in records), records


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

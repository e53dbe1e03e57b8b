"""Shared-prompt packing in the whole trainer: every parameter's gradient equals that of separate sequences, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.models import make_model
from tests.helpers.trainer_rank import Job, run_job
from tests.integration.test_trainer_parity import LAYOUTS, make_config

# AdamW's first step is -lr g / (|g| + epsilon). With an epsilon far above every gradient it is -(lr
# / epsilon) g: the exported weights tell the gradient of every parameter, whatever ranks it was
# spread over.
LINEAR_STEP = {
    "learning_rate": 1e4,
    "epsilon": 1e4,
    "clip_grad": 0.0,
    "weight_decay": 0.0,
    "warmup_iterations": 0,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", tied=False)


def gradients(
    model: Path, directory: Path, **sections: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Gradient of every HF tensor in the first iteration, and the iteration's report."""
    config = make_config(model, directory, optimizer=LINEAR_STEP, **sections)
    (report,) = run_job(Job(config, directory, last=1, export=str(directory / "hf")))
    before = load_file(model / "model.safetensors")
    after = {
        name: tensor
        for file in (directory / "hf").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    return {name: before[name].double() - after[name].double() for name in before}, report


@pytest.fixture(scope="module")
def separate(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    return gradients(model, tmp_path_factory.mktemp("separate"), attention={"shared_prompt": False})


@pytest.mark.parametrize("layout", ["single", "TP2 full", "PP2"])
def test_every_gradient_equals_that_of_separate_sequences(
    layout: str,
    model: Path,
    separate: tuple[dict[str, torch.Tensor], dict[str, float]],
    tmp_path: Path,
) -> None:
    """fp32: within 2e-5 of each tensor's largest gradient (the difference of fp32 weights resolves
    about 1e-6 of it).
    """
    trainer = LAYOUTS.get(layout, {"devices": 1})
    ours, report = gradients(model, tmp_path, trainer=trainer)
    expected, expected_report = separate
    assert report["tokens_computed"] < expected_report["tokens_computed"], "nothing was shared"
    for name in ("loss", "grad_norm", "kl", "entropy", "logprob_diff_max"):
        assert report[name] == pytest.approx(expected_report[name], rel=1e-4, abs=1e-7), name
    for name, gradient in expected.items():
        largest = gradient.abs().max()
        assert largest > 1e-4, f"{name} has no gradient to compare"
        difference = ((ours[name] - gradient).abs().max() / largest).item()
        assert difference < 2e-5 + 2e-7 / largest.item(), (
            f"{name}: {difference:.2e} of its largest gradient"
        )

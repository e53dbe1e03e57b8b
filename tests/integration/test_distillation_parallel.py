"""Distillation on several ranks: neither tensor nor pipeline stages, context groups nor FSDP's shards change an update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.models import make_model
from tests.helpers.trainer_rank import Job, run_job
from tests.integration.test_trainer_parity import make_config

pytestmark = pytest.mark.integration

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"devices": 2, "tensor_parallel": 2},
    "PP2": {"devices": 2, "pipeline_parallel": 2},
    "PP2, teacher apart": {
        "devices": 2,
        "pipeline_parallel": 2,
        "frozen_pass": "separate",
    },
    "FSDP2, unequal": {"devices": 2, "backend": "fsdp"},
    "C2": {"devices": 2, "context_parallel": 2},
    "C2, fsdp": {"devices": 2, "context_parallel": 2, "backend": "fsdp"},
}


def run(
    directory: Path, models: tuple[Path, Path], trainer: dict[str, Any], divergence: str
) -> list[dict[str, float]]:
    policy, teacher = models
    config = make_config(
        policy,
        directory,
        trainer=trainer,
        optimizer={"warmup_iterations": 0, "epsilon": 1e-4},
        algorithm={"name": "distill", "distill_divergence": divergence, "distill_top_k": 7},
        teacher={"large": {"model": str(teacher)}},
    )
    job = Job(
        config, directory, last=2, export=str(directory / "hf"), module="tests.helpers.unequal_rank"
    )
    job.options["shares"] = [[0, 1, 2], [3]] if config.mesh.data == 2 else [[0, 1, 2, 3]]
    return run_job(job, 120)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return (
        make_model(tmp_path_factory.mktemp("policy"), tied=True),
        make_model(tmp_path_factory.mktemp("teacher"), "llama", seed=2, hidden=128, layers=4),
    )


@pytest.mark.parametrize(
    ("layout", "divergence"),
    [
        ("TP2", "forward"),
        pytest.param("TP2", "js", marks=pytest.mark.nightly),
        pytest.param("PP2", "reverse", marks=pytest.mark.nightly),
        pytest.param("PP2, teacher apart", "reverse", marks=pytest.mark.nightly),
        ("FSDP2, unequal", "js"),
        pytest.param("C2", "js", marks=pytest.mark.nightly),
        pytest.param("C2, fsdp", "forward", marks=pytest.mark.nightly),
    ],
)
def test_ranks_that_share_a_teacher_train_as_one(
    layout: str, divergence: str, models: tuple[Path, Path], tmp_path: Path
) -> None:
    """The teacher's most likely tokens lie on either rank's part of the vocabulary; of FSDP's ranks
    one has three groups and one has one.
    """
    one = run(tmp_path / "one", models, {"devices": 1}, divergence)
    several = run(tmp_path / "several", models, LAYOUTS[layout], divergence)
    for ours, expected in zip(several, one, strict=True):
        for name in ("loss", "grad_norm", "teacher_divergence", "teacher_kl"):
            assert ours[name] == pytest.approx(expected[name], rel=2e-5, abs=1e-7), name
    assert several[0]["teacher_divergence"] != pytest.approx(
        several[1]["teacher_divergence"], rel=1e-3
    ), "the first update must show in the second"

"""One pass of policy, old policy and reference gives bit for bit what three passes give, on every kind of parallel layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers.megatron import model_config
from tests.helpers.model_rank import launch, microbatches
from tests.helpers.models import make_model
from tests.helpers.passes import compare_passes

pytestmark = pytest.mark.integration

TWO_RANKS: dict[str, dict[str, Any]] = {
    "PP2": {"pipeline_parallel": 2},
    "PP2 selective": {"pipeline_parallel": 2, "recompute": "selective"},
    "TP2": {"tensor_parallel": 2},
}
FOUR_RANKS = {"TP2 PP2 full": {"tensor_parallel": 2, "pipeline_parallel": 2, "recompute": "full"}}


def make_models(directory: Path, family: str, tied: bool) -> dict[str, Path]:
    names = ("policy", "old", "reference")
    return {
        name: make_model(directory / name, family, tied=tied, seed=seed)
        for seed, name in enumerate(names)
    }


def assert_no_difference(result: dict[str, float], name: str) -> None:
    assert (
        result["largest gradient"] > 0.1
        and min(result["old apart"], result["reference apart"]) > 0.1
    ), (
        f"{name}: gradients and differences between the models must not vanish for this to show "
        f"anything: {result}"
    )
    differences = {key: result[key] for key in ("policy", "old", "reference", "gradients")}
    assert set(differences.values()) == {0.0}, f"{name}: {differences}"


def launch_passes(
    directory: Path, models: dict[str, Path], layouts: dict[str, dict[str, Any]], devices: int
) -> dict[str, Any]:
    passes = {
        name: {"trainer": {"devices": devices, **trainer}} for name, trainer in layouts.items()
    }
    job = {
        "model": str(models["policy"]),
        "old": str(models["old"]),
        "reference": str(models["reference"]),
    }
    return launch({**job, "passes": passes}, devices, directory)


def test_one_rank(tmp_path: Path) -> None:
    models = make_models(tmp_path, "qwen3", tied=True)
    config = model_config(models["policy"])
    result = compare_passes(config, models, dist.HashStore(), 0, 1, microbatches())
    assert_no_difference(result, "PP1")


def test_two_ranks(tmp_path: Path) -> None:
    results = launch_passes(tmp_path, make_models(tmp_path, "qwen3", tied=True), TWO_RANKS, 2)
    assert len(results) == len(TWO_RANKS)
    for name, result in results.items():
        assert_no_difference(result, name)


def test_four_ranks_with_every_kind_of_parallelism_at_once(tmp_path: Path) -> None:
    results = launch_passes(tmp_path, make_models(tmp_path, "qwen2", tied=False), FOUR_RANKS, 4)
    assert len(results) == len(FOUR_RANKS)
    for name, result in results.items():
        assert_no_difference(result, name)

"""Ranks of a real trainer that share a mixture's experts, with an auxiliary loss, also with unequal numbers of microbatches."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.models import make_model
from tests.helpers.trainer_rank import Job, run_job
from tests.integration.test_trainer_parity import make_config

pytestmark = pytest.mark.integration

LAYOUTS: dict[str, dict[str, Any]] = {
    "EP2": {"devices": 2, "expert_parallel": 2},
    "TP2 EP2": {
        "devices": 2,
        "tensor_parallel": 2,
        "expert_parallel": 2,
        "recompute": "full",
    },
    "EP2, frozen models apart": {"devices": 2, "expert_parallel": 2, "frozen_pass": "separate"},
    "C2 EP2": {"devices": 2, "context_parallel": 2, "expert_parallel": 2},
    "PP2 x EP2": {"devices": 4, "pipeline_parallel": 2, "expert_parallel": 2},
}

ONE_REPLICA = ("TP2 EP2", "C2 EP2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3_moe")


def run(
    model: Path, directory: Path, trainer: dict[str, Any], shares: list[list[int]], replay: str
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Two iterations in which each replica has the groups of its share: reports and weights."""
    config = make_config(
        model,
        directory,
        trainer=trainer,
        optimizer={"warmup_iterations": 0, "epsilon": 1e-4},
        algorithm={"router_aux_coef": 0.3, "router_replay": replay},
    )
    job = Job(
        config, directory, last=2, export=str(directory / "hf"), module="tests.helpers.unequal_rank"
    )
    job.options["shares"] = shares
    reports = run_job(job, 120)
    return reports, {
        k: v
        for file in (directory / "hf").glob("*.safetensors")
        for k, v in load_file(file).items()
    }


@pytest.fixture(scope="module")
def single(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By router_replay, each run once."""
    return cache(
        lambda replay: run(
            model, tmp_path_factory.mktemp(replay), {"devices": 1}, [[0, 1, 2, 3]], replay
        )
    )


@pytest.mark.parametrize(
    ("layout", "replay"),
    [
        pytest.param(
            name,
            replay,
            marks=[] if (name, replay) == ("EP2", "rollout") else [pytest.mark.nightly],
        )
        for name in LAYOUTS
        for replay in ("none", "rollout")
    ],
)
def test_ranks_that_share_experts_train_as_one_also_with_unequal_numbers_of_microbatches(
    layout: str, replay: str, model: Path, single: Any, tmp_path: Path
) -> None:
    """Three groups and one, then one and three: updates, probes and weights are those of one rank,
    and fillers count nowhere.

    Tensor-parallel ranks, and those of a context group, are one replica, which has all groups. With replay tokens go to random
    experts, and a few have no expert choices.
    """
    expected, weights = single(replay)
    unequal = [[[0, 1, 2], [3]], [[0], [1, 2, 3]]]
    for shares in [[[0, 1, 2, 3]]] if layout in ONE_REPLICA else unequal:
        reports, ours = run(model, tmp_path / str(len(shares[0])), LAYOUTS[layout], shares, replay)
        for iteration, (report, wanted) in enumerate(zip(reports, expected, strict=True)):
            for name in ("microbatches", "tokens_response", "expert_choices_missing"):
                assert report.get(name) == wanted.get(name), (
                    f"{shares}, iteration {iteration}, {name}"
                )
            assert ("replay_changed" in report) == (replay == "rollout")
            for name in ("replay_changed",) * (replay == "rollout") + (
                "loss",
                "grad_norm",
                "kl",
                "entropy",
                "probe_max",
                "logprob_diff_max",
            ):
                assert report[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-7), (
                    f"{shares}, iteration {iteration}, {name}"
                )
        assert ours.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(
                ours[name], weight, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
            )
    before = load_file(model / "model.safetensors")
    assert all((weights[name] - before[name]).abs().max() > 1e-5 for name in weights), (
        "every tensor was trained"
    )

"""I7 on real ranks: an update whose gradient is not the sum it claims ends the run, on every backend, however it is spread.

The clean runs of tests/integration/test_trainer_parity.py and test_trainer_kl_reward.py go through
the same checks.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import step_faults
from tests.helpers.gradient_faults import EXPERTS, FAULTS, RATIOS, REPLICAS, faults_of
from tests.helpers.models import make_model
from tests.helpers.trainer_rank import Job, run_job
from tests.integration.test_trainer_parity import make_config

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"devices": 1},
    "PP2": {"devices": 2, "pipeline_parallel": 2},
    "DP2": {"devices": 2},
    "DP2, not sharded": {"devices": 2, "distributed_optimizer": False},
    "DP2, reduced at the end": {"devices": 2},
    "fsdp": {"devices": 1, "backend": "fsdp"},
    "fsdp, DP2": {"devices": 2, "backend": "fsdp"},
    "toy": {"devices": 1, "backend": "tests.helpers.toy_backend:BACKEND"},
    "toy, DP2": {"devices": 2, "backend": "tests.helpers.toy_backend:BACKEND"},
}
MIXTURES: dict[str, dict[str, Any]] = {
    "EP2": {"devices": 2, "expert_parallel": 2},
    "EP2 of DP4": {"devices": 4, "expert_parallel": 2},
}
TWICE = {"updates_per_iteration": 2}
STEPS: dict[str, dict[str, Any]] = {
    "TP2": {"devices": 2, "tensor_parallel": 2},
    "PP2": {"devices": 2, "pipeline_parallel": 2},
    "DP2": {"devices": 2},
    "DP2, not sharded": {"devices": 2, "distributed_optimizer": False},
    "fsdp, DP2": {"devices": 2, "backend": "fsdp"},
    "fsdp, copies": {"devices": 2, "backend": "fsdp", "shards": 1},
}
"""Layouts whose steps and losses are broken; one rank of every backend is in
tests/helpers/backend_fault_conformance.py.
"""
FEW_STEPS = [
    ("TP2", "bf16", "the gradient behind the log-probs doubled"),
    ("DP2", "bf16", "the step skipped"),
    ("DP2", "fp32", step_faults.LOST),
    ("fsdp, DP2", "fp32", step_faults.LOST),
    ("TP2", "bf16", step_faults.NOT_SHARED),
    ("DP2", "bf16", step_faults.KEPT_FROM),
    ("PP2", "fp32", step_faults.EMBEDDING),
]
ONLY_OF = {
    step_faults.LOST: ("DP2", "fsdp, DP2"),
    step_faults.KEPT_FROM: ("DP2",),
    step_faults.NOT_SHARED: ("TP2", "DP2, not sharded", "fsdp, copies"),
    step_faults.EMBEDDING: ("PP2",),
}
"""Layouts that can have a fault; what is not named here, all can."""
ALL_STEPS = [
    (layout, dtype, fault)
    for layout in STEPS
    for dtype in ("fp32", "bf16")
    for fault in step_faults.ALL
    if (fault != step_faults.COPIES or (dtype == "bf16" and "fsdp" not in layout))
    and layout in ONLY_OF.get(fault, STEPS)
    and (layout != "fsdp, copies" or fault == step_faults.NOT_SHARED)
]
FEW = [  # what each layout adds; the others are nightly
    ("PP2", "fp32", "a backward dropped"),
    ("DP2", "bf16", RATIOS[1]),
    ("DP2", "bf16", REPLICAS),
    ("DP2, not sharded", "fp32", "advantages negated on one replica"),
    ("DP2, reduced at the end", "fp32", REPLICAS),
    ("fsdp, DP2", "fp32", "a backward run twice"),
    ("toy, DP2", "fp32", REPLICAS),
    ("EP2 of DP4", "bf16", EXPERTS),
]
ALL = [
    (layout, dtype, fault)
    for layout, trainer in LAYOUTS.items()
    for dtype in ("fp32", "bf16")
    for fault in faults_of(2, trainer["devices"] // trainer.get("pipeline_parallel", 1))
] + [
    *(("EP2", dtype, fault) for dtype in ("fp32", "bf16") for fault in faults_of(2, 2)),
    *(("EP2 of DP4", dtype, EXPERTS) for dtype in ("fp32", "bf16")),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By whether it is a mixture."""
    directory = tmp_path_factory.mktemp("model")
    return {
        "dense": make_model(directory / "dense", "qwen2", tied=True),
        "mixture": make_model(directory / "mixture", "qwen3_moe"),
    }


def job(layout: str, dtype: str, model: dict[str, Path], directory: Path, **options: Any) -> Job:
    config = make_config(
        model["mixture" if layout in MIXTURES else "dense"],
        directory,
        trainer=MIXTURES.get(layout) or LAYOUTS[layout],
        schedule={**TWICE, "prompts_per_iteration": 8},
        microbatch={"responses": 2},
        optimizer={"warmup_iterations": 0, "learning_rate": 1e-3},
    )
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    if layout.endswith("reduced at the end"):
        options["bucket_mib"] = 0.0
    return Job(config, directory, last=2, options=options)


def step_job(
    layout: str, dtype: str, model: dict[str, Path], directory: Path, **options: Any
) -> Job:
    sections = {name: dict(keys) for name, keys in step_faults.KEYS.items()}
    sections["schedule"] |= {**TWICE, "prompts_per_iteration": 8}
    config = make_config(
        model["dense"],
        directory,
        trainer=STEPS[layout],
        microbatch={"responses": 2},
        publish={"noise_margin": None},
        **sections,
    )
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    return Job(config, directory, last=2, options=options)


@pytest.mark.parametrize(
    ("layout", "dtype", "fault"),
    [pytest.param(*case, marks=[] if case in FEW else [pytest.mark.nightly]) for case in ALL],
)
def test_a_gradient_that_is_another_sum_ends_the_run(
    layout: str, dtype: str, fault: str, model: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError) as ended:
        run_job(job(layout, dtype, model, tmp_path, fault=fault), 60)
    assert re.search(f"InvariantViolation: I7 gradient: .*{FAULTS[fault]}", str(ended.value)), str(
        ended.value
    )[-3000:]


@pytest.mark.parametrize(
    ("layout", "dtype", "fault"),
    [
        pytest.param(*case, marks=[] if case in FEW_STEPS else [pytest.mark.nightly])
        for case in ALL_STEPS
    ],
)
def test_a_step_or_a_loss_that_is_another_one_ends_the_run(
    layout: str, dtype: str, fault: str, model: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError) as ended:
        run_job(step_job(layout, dtype, model, tmp_path, fault=fault), 60)
    message = f"InvariantViolation: I7 .*({step_faults.ALL[fault]})"
    assert re.search(message, str(ended.value)), str(ended.value)[-3000:]


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.nightly) for name in STEPS]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_without_a_fault_the_same_steps_pass(
    layout: str, dtype: str, model: dict[str, Path], tmp_path: Path
) -> None:
    made = step_job(layout, dtype, model, tmp_path)
    made.last = 4
    assert len(run_job(made, 120)) == 4


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.nightly) for name in [*LAYOUTS, *MIXTURES]]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_without_a_fault_the_same_run_ends_well(
    layout: str, dtype: str, model: dict[str, Path], tmp_path: Path
) -> None:
    reports = run_job(job(layout, dtype, model, tmp_path), 120)
    assert len(reports) == 2 and reports[1]["kl"] > 0 and reports[0]["grad_norm"] > 0


def test_a_toy_backend_gives_the_update_of_megatron(model: dict[str, Path], tmp_path: Path) -> None:
    """Over two replicas and two updates an iteration, chosen by its name alone."""
    actual = {}
    for layout in ("DP2", "toy, DP2"):
        made = job(layout, "fp32", model, tmp_path / layout)
        made.export = str(tmp_path / layout / "hf")
        reports = run_job(made, 120)
        actual[layout] = reports, load_file(tmp_path / layout / "hf" / "model.safetensors")
    (expected, weights), (reports, ours) = actual.values()
    for ours_of, wanted in zip(reports, expected, strict=True):
        for name in (
            "loss",
            "grad_norm",
            "kl",
            "entropy",
            "clip_ratio",
            "tokens_response",
            "microbatches",
        ):
            assert ours_of[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-6), name
    for name, tensor in ours.items():
        torch.testing.assert_close(
            tensor,
            weights[name],
            rtol=1e-3,
            atol=1e-5,
            msg=lambda text, name=name: f"{name}: {text}",
        )

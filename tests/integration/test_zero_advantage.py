"""schedule.skip_zero_advantage: groups whose advantages are 0 are computed nowhere, and the weights are the same to the bit.

Prepared groups through the real ranks, buffer, iterator, backends, step and checks (I2, I7); of
five groups two have equal rewards, and in one iteration all have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.megatron import model_config
from tests.helpers.models import make_model
from tests.helpers.trainer_rank import Job, run_job

pytestmark = pytest.mark.integration

GROUPS = 10
RESPONSES = 4
# 40% of the groups, then all of them, then 40% again, so that the moments of the step of a zero
# gradient show in the next one
EQUAL = [[1, 3, 6, 9], list(range(GROUPS)), [0, 1, 2, 8]]


def trained(
    model: Path, directory: Path, skips: bool, *, order: list[int] | None = None, **sections: Any
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """The weights after three iterations, and the trainers' reports."""
    base: dict[str, dict[str, Any]] = {
        "run": {"dir": str(directory), "deterministic": True},
        "rollout": {"responses_per_prompt": RESPONSES, "max_response_tokens": 16},
        "schedule": {
            "prompts_per_iteration": GROUPS,
            "order": "prompt" if order is None else "completion",
            "iterations": len(EQUAL),
            "skip_zero_advantage": skips,
        },
        "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.1},
        "checkpoint": {"every": 0},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    job = Job(
        model_config(model, **base),
        directory,
        last=len(EQUAL),
        export=str(directory / "hf"),
        order=order,
        options={"equal": EQUAL},
    )
    reports = run_job(job)
    weights: dict[str, torch.Tensor] = {}
    for file in sorted((directory / "hf").glob("*.safetensors")):
        weights |= load_file(file)
    return weights, reports


def equal_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    """The names of weights that differ."""
    assert first.keys() == second.keys()
    assert first
    return [name for name, weight in first.items() if not torch.equal(weight, second[name])]


LAYOUTS = {
    "megatron": {"trainer": {"devices": 1}},
    "megatron, two replicas": {"trainer": {"devices": 2}},
    "megatron, distributed optimizer": {
        "trainer": {"devices": 2, "distributed_optimizer": True},
    },
    "megatron, tensor parallel": {"trainer": {"devices": 2, "tensor_parallel": 2}},
    "megatron, pipeline": {"trainer": {"devices": 2, "pipeline_parallel": 2}},
    "megatron, pieces of groups": {"trainer": {"devices": 1}, "microbatch": {"responses": 2}},
    "megatron, two updates": {
        "trainer": {"devices": 1},
        "schedule": {"updates_per_iteration": 2},
    },
    "fsdp": {"trainer": {"backend": "fsdp", "devices": 1}},
    "fsdp, two shards": {"trainer": {"backend": "fsdp", "devices": 2}},
    "fsdp, two shards, pieces of groups": {
        "trainer": {"backend": "fsdp", "devices": 2},
        "microbatch": {"responses": 2},
    },
    "fsdp, adapters": {
        "trainer": {"backend": "fsdp", "devices": 1},
        "lora": {"rank": 4},
        "checkpoint": {"export_hf": "merged"},
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_weights_are_those_of_a_run_that_computes_all_groups(
    layout: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model")
    every, computed = trained(model, tmp_path / "every", False, **LAYOUTS[layout])
    skipped, fewer = trained(model, tmp_path / "skipped", True, **LAYOUTS[layout])
    assert equal_bits(every, skipped) == []
    before = load_file(model / "model.safetensors")
    assert any(not torch.equal(before[name], skipped[name]) for name in before), "nothing moved"
    for with_all, with_fewer in zip(computed, fewer, strict=True):
        assert with_fewer["grad_norm"] == with_all["grad_norm"]
        assert with_fewer["loss"] == pytest.approx(with_all["loss"], rel=1e-6, abs=1e-9)
        assert with_fewer["tokens_computed"] < with_all["tokens_computed"]
    assert fewer[1]["tokens_computed"] == 0
    assert fewer[1]["grad_norm"] == 0.0
    assert "entropy" not in fewer[1], "no mean where nothing was computed"


def test_in_order_of_completion_only_the_order_of_sums_differs(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    order = [3, 0, 7, 1, 9, 2, 4, 8, 6, 5]
    layout = LAYOUTS["fsdp, two shards"]
    every, _ = trained(model, tmp_path / "every", False, order=order, **layout)
    skipped, _ = trained(model, tmp_path / "skipped", True, order=order, **layout)
    for name, weight in every.items():
        torch.testing.assert_close(weight, skipped[name], rtol=1e-4, atol=1e-6, msg=name)


def test_groups_that_share_a_microbatch_differ_by_rounding_alone(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    packed: dict[str, Any] = {"trainer": {"devices": 1}, "microbatch": {"max_tokens": 64}}
    every, _ = trained(model, tmp_path / "every", False, **packed)
    skipped, _ = trained(model, tmp_path / "skipped", True, **packed)
    for name, weight in every.items():
        torch.testing.assert_close(weight, skipped[name], rtol=1e-4, atol=1e-5, msg=name)

"""trainer.context_parallel: two ranks that share every sequence train as one does, on both backends, beside TP, PP and EP."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pa_npu.checkpoints import directories as store
from tests.helpers.megatron import model_config
from tests.helpers.models import make_model
from tests.helpers.trainer_rank import Job, run_job

pytestmark = pytest.mark.integration

FSDP = {"backend": "fsdp"}


def weights(directory: Path) -> dict[str, torch.Tensor]:
    actual = {}
    for file in directory.glob("*.safetensors"):
        actual |= load_file(file)
    return actual


def job(
    model: Path,
    directory: Path,
    trainer: dict[str, Any],
    *,
    first: int = 0,
    load: Path | None = None,
    **sections: dict[str, Any],
) -> Job:
    """Two iterations of two updates with a reference and an old policy, or the second alone."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"dir": str(directory), "deterministic": True},
        "trainer": trainer,
        "rollout": {"responses_per_prompt": 4, "max_response_tokens": 16},
        "schedule": {
            "prompts_per_iteration": 4,
            "updates_per_iteration": 2,
            "order": "prompt",
            "iterations": 2,
        },
        "algorithm": {"kl_coef": 0.01},
        "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.1},
        "checkpoint": {"every": 1, "export_hf": True},
    }
    if load is not None:
        tree["checkpoint"]["load"] = str(load)
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    config = model_config(model, **tree)
    return Job(config, directory, first=first, last=2, export=str(directory / "hf"))


def assert_same_training(
    one: Path, another: Path, *reports: list[dict[str, float]], atol: float = 1e-5
) -> None:
    """The same gradient norms, losses and exported weights, but for rounding, of which AdamW makes up
    to a hundredth of an update where a gradient is near 0.
    """
    for key in ("grad_norm", "loss", "entropy", "tokens_response", "kl"):
        first, second = ([report[key] for report in of_run] for of_run in reports)
        assert second == pytest.approx(first, rel=2e-5, abs=1e-7), key
    theirs = weights(one)
    ours = weights(another)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(
            ours[name], tensor, rtol=1e-5, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_gradients_and_logprobs_of_two_ranks_are_those_of_transformers(
    backend: str, tmp_path: Path
) -> None:
    """fp32, in chunks of the LM head, recomputed; shared, in trees, separate and packed."""
    model = make_model(tmp_path / "model", "qwen2", tied=True)
    errors = errors_of(model, tmp_path / "job", backend, 2)
    assert errors.keys() == {"shared", "trees", "separate", "packed"}
    for name, of_case in errors.items():
        assert of_case["logprobs"] < 5e-6, name
        assert of_case["gradients"] < 2e-5, name


def errors_of(
    model: Path, directory: Path, backend: str, ranks: int, dtype: str = "fp32"
) -> dict[str, dict[str, float]]:
    """Returns how far ranks that share each sequence are from transformers in fp32, by case."""
    trainer: dict[str, Any] = {"backend": backend, "devices": ranks, "context_parallel": ranks}
    trainer["recompute"] = "full"
    if backend == "megatron":
        trainer["distributed_optimizer"] = False
    config = model_config(
        model,
        run={"dir": str(directory)},
        trainer=trainer,
        model={"head_chunk_tokens": 4, "dtype": dtype},
        algorithm={"entropy_coef": 0.1},
    )
    found: Any = run_job(Job(config, directory, module="tests.helpers.context_gradients"))
    (errors,) = found
    return errors


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_in_bf16_two_ranks_are_as_near_to_fp32_as_one_is(backend: str, tmp_path: Path) -> None:
    """Gradients of keys and values add up in fp32, so that dividing a sequence rounds no more."""
    model = make_model(tmp_path / "model", "qwen2", tied=True)
    one = errors_of(model, tmp_path / "one", backend, 1, "bf16")
    two = errors_of(model, tmp_path / "two", backend, 2, "bf16")
    for name, of_one in one.items():
        assert 1e-3 < of_one["distance"] < 0.1, f"{name}: bf16 must show, and not lose the gradient"
        assert two[name]["distance"] < 1.2 * of_one["distance"], name
        assert two[name]["logprobs"] < 1.5 * of_one["logprobs"], name


@pytest.mark.parametrize(
    "rank",
    [pytest.param(0, id="weights"), pytest.param(3, id="adapters", marks=pytest.mark.nightly)],
)
def test_two_ranks_of_a_context_group_train_as_one_and_one_goes_on_from_their_checkpoint(
    rank: int, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", "qwen2", tied=True)
    sections: dict[str, Any] = {"lora": {"rank": rank}}
    if rank:
        sections["checkpoint"] = {"export_hf": "merged"}
    one = run_job(job(model, tmp_path / "one", {**FSDP, "devices": 1}, **sections))
    both = {**FSDP, "devices": 2, "context_parallel": 2, "recompute": "full"}
    two = run_job(job(model, tmp_path / "two", both, **sections))
    assert_same_training(tmp_path / "one" / "hf", tmp_path / "two" / "hf", one, two)

    again = run_job(job(model, tmp_path / "again", both, **sections))
    for key in ("grad_norm", "loss", "entropy", "kl", "logprob_diff_mean"):
        assert [r[key] for r in again] == [r[key] for r in two], f"two runs differ in {key}"
    first = weights(tmp_path / "two" / "hf")
    second = weights(tmp_path / "again" / "hf")
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())

    middle = tmp_path / "two" / "checkpoints" / store.directory_name(1)
    alone = job(model, tmp_path / "alone", {**FSDP, "devices": 1}, first=1, load=middle, **sections)
    resumed = run_job(alone)
    assert_same_training(tmp_path / "two" / "hf", tmp_path / "alone" / "hf", two[1:], resumed)


@dataclass(frozen=True)
class OneRank:
    """A model, and what one rank of Megatron makes of it."""

    model: Path
    exported: Path
    reports: list[dict[str, float]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    directory = tmp_path_factory.mktemp("alone")
    model = make_model(directory / "model", "qwen3", tied=True)
    reports = run_job(job(model, directory / "one", {"devices": 1}))
    return OneRank(model, directory / "one" / "hf", reports)


MEGATRON = {
    "C2": {"devices": 2, "context_parallel": 2},
    "C2 unsharded": {"devices": 2, "context_parallel": 2, "distributed_optimizer": False},
    "C2 TP2": {"devices": 4, "context_parallel": 2, "tensor_parallel": 2, "recompute": "full"},
    "C2 PP2": {"devices": 4, "context_parallel": 2, "pipeline_parallel": 2},
    "C2 DP2": {"devices": 4, "context_parallel": 2},
    "C4": {"devices": 4, "context_parallel": 4},
}
_RESUMED = ("C2", "C4")


@pytest.mark.parametrize(
    "layout",
    [
        "C2",
        pytest.param("C2 unsharded", marks=pytest.mark.nightly),
        "C2 TP2",
        "C2 PP2",
        pytest.param("C2 DP2", marks=pytest.mark.nightly),
        pytest.param("C4", marks=pytest.mark.nightly),
    ],
)
def test_a_context_group_of_megatron_trains_as_one_rank(
    layout: str, alone: OneRank, tmp_path: Path
) -> None:
    model = alone.model
    many = run_job(job(model, tmp_path / "many", MEGATRON[layout]))
    assert_same_training(alone.exported, tmp_path / "many" / "hf", alone.reports, many)
    if layout not in _RESUMED:
        return
    middle = tmp_path / "many" / "checkpoints" / store.directory_name(1)
    resumed = run_job(job(model, tmp_path / "resumed", {"devices": 1}, first=1, load=middle))
    assert_same_training(tmp_path / "many" / "hf", tmp_path / "resumed" / "hf", many[1:], resumed)


def test_experts_divided_over_a_context_group_train_as_one_rank(tmp_path: Path) -> None:
    """With the routers' auxiliary loss, whose counts are those of the whole sequence."""
    model = make_model(tmp_path / "model", "qwen3_moe")
    sections: dict[str, Any] = {"algorithm": {"kl_coef": 0.01, "router_aux_coef": 0.01}}
    first = run_job(job(model, tmp_path / "one", {"devices": 1}, **sections))
    both = {"devices": 2, "context_parallel": 2, "expert_parallel": 2}
    two = run_job(job(model, tmp_path / "two", both, **sections))
    assert_same_training(tmp_path / "one" / "hf", tmp_path / "two" / "hf", first, two)
    for key in ("expert_imbalance", "routing_entropy", "experts_untouched"):
        theirs, ours = ([report[key] for report in reports] for reports in (first, two))
        assert ours == pytest.approx(theirs, rel=1e-5), key

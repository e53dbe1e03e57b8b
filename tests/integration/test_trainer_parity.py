"""The trainer's update on prepared groups: equal over parallel layouts, cuts, orders and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pa_npu.config.schema import Config
from tests.helpers.models import make_model
from tests.helpers.trainer_rank import Job, run_job

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2 full": {"devices": 2, "tensor_parallel": 2, "recompute": "full"},
    "PP2": {"devices": 2, "pipeline_parallel": 2},
    "DP2": {"devices": 2},
}


def make_config(model: Path, run_dir: Path, **sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "run": {"dir": str(run_dir), "seed": 3, "device": "cpu"},
        "model": {"path": str(model), "dtype": "fp32"},
        "data": {"train": "unused.jsonl"},
        "rollout": {"responses_per_prompt": 4, "max_response_tokens": 16},
        "algorithm": {"kl_coef": 0.1, "entropy_coef": 0.01},
        "optimizer": {
            "learning_rate": 1e-3,
            "weight_decay": 0.1,
            "warmup_iterations": 2,
            "epsilon": 1e-6,
        },
        "schedule": {"prompts_per_iteration": 4, "iterations": 8, "order": "prompt"},
        "trainer": {"devices": 1},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return Config.model_validate(tree)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen2", tied=True)


@pytest.fixture(scope="module")
def single(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four iterations of the single-process run, with a checkpoint after the second and an export."""
    directory = tmp_path_factory.mktemp("single")
    config = make_config(model, directory, checkpoint={"every": 2})
    reports = run_job(Job(config, directory, last=4, export=str(directory / "hf")))
    return {
        "reports": reports,
        "directory": directory,
        "weights": load_file(directory / "hf" / "model.safetensors"),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_grad_norm_do_not_depend_on_the_parallel_layout(
    layout: str, model: Path, single: dict[str, Any], tmp_path: Path
) -> None:
    """The second iteration also shows that the update itself was the same."""
    config = make_config(model, tmp_path, trainer=LAYOUTS[layout])
    reports = run_job(Job(config, tmp_path, last=2))
    for iteration, (ours, expected) in enumerate(zip(reports, single["reports"], strict=False)):
        for name in ("loss", "grad_norm", "kl", "entropy", "logprob_diff_max", "tokens_response"):
            assert ours[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-7), (
                f"{layout}, iteration {iteration}, {name}"
            )
    assert single["reports"][1]["kl"] > 0, (
        "without an update in between the second iteration would show nothing"
    )


def test_frozen_models_in_passes_of_their_own_change_no_bit_on_pipeline_stages(
    model: Path, tmp_path: Path
) -> None:
    actual = []
    for way in ("together", "separate"):
        directory = tmp_path / way
        config = make_config(
            model,
            directory,
            trainer={**LAYOUTS["PP2"], "frozen_pass": way},
            schedule={"updates_per_iteration": 2},
        )
        reports = run_job(Job(config, directory, last=2, export=str(directory / "hf")))
        kept = [
            {name: r[name] for name in ("loss", "kl", "clip_ratio", "grad_norm")} for r in reports
        ]
        actual.append(
            (
                kept,
                {
                    k: v
                    for file in (directory / "hf").glob("*.safetensors")
                    for k, v in load_file(file).items()
                },
            )
        )
    (together, weights), (separate, same) = actual
    assert together == separate and together[1]["kl"] > 0
    assert len(weights) > 20 and all(torch.equal(weights[name], same[name]) for name in weights)


def test_reducing_gradients_inside_the_last_backward_changes_no_bit(
    model: Path, tmp_path: Path
) -> None:
    """Megatron raises where a bucket's reduction had not begun there; 10 KiB make dozens of them.
    Sharded by buckets, the optimizer adds up the gradient norm in another order, so that nothing is
    clipped by it here."""
    actual = []
    for bucket_mib in (0.0, 0.01):
        directory = tmp_path / str(bucket_mib)
        keys: dict[str, Any] = {"microbatch": {"responses": 2}, "optimizer": {"clip_grad": 0.0}}
        config = make_config(model, directory, trainer=LAYOUTS["DP2"], **keys)
        options = {"bucket_mib": bucket_mib}
        reports = run_job(
            Job(config, directory, last=3, export=str(directory / "hf"), options=options)
        )
        actual.append((reports, load_file(directory / "hf" / "model.safetensors")))
    (reports, weights), (inside, weights_inside) = actual
    assert [r["loss"] for r in reports] == [r["loss"] for r in inside] and len(
        {r["loss"] for r in reports}
    ) == 3
    assert [r["grad_norm"] for r in reports] == pytest.approx(
        [r["grad_norm"] for r in inside], rel=1e-6
    )
    assert all(torch.equal(tensor, weights_inside[name]) for name, tensor in weights.items())


def test_two_updates_per_iteration_do_not_depend_on_the_parallel_layout(
    model: Path, tmp_path: Path
) -> None:
    """Old policy and reference travel through the pipeline; tests/unit/trainer/test_updates.py has
    one process against hand.
    """
    schedule, optimizer = (
        {"updates_per_iteration": 2},
        {"warmup_iterations": 0, "learning_rate": 5e-3, "epsilon": 1e-4},
    )
    actual = {}
    for name, trainer in {
        "single": {"devices": 1},
        "PP2": LAYOUTS["PP2"],
        "DP2": LAYOUTS["DP2"],
    }.items():
        config = make_config(
            model, tmp_path / name, schedule=schedule, trainer=trainer, optimizer=optimizer
        )
        actual[name] = run_job(Job(config, tmp_path / name, last=2))
    expected = actual.pop("single")
    assert expected[0]["clip_ratio"] > 0, (
        "the second update of an iteration must have ratios beyond the clip"
    )
    assert expected[0]["microbatches"] == 4
    for layout, reports in actual.items():
        for iteration, (ours, wanted) in enumerate(zip(reports, expected, strict=True)):
            for name in (
                "loss",
                "grad_norm",
                "kl",
                "entropy",
                "clip_ratio",
                "logprob_diff_max",
                "tokens_response",
            ):
                assert ours[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-7), (
                    f"{layout}, iteration {iteration}, {name}"
                )


def test_a_budget_of_tokens_gives_pipeline_stages_the_weights_of_one_rank(
    model: Path, tmp_path: Path
) -> None:
    """An iteration may have four groups.

    The first trains three and the second two, which nobody knows in advance.
    """
    schedule = {"tokens_per_update": 40, "max_staleness": 1}
    actual = {}
    for name, trainer, sizes in (
        ("single", {"devices": 1}, [3, 2]),
        ("PP2", LAYOUTS["PP2"], [3, 2]),
        ("whole", {"devices": 1}, [4, 2]),
    ):
        directory = tmp_path / name
        config = make_config(model, directory, schedule=schedule, trainer=trainer)
        reports = run_job(
            Job(config, directory, last=2, export=str(directory / "hf"), options={"sizes": sizes})
        )
        weights = {
            k: v
            for file in (directory / "hf").glob("*.safetensors")
            for k, v in load_file(file).items()
        }
        actual[name] = reports, weights
    (reports, weights), (ours, same), (_, another) = (
        actual["single"],
        actual["PP2"],
        actual["whole"],
    )
    assert (
        [report["microbatches"] for report in ours]
        == [report["microbatches"] for report in reports]
        == [3, 2]
    )
    assert [report["tokens_response"] for report in ours] == [
        report["tokens_response"] for report in reports
    ]
    for name in ("loss", "grad_norm"):
        assert [report[name] for report in ours] == pytest.approx(
            [report[name] for report in reports], rel=1e-4
        )
    assert weights.keys() == same.keys() and len(weights) > 20
    for name, weight in weights.items():
        torch.testing.assert_close(same[name], weight, rtol=1e-4, atol=1e-6, msg=name)
    assert any((another[name] - weight).abs().max() > 1e-4 for name, weight in weights.items()), (
        "negative control: one group more would have shown"
    )


@pytest.mark.parametrize(
    "cut", [{"microbatch": {"responses": 1}}, {"attention": {"shared_prompt": False}}]
)
def test_update_does_not_depend_on_the_cut_into_microbatches(
    cut: dict[str, Any], model: Path, single: dict[str, Any], tmp_path: Path
) -> None:
    """I3, with one microbatch per response, and with separate sequences instead of a shared prompt."""
    reports = run_job(Job(make_config(model, tmp_path, **cut), tmp_path, last=2))
    for ours, expected in zip(reports, single["reports"], strict=False):
        for name in ("loss", "grad_norm", "kl"):
            assert ours[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-8), name


@pytest.mark.parametrize(
    ("trainer", "order"),
    [({"devices": 1}, "prompt"), (LAYOUTS["TP2 full"], "completion")],
    ids=["one rank, order prompt", "TP2 full, order completion"],
)
def test_update_does_not_depend_on_packing_groups_together(
    trainer: dict[str, Any], order: str, model: Path, single: dict[str, Any], tmp_path: Path
) -> None:
    """microbatch.max_tokens, with half groups as pieces: four groups of 20 to 30 tokens in fewer
    microbatches than four.
    """
    microbatch = {"responses": 2, "max_tokens": 60}
    config = make_config(
        model, tmp_path, microbatch=microbatch, trainer=trainer, schedule={"order": order}
    )
    reports = run_job(Job(config, tmp_path, last=2))
    for ours, expected in zip(reports, single["reports"], strict=False):
        assert 1 < ours["microbatches"] < expected["microbatches"], "the groups were not packed"
        assert ours["tokens_response"] == expected["tokens_response"]
        for name in ("loss", "grad_norm", "entropy", "logprob_diff_max"):
            assert ours[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-8), name
        assert ours["kl"] == pytest.approx(expected["kl"], rel=1e-4, abs=1e-8)


def test_resume_continues_bit_identically(
    model: Path, single: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = single["directory"] / "checkpoints" / "iteration_000002"
    config = make_config(model, tmp_path, checkpoint={"load": str(checkpoint)})
    reports = run_job(Job(config, tmp_path, first=2, last=4, export=str(tmp_path / "hf")))
    names = ("loss", "grad_norm", "kl", "learning_rate")
    assert [[r[n] for n in names] for r in reports] == [
        [r[n] for n in names] for r in single["reports"][2:]
    ]
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    different = [
        name for name, tensor in single["weights"].items() if not torch.equal(tensor, weights[name])
    ]
    assert weights.keys() == single["weights"].keys() and not different, (
        f"not bit-identical after resume: {different}"
    )


def test_completion_order_changes_the_update_only_by_rounding(
    model: Path, single: dict[str, Any], tmp_path: Path
) -> None:
    """I4: another arrival order gives the same sums up to fp32 rounding, and another batch does
    not.
    """
    config = make_config(model, tmp_path, schedule={"order": "completion"})
    reports = run_job(Job(config, tmp_path, last=1, order=[2, 0, 3, 1]))
    assert reports[0]["grad_norm"] == pytest.approx(single["reports"][0]["grad_norm"], rel=1e-5)
    assert reports[0]["grad_norm"] != pytest.approx(single["reports"][1]["grad_norm"], rel=1e-3)

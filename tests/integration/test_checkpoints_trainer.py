"""Checkpoints of several ranks: loaded at other sizes and back, resumed bit by bit, and what one rank's failure does to all."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pa_npu.checkpoints import directories as store
from pa_npu.config.schema import Config
from tests.helpers.megatron import model_config, single_process
from tests.helpers.models import make_model
from tests.helpers.trainer_rank import Job, run_job
from tests.integration.test_trainer_parity import make_config
from tests.unit.checkpoints.test_trainer import Run

from megatron.core.dist_checkpointing import load_plain_tensors  # isort: skip

pytestmark = pytest.mark.integration

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"devices": 2, "tensor_parallel": 2},
    "PP2": {"devices": 2, "pipeline_parallel": 2},
    "DP2": {"devices": 2},
}
MIXTURES: dict[str, dict[str, Any]] = {
    "EP2": {"devices": 2, "expert_parallel": 2},
    "EP2, not sharded": {"devices": 2, "expert_parallel": 2, "distributed_optimizer": False},
    "TP2 EP2": {"devices": 2, "tensor_parallel": 2, "expert_parallel": 2},
    "PP2 DP2 EP2": {"devices": 4, "pipeline_parallel": 2, "expert_parallel": 2},
    "DP4 EP2": {"devices": 4, "expert_parallel": 2},
}
FIRST, LAST = 2, 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A dense model, and a mixture with a dense layer, whose layers are saved one by one."""
    directory = tmp_path_factory.mktemp("models")
    dense = make_model(directory / "qwen2", "qwen2", tied=True)
    mixture = make_model(directory / "qwen3_moe", "qwen3_moe", layers=4, mlp_only_layers=[1])
    with single_process(model_config(dense)):
        yield {"qwen2": dense, "qwen3_moe": mixture}


@pytest.fixture(scope="module")
def model(models: dict[str, Path]) -> Path:
    return models["qwen2"]


class Single(Run):
    """One process, in this one, with the configuration and groups of the ranks."""

    def configure(
        self, model: Path, directory: Path, sections: dict[str, dict[str, Any]]
    ) -> Config:
        return make_config(model, directory, **sections)


@pytest.fixture(scope="module")
def trained(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, bool], dict[str, Any]]:
    """Three iterations at one process, with a checkpoint of version 2 and its weights as the run
    itself exports them.
    """

    @functools.cache
    def result(family: str, is_sharded: bool) -> dict[str, Any]:
        directory = tmp_path_factory.mktemp(family)
        run = Single(models[family], directory, trainer={"distributed_optimizer": is_sharded})
        for version in range(FIRST):
            run.train(version)
        run.checkpoints.finish(FIRST)
        run.backend.export(directory / "hf")
        return {
            "checkpoint": run.directory / store.directory_name(FIRST),
            "weights": exported(directory / "hf"),
            "next": run.train(FIRST),
        }

    return result


def exported(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of an HF directory."""
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every whole tensor of a checkpoint, as Megatron itself puts the shards together."""
    loaded = load_plain_tensors(str(checkpoint))
    return {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}


def different(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]


@pytest.mark.parametrize(
    "layout",
    [
        *LAYOUTS,
        *(
            pytest.param(name, marks=[] if name == "EP2" else [pytest.mark.nightly])
            for name in MIXTURES
        ),
    ],
)
def test_a_checkpoint_goes_to_other_sizes_and_back_and_resumes_there_bit_by_bit(
    layout: str,
    models: dict[str, Path],
    trained: Callable[[str, bool], dict[str, Any]],
    tmp_path: Path,
) -> None:
    """Other numbers of ranks share the experts of a mixture."""
    trainer = LAYOUTS.get(layout) or MIXTURES[layout]
    family, is_sharded = (
        "qwen3_moe" if layout in MIXTURES else "qwen2",
        trainer.get("distributed_optimizer", True),
    )
    model, single = models[family], trained(family, is_sharded)
    config = make_config(
        model, tmp_path, trainer=trainer, checkpoint={"every": 1, "load": str(single["checkpoint"])}
    )
    job = Job(config, tmp_path, first=FIRST, last=LAST, module="tests.helpers.checkpoint_rank")
    job.options["scenario"] = "resume"
    reports = run_job(job)
    checkpoints = tmp_path / "checkpoints"

    # to the other sizes: weights and moments bit by bit, the next step but for rounding
    assert not different(exported(tmp_path / "loaded"), single["weights"])
    saved_again = tensors(checkpoints / store.directory_name(FIRST))
    original = tensors(single["checkpoint"])
    expected = {"decoder.final_layernorm.weight": 0}
    if family == "qwen3_moe":  # whose experts have an optimizer of their own
        expected = {"decoder.final_layernorm.weight": 0, "decoder.layers.2.mlp.experts.down": 1}
    for name, optimizer in expected.items():
        prefix = f"chained_{optimizer}." * (len(expected) > 1) + "optimizer.state.exp_avg"
        assert {name, f"{prefix}.{name}"} <= original.keys() or not is_sharded
    assert not different(saved_again, original)
    for name in ("loss", "grad_norm", "kl", "learning_rate"):
        assert reports[0][name] == pytest.approx(single["next"][name], rel=1e-5), name

    # interrupted and resumed at these sizes
    hf = exported(tmp_path / "hf")
    assert not different(exported(tmp_path / "resumed"), hf)
    assert [reports[-1][name] for name in ("loss", "grad_norm")] == [
        reports[-2][name] for name in ("loss", "grad_norm")
    ]
    assert different(hf, single["weights"]), "nothing was trained"

    # and back to one process
    checkpoint = {"load": str(checkpoints / store.directory_name(LAST - 1))}
    back = Single(
        model,
        tmp_path / "back",
        checkpoint=checkpoint,
        trainer={"distributed_optimizer": is_sharded},
    )
    assert back.checkpoints.load() == LAST - 1
    assert back.train(LAST - 1)["loss"] == pytest.approx(reports[-1]["loss"], rel=1e-5)

    if layout == "PP2":  # once is enough for a new process
        command = [sys.executable, "-m", "pa_npu.launcher", "export", "--checkpoint"]
        command += [
            str(checkpoints / store.directory_name(LAST)),
            "--output",
            str(tmp_path / "exported"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert not different(exported(tmp_path / "exported"), hf)
        assert (tmp_path / "exported" / "config.json").read_bytes() == (
            tmp_path / "hf" / "config.json"
        ).read_bytes()


def test_one_rank_that_fails_costs_all_the_checkpoint_and_a_killed_one_leaves_the_one_before(
    model: Path, tmp_path: Path
) -> None:
    # both ranks have something to write, whatever the release of megatron-core
    trainer = LAYOUTS["TP2"]
    config = make_config(
        model, tmp_path, trainer=trainer, checkpoint={"every": 2}, schedule={"iterations": 8}
    )
    job = Job(
        config, tmp_path, module="tests.helpers.checkpoint_rank", options={"scenario": "faults"}
    )
    reports = run_job(job, ends=(1, -9))
    assert [report.get("checkpoint_failed") for report in reports] == [None, 4, None]
    lines = [
        line
        for line in (tmp_path / "rank0.log").read_text().splitlines()
        if "could not be written" in line
    ]
    assert len(lines) == 1 and "rank 1: File too large" in lines[0], lines
    assert "usable: " + str(tmp_path / "checkpoints" / "iteration_000002") in lines[0]

    checkpoints = tmp_path / "checkpoints"
    assert store.newest(checkpoints) == (checkpoints / "iteration_000006", "")
    assert (checkpoints / ".iteration_000008.incomplete").is_dir(), (
        "the kill came in the middle of the save"
    )
    store.clean(checkpoints)
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        "iteration_000002",
        "iteration_000006",
    ]
    survivor = Single(
        model, tmp_path / "next", checkpoint={"load": str(checkpoints / "iteration_000006")}
    )
    assert survivor.checkpoints.load() == 6


@pytest.mark.parametrize(
    "layout", ["TP2", "DP2", pytest.param("fsdp, DP2", marks=pytest.mark.nightly)]
)
def test_all_ranks_refuse_what_one_finds_damaged_and_none_hangs(
    layout: str, model: Path, tmp_path: Path
) -> None:
    """The second rank's shard, with the distributed optimizer in bf16; the last attempt loads the
    whole checkpoint as a control.
    """
    sharded = {"devices": 2, "backend": "fsdp"}
    config = make_config(model, tmp_path, trainer=LAYOUTS.get(layout, sharded))
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bf16"})})
    job = Job(
        config, tmp_path, module="tests.helpers.checkpoint_rank", options={"scenario": "damage"}
    )
    reports: list[dict[str, Any]] = [*run_job(job)]
    flipped, mixed, forged, rolled_back, whole = reports
    for report, line in (
        (flipped, "__1_0.distcp is not what was written"),
        (mixed, "a file is of a checkpoint after 1 updates instead of 2"),
        (forged, ".mkdir, which no checkpoint contains"),
        (rolled_back, "the optimizer's state of rank 1 is not the one that was saved"),
    ):
        assert all(line in output for output in report["said"]), report
        assert not report["made"]
    assert "the next older one is " in flipped["said"][0]
    assert whole["said"] == ["", ""]

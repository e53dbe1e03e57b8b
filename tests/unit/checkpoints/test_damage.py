"""Checkpoints that are not what was written: one line names the file and the next older one; nothing of it is run or trained."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pa_npu.backends.registry import backend_module, export_checkpoint
from pa_npu.checkpoints import directories as store
from pa_npu.errors import UserError
from pa_npu.families.spec import ModelSpec
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.learner import Learner
from tests.helpers.checkpoint_damage import (
    COMMON,
    INDEX,
    SHARD,
    change_the_data_position,
    flip_a_bit,
    forge_the_common_part,
    forge_the_index,
    lose_a_digest,
    older,
    sign_anew,
    take_the_shard_of_another_version,
    truncate,
    zero_a_page,
)
from tests.helpers.megatron import PLATFORM, model_config, single_process
from tests.helpers.models import make_model
from tests.unit.checkpoints.test_trainer import Run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"))
    with single_process(model_config(path)):
        yield path


KINDS: dict[str, dict[str, Any]] = {
    "megatron": {"model": {"dtype": "bf16"}},  # with masters in fp32
    "fsdp": {"trainer": {"backend": "fsdp"}},
    "adapters": {"trainer": {"backend": "fsdp"}, "lora": {"rank": 4}},
}


class ShardedRun(Run):
    """The same with trainer.backend=fsdp."""

    def make_learner(self) -> Learner:
        spec, timeline = ModelSpec.read(self.config.model.path), Timeline(None, "")
        backend = backend_module("fsdp").create(
            self.config, spec, PLATFORM, dist.HashStore(), 0, 0, timeline
        )
        return Learner(self.config, backend, PLATFORM, timeline)


@pytest.fixture(scope="module")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Two versions of each kind."""

    @cache
    def made(kind: str) -> Run:
        run = (Run if kind == "megatron" else ShardedRun)(
            model, tmp_path_factory.mktemp("run"), **KINDS[kind]
        )
        for version in range(2):
            run.train(version)
            run.checkpoints.finish(version + 1)
        return run

    return made


@pytest.fixture
def run(kind: str, runs: Callable[[str], Run]) -> Run:
    return runs(kind)


@pytest.fixture
def kind() -> str:
    return "megatron"


@pytest.fixture
def checkpoint(run: Run, tmp_path: Path) -> Path:
    """A copy of the newest version, beside one of the version before."""
    shutil.copytree(run.directory, tmp_path / "checkpoints")
    return tmp_path / "checkpoints" / store.directory_name(2)


def of_each_kind(
    cases: list[tuple[Callable[[Path], None], str]], at_once: set[tuple[str, Any]]
) -> list[Any]:
    """Parameters kind, damage, said: all of Megatron's and those of `at_once`; the others are
    nightly.
    """
    return [
        pytest.param(
            kind,
            damage,
            output,
            marks=[] if fast else [pytest.mark.nightly],
            id=f"{kind}-{damage.__name__}",
        )
        for kind in KINDS
        for damage, output in cases
        if kind == "megatron" or damage is not forge_the_common_part  # which others have not
        for fast in [kind == "megatron" or (kind, damage) in at_once]
    ]


def resume(run: Run, checkpoint: Path) -> int:
    options = run.config.checkpoint.model_copy(update={"load": str(checkpoint)})
    run.checkpoints._config = run.config.model_copy(update={"checkpoint": options})
    return run.checkpoints.load()


def export_policy(kind: str, run: Run, checkpoint: Path) -> None:
    """In this process, which has a model of Megatron's."""
    if kind != "megatron":
        export_checkpoint(checkpoint, checkpoint.parent / "hf")
        return
    from pa_npu.backends.megatron.checkpoint import load_policy_only

    load_policy_only(run.stage, checkpoint)


@pytest.mark.parametrize("through", ["resume", "export"])
@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    of_each_kind(
        [
            (flip_a_bit, f"{SHARD} is not what was written"),
            (zero_a_page, f"{SHARD} is not what was written"),
            (truncate, f"{SHARD} has "),
            (take_the_shard_of_another_version, f"{SHARD} is not what was written"),
            (lose_a_digest, f"no file and digest of '{SHARD}'"),
            (change_the_data_position, "its own digest is that of other values"),
            (forge_the_index, f"{INDEX} "),
            (forge_the_common_part, f"{COMMON} "),
        ],
        {("fsdp", zero_a_page), ("adapters", flip_a_bit)},
    ),
)
def test_what_is_not_what_was_written_is_refused_in_one_line_that_names_it_and_the_next_older_one(
    damage: Callable[[Path], None], message: str, through: str, run: Run, checkpoint: Path
) -> None:
    damage(checkpoint)
    with pytest.raises(UserError) as refused:
        if through == "resume":
            resume(run, checkpoint)
        else:
            export_checkpoint(checkpoint, checkpoint.parent / "hf")
    line = str(refused.value)
    assert (
        message in line
        and str(checkpoint) in line
        and f"the next older one is {older(checkpoint)}" in line
    )
    assert not (checkpoint.parent / "made").exists() and not (checkpoint.parent / "hf").exists()


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    of_each_kind(
        [
            (
                take_the_shard_of_another_version,
                "a file is of a checkpoint after 1 updates instead of 2",
            ),
            (forge_the_index, r"one of its files names (posix|nt)\.mkdir"),
            (forge_the_common_part, r"one of its files names (posix|nt)\.mkdir"),
        ],
        {(kind, take_the_shard_of_another_version) for kind in KINDS},
    ),
)
def test_a_forger_who_signs_anew_neither_mixes_versions_nor_runs_code(
    kind: str, damage: Callable[[Path], None], message: str, run: Run, checkpoint: Path
) -> None:
    damage(checkpoint)
    sign_anew(checkpoint)
    with pytest.raises(UserError, match=message):
        resume(run, checkpoint)
    with pytest.raises(UserError, match=message):
        export_policy(kind, run, checkpoint)
    assert not (checkpoint.parent / "made").exists()
    if damage is not forge_the_index:
        return
    command = [sys.executable, "-m", "pa_npu.launcher", "export", "--checkpoint", str(checkpoint)]
    done = subprocess.run(
        [*command, "--output", str(checkpoint.parent / "hf")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert not (checkpoint.parent / "made").exists()


def test_as_a_control_the_payloads_are_run_by_a_reader_that_trusts_them(tmp_path: Path) -> None:
    for forge, read in (
        (forge_the_index, lambda path: pickle.loads((path / INDEX).read_bytes())),
        (forge_the_common_part, lambda path: torch.load(path / COMMON, weights_only=False)),
    ):
        directory = tmp_path / forge.__name__ / "checkpoint"
        directory.mkdir(parents=True)
        forge(directory)
        read(directory)
        assert (directory.parent / "made").is_dir()


@pytest.mark.parametrize("distributed", [True, False])
def test_masters_that_are_not_the_models_weights_are_refused(
    distributed: bool, model: Path, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {
        "model": {"dtype": "bf16"},
        "trainer": {"distributed_optimizer": distributed},
    }
    run = Run(model, tmp_path, **sections)
    run.train(0)
    run.checkpoints.finish(1)
    assert resume(run, run.directory / store.directory_name(1)) == 1
    (part,) = run.backend._optimizer.chained_optimizers
    masters = part.shard_fp32_from_float16_groups if distributed else part.fp32_from_float16_groups
    with torch.no_grad():
        masters[0][0][0] += 1.0
    run.checkpoints.finish(2)
    with pytest.raises(
        UserError, match=r"the optimizer's weights of .* are not those of the model"
    ):
        resume(run, run.directory / store.directory_name(2))


def test_a_checkpoint_of_a_release_without_digests_is_loaded_with_one_warning(
    run: Run, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = checkpoint / store.META_FILE
    meta = json.loads(file.read_text())
    del meta["digests"], meta["digest"]
    file.write_text(json.dumps(meta))
    with caplog.at_level(logging.WARNING):
        assert resume(run, checkpoint) == 2
    assert [record.message for record in caplog.records if "without digests" in record.message] == [
        f"checkpoint {checkpoint} is of a release without digests: its files are checked by their "
        "sizes alone"
    ]

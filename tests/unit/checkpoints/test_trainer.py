"""Checkpoints of one process: the version that was scheduled is saved, whatever fails costs a line, everything comes back."""

from __future__ import annotations

import logging
import os
import random
import resource
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pa_npu.algorithm.advantages import group_advantages
from pa_npu.checkpoints import directories as store
from pa_npu.checkpoints.provenance import check_continuation, config_tree, differences
from pa_npu.config.schema import Config
from pa_npu.errors import CheckpointError, DataError
from pa_npu.telemetry.records import MetricsWriter
from pa_npu.telemetry.timeline import Timeline
from tests.helpers.megatron import model_config, single_process
from tests.helpers.models import make_model
from tests.helpers.reports import numbers
from tests.helpers.trainer_rank import make_groups, with_advantages
from tests.unit.trainer.test_updates import GROUPS, RESPONSES, make_config, make_learner, source

# these import megatron, which the helper above has prepared
from pa_npu.checkpoints import saving as checkpointing  # isort: skip
from pa_npu.backends.megatron.checkpoint import PlannedShards  # isort: skip
from pa_npu.checkpoints.writer import Forked  # isort: skip
from pa_npu.checkpoints.saving import Checkpointing  # isort: skip
from pa_npu.trainer.learner import Learner  # isort: skip
from pa_npu.trainer.loop import consume  # isort: skip


class WritesWhenAsked:
    """In the place of a forked writer: it writes the memory as it is then."""

    def __init__(self, write: Callable[[], None], timeout_s: float) -> None:
        self._write = write

    def poll(self) -> bool:
        self._write()
        return True


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"))
    with single_process(model_config(path)):
        yield path


class Run:
    """A backend and its checkpoints in one run directory; `train(v)` is iteration v."""

    def __init__(self, model: Path, directory: Path, /, **sections: dict[str, Any]) -> None:
        sections["checkpoint"] = {"every": 1, **sections.get("checkpoint", {})}
        self.config = self.configure(model, directory, sections)
        self.learner = self.make_learner()
        self.backend: Any = self.learner.backend
        self.directory = directory / "checkpoints"
        self.checkpoints = Checkpointing(self.config, self.learner, self.data, Timeline(None, ""))

    def configure(
        self, model: Path, directory: Path, sections: dict[str, dict[str, Any]]
    ) -> Config:
        return make_config(model, run={"dir": str(directory)}, **sections)

    def make_learner(self) -> Learner:
        learner, self.stage = make_learner(self.config)
        return learner

    @staticmethod
    def data(version: int) -> dict[str, Any]:
        return {"position": version * GROUPS, "fingerprint": "prompts"}

    def train(self, version: int) -> dict[str, float]:
        self.learner.publish(version)
        kind = self.config.algorithm.advantage
        groups = make_groups(version, GROUPS, RESPONSES, self.config.run.seed)
        # as put_groups gives them to ranks of their own
        groups = [with_advantages(group, group_advantages(group.rewards, kind)) for group in groups]
        return numbers(consume(self.learner, source(groups, version), 1).report)

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            name: tensor.detach().clone() for name, tensor in self.stage.policy.named_parameters()
        }

    def moment_tensors(self) -> list[torch.Tensor]:
        (optimizer,) = self.backend._optimizer.chained_optimizers
        return [
            state[name]
            for state in optimizer.optimizer.state.values()
            for name in ("exp_avg", "exp_avg_sq")
        ]

    def moments(self) -> dict[str, torch.Tensor]:
        return {str(number): tensor.clone() for number, tensor in enumerate(self.moment_tensors())}

    def complete(self) -> list[int | None]:
        return [store.version_of(path) for path in store.complete(self.directory)]


def until_failed(run: Run, version: int) -> dict[str, float]:
    """The numbers of the border, with nothing due, at which the write in progress turns out to have
    failed.
    """
    deadline = time.monotonic() + 30
    while "checkpoint_failed" not in (border := numbers(run.checkpoints.at_border(version))):
        assert time.monotonic() < deadline, "the write has not failed within 30 s"
    return border


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def held(monkeypatch: pytest.MonkeyPatch, before: Callable[[], object]) -> None:
    """Every write begins with `before`, in the process that writes."""
    write = PlannedShards.write

    def later(self: PlannedShards) -> list[str]:
        before()
        return write(self)

    monkeypatch.setattr(PlannedShards, "write", later)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """A disk that is full after `size` bytes, as far as this process and its children are
    concerned.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Late:
    """Writes when it is first asked, what the memory holds by then."""

    def __init__(self, write: Callable[[], None], timeout_s: float) -> None:
        self._write = write

    def poll(self) -> bool:
        self._write()
        return True


@pytest.mark.parametrize(("forked", "distributed"), [(True, True), (True, False), (False, False)])
def test_what_is_saved_is_the_version_that_was_scheduled_although_it_changed_since(
    forked: bool, distributed: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer is held until weights and moments have changed. Without the fork, as a control,
    the change is saved.

    The control's optimizer is the plain one: since core 0.13 the distributed one gathers copies of
    its state.
    """
    trainer = {"distributed_optimizer": distributed}
    run = Run(model, tmp_path, trainer=trainer)
    run.train(0)
    weights, moments = run.weights(), run.moments()
    wait, go = os.pipe()
    held(monkeypatch, lambda: os.read(wait, 1))
    if not forked:
        monkeypatch.setattr(checkpointing, "Forked", WritesWhenAsked)
        monkeypatch.setattr(PlannedShards, "release", lambda self: None)
    assert "checkpoint_failed" not in numbers(run.checkpoints.at_border(1))
    assert run.complete() == []
    with torch.no_grad():
        for tensor in (*run.stage.policy.parameters(), *run.moment_tensors()):
            tensor.add_(1.0)
    os.write(go, b"1")
    run.checkpoints.finish(1)
    os.close(wait)
    os.close(go)

    resumed = Run(
        model,
        tmp_path,
        trainer=trainer,
        checkpoint={"load": str(run.directory / "iteration_000001")},
    )
    if not forked:  # a snapshot can be told from the memory itself, and a resume does
        with pytest.raises(
            DataError, match="optimizer's state of rank 0 is not the one that was saved"
        ):
            resumed.checkpoints.load()
        return
    assert resumed.checkpoints.load() == 1
    assert same(resumed.weights(), weights) and same(resumed.moments(), moments)


def test_training_goes_on_while_a_checkpoint_is_written_and_it_is_completed_at_a_later_border(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(model, tmp_path, checkpoint={"every": 2})
    wait, go = os.pipe()
    held(monkeypatch, lambda: os.read(wait, 1))
    run.train(0)
    assert numbers(run.checkpoints.at_border(1)) == {}, "nothing is due, nothing is in progress"
    run.train(1)
    run.checkpoints.at_border(2)
    run.train(2)
    run.checkpoints.at_border(3)
    assert run.complete() == [] and (run.directory / ".iteration_000002.incomplete").is_dir()
    os.write(go, b"1")
    run.train(3)
    os.write(go, b"1")
    run.checkpoints.at_border(4)
    run.checkpoints.finish(4)
    assert run.complete() == [2, 4]
    meta = store.read_meta(run.directory / "iteration_000002")
    assert (meta.version, meta.updates, meta.data) == (
        2,
        2,
        {"position": 2 * GROUPS, "fingerprint": "prompts"},
    )


def test_a_checkpoint_that_is_given_to_others_holds_no_secret_and_a_change_of_one_is_seen(
    model: Path, tmp_path: Path
) -> None:
    def sections(secret: str) -> dict[str, dict[str, Any]]:
        return {
            "rollout": {
                "env": {"DB_AUTH": secret, "PLAIN": secret},
                "extra_args": ["--api-key", secret, "--seed", "1"],
            },
            "environment": {
                "name": "own:Mine",
                "options": {"auth": {"bearer": secret}, "url": f"http://me:{secret}@h"},
            },
        }

    run = Run(model, tmp_path, **sections("S3CRET-1"))
    run.train(0)
    run.checkpoints.finish(1)
    directory = run.directory / "iteration_000001"
    assert not [
        file for file in directory.rglob("*") if file.is_file() and b"S3CRET" in file.read_bytes()
    ]
    assert stat.S_IMODE((directory / store.META_FILE).stat().st_mode) == 0o600
    saved = store.read_meta(directory).config
    assert (
        saved["rollout"]["extra_args"][2:] == ["--seed", "1"]
        and saved["rollout"]["max_response_tokens"] > 0
    )
    assert (
        check_continuation(saved, run.config, "C") is None and differences(saved, run.config) == []
    )
    Config.model_validate(saved)  # as export does

    another = run.configure(model, tmp_path, {"checkpoint": {"every": 1}, **sections("S3CRET-2")})
    changed = {
        "environment.options.auth.bearer",
        "environment.options.url",
        "rollout.env.DB_AUTH",
        "rollout.env.PLAIN",
        "rollout.extra_args",
    }
    for tree in (saved, config_tree(run.config)):  # as earlier releases saved it
        assert set(differences(tree, another)) == changed
        line = check_continuation(tree, another, "C") or ""
        assert "S3CRET" not in line and all(key in line for key in changed), line


def test_a_full_disk_costs_a_line_and_no_more_until_the_last_checkpoint(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(model, tmp_path, checkpoint={"every": 2})
    run.train(0)
    run.checkpoints.at_border(2)
    run.checkpoints.finish(2)
    with largest_file(2**16), caplog.at_level(logging.ERROR):
        assert "checkpoint_failed" not in numbers(run.checkpoints.at_border(4)), "not known yet"
        border = until_failed(run, 5)
    assert border["checkpoint_failed"] == 4
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("pa_npu")]
    assert "iteration_000004 could not be written (rank 0: File too large" in line, line
    assert f"usable: {run.directory / 'iteration_000002'}" in line
    assert [path.name for path in run.directory.iterdir()] == ["iteration_000002"], (
        "its files are still there"
    )

    run.checkpoints.at_border(6)
    run.checkpoints.finish(6)
    assert run.complete() == [2, 6]
    with (
        largest_file(2**16),
        pytest.raises(CheckpointError, match=r"of version 8, could not .*usable: .*000006"),
    ):
        run.checkpoints.finish(8)
    assert run.complete() == [2, 6]


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (signal.pause, "has not finished within 0.2 s (trainer.wait_timeout_s)"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
    ],
    ids=["hangs", "is killed"],
)
def test_a_writer_that_hangs_or_is_killed_is_named_and_the_run_goes_on(
    end: Callable[[], object],
    reason: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run(model, tmp_path, checkpoint={"every": 2})
    run.train(0)
    limit_s = 30.0 if "killed" in reason else 0.2
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        held(patch, end)
        patch.setattr(checkpointing, "Forked", lambda write, timeout_s: Forked(write, limit_s))
        run.checkpoints.at_border(2)
        pid = run.checkpoints._saving.writer.pid  # type: ignore[union-attr]
        assert until_failed(run, 3)["checkpoint_failed"] == 2
    assert f"rank 0: its writer process {pid} {reason}" in caplog.text
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert list(run.directory.iterdir()) == []


def test_a_writer_is_heard_by_a_process_with_more_files_than_select_takes() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this user may have no more than 1,024 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1030)]
    try:
        writer = Forked(lambda: None, 30.0)
        end_s = time.monotonic() + 30.0
        while not writer.poll():
            assert time.monotonic() < end_s
            time.sleep(0.01)
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_retention_reads_the_evaluations_of_the_run(model: Path, tmp_path: Path) -> None:
    run = Run(
        model,
        tmp_path,
        checkpoint={"keep_last": 1, "keep_best": 1},
        data={"test": "unused.jsonl"},
        schedule={"evaluate_every": 1},
    )
    run.train(0)
    with MetricsWriter(tmp_path) as writer:
        for version, accuracy in enumerate((0.1, 0.2, 0.7, 0.3)):
            writer.write_evaluation({"version": version, "accuracy": accuracy})
            if version:
                run.checkpoints.at_border(version)
                run.checkpoints.finish(version)
    assert run.complete() == [2, 3]


def test_a_reference_refreshed_since_comes_back_and_the_next_steps_are_the_same(
    model: Path, tmp_path: Path
) -> None:
    """Version 3 lies between the refreshes of 2 and 4; a reference of the HF model would give
    another loss.
    """
    sections: dict[str, dict[str, Any]] = {
        "algorithm": {"kl_coef": 0.5, "reference_refresh_every": 2},
        "optimizer": {"learning_rate": 1e-2},
    }
    run = Run(model, tmp_path, **sections)
    for version in range(3):
        run.train(version)
        run.checkpoints.at_border(version + 1)
    run.checkpoints.finish(3)
    assert store.read_meta(run.directory / "iteration_000001").reference == {
        "version": 0,
        "saved": False,
    }
    expected = [run.train(version) for version in (3, 4)]

    load = str(run.directory / "iteration_000003")
    resumed = Run(model, tmp_path, checkpoint={"load": load}, **sections)
    first_kl = Run(model, tmp_path / "other", checkpoint={"load": load}, **sections)
    assert resumed.checkpoints.load() == first_kl.checkpoints.load() == 3
    actual = [resumed.train(version) for version in (3, 4)]
    for ours, wanted in zip(actual, expected, strict=True):
        assert [ours[name] for name in ("loss", "kl", "grad_norm")] == [
            wanted[name] for name in ("loss", "kl", "grad_norm")
        ]
    assert same(resumed.weights(), run.weights())
    first_kl.stage.frozen["reference"].load_state_dict(
        make_learner(first_kl.config)[1].frozen["reference"].state_dict()
    )
    assert first_kl.train(3)["kl"] != expected[0]["kl"], (
        "the refreshed reference makes no difference here"
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("distributed_optimizer", [True, False])
def test_every_kind_of_optimizer_comes_back(
    dtype: str, distributed_optimizer: bool, model: Path, tmp_path: Path
) -> None:
    """In bf16 the next step shows the fp32 master weights, which no weight of the model does."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"dtype": dtype},
        "trainer": {"distributed_optimizer": distributed_optimizer},
    }
    run = Run(model, tmp_path, **sections)
    run.train(0)
    run.checkpoints.at_border(1)
    weights, moments = run.weights(), run.moments()
    run.train(1)
    run.checkpoints.finish(1)
    resumed = Run(
        model, tmp_path, checkpoint={"load": str(run.directory / "iteration_000001")}, **sections
    )
    resumed.checkpoints.load()
    assert same(resumed.weights(), weights) and same(resumed.moments(), moments)
    resumed.train(1)
    assert same(resumed.weights(), run.weights()) and not same(run.weights(), weights)


def test_random_numbers_go_on_where_they_were(model: Path, tmp_path: Path) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    def draw() -> list[float]:
        with get_cuda_rng_tracker().fork():
            tracked = torch.rand(()).item()
        return [random.random(), float(np.random.rand()), torch.rand(()).item(), tracked]

    run = Run(model, tmp_path)
    run.train(0)
    run.checkpoints.at_border(1)
    expected = draw()
    run.checkpoints.finish(1)
    assert draw() != expected
    Run(
        model, tmp_path, checkpoint={"load": str(run.directory / "iteration_000001")}
    ).checkpoints.load()
    assert draw() == expected


def test_a_new_learning_rate_is_not_undone_by_the_checkpoint_and_the_schedule_goes_on(
    model: Path, tmp_path: Path
) -> None:
    schedule = {"warmup_iterations": 4}
    run = Run(model, tmp_path, optimizer={"learning_rate": 1e-3, **schedule})
    for version in range(2):
        run.train(version)
    run.checkpoints.finish(2)
    load = {"load": str(run.directory / "iteration_000002")}
    resumed = Run(
        model,
        tmp_path,
        checkpoint=load,
        optimizer={"learning_rate": 1e-2, "betas": [0.9, 0.9], "epsilon": 1e-5, **schedule},
    )
    resumed.checkpoints.load()
    assert resumed.train(2)["learning_rate"] == pytest.approx(1e-2 * 3 / 4)
    group = resumed.backend._optimizer.param_groups[0]
    assert (group["betas"], group["eps"]) == ((0.9, 0.9), 1e-5)
    same_config = Run(
        model, tmp_path, checkpoint=load, optimizer={"learning_rate": 1e-3, **schedule}
    )
    same_config.checkpoints.load()
    assert same_config.train(2)["learning_rate"] == pytest.approx(1e-3 * 3 / 4)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"checkpoint": {"keep_best": 1}},
            "keep_best: 1 has no effect with checkpoint.keep_last = 0",
        ),
        ({"checkpoint": {"keep_best": 1, "keep_last": 1}}, "without evaluations in between"),
    ],
)
def test_retention_that_could_not_work_is_refused(
    sections: dict[str, Any], message: str, model: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(model, **sections)

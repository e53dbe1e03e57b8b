"""One trainer rank that saves, loads and fails: `resume`, `faults` and `damage`, for tests/integration/test_checkpoints_trainer.py.

python -m tests.helpers.checkpoint_rank JOB.json      started by trainer_rank.run_job, like that module
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.reports import numbers
from tests.helpers.trainer_rank import data_state, put_groups


def main(job_file: str) -> None:
    from pa_npu import platform as platforms
    from pa_npu.backends.megatron.patches.table import prepare
    from pa_npu.config.load import load_config

    job: dict[str, Any] = json.loads(Path(job_file).read_text())
    config = load_config([job["config"]])
    platform = platforms.get(config.run.device)
    prepare(platform.name)

    from pa_npu.backends.megatron.parallel import initialise_parallel, shutdown_parallel
    from pa_npu.control.channel import connect

    host, port = os.environ["PA_NPU_STORE"].rsplit(":", 1)
    store = connect(host, int(port), 60)
    rank = int(os.environ["RANK"])
    platform.set_deterministic(True)
    if config.trainer.backend == "megatron":
        initialise_parallel(config, platform, dist.PrefixStore("trainer", store), rank)
    reports = {"resume": resume, "faults": faults, "damage": damage}[job["scenario"]](
        job, config, platform, store, rank
    )
    if rank == 0:
        Path(job["out"]).write_text(json.dumps(reports))
    shutdown_parallel()


class Attempt:
    """A run from its objects on; several in one process stand for processes that were started
    again.
    """

    def __init__(
        self, config: Any, platform: Any, store: dist.TCPStore, rank: int, name: str
    ) -> None:
        from pa_npu.backends.megatron.backend import MegatronBackend
        from pa_npu.backends.megatron.factory import load_stage
        from pa_npu.backends.registry import backend_module
        from pa_npu.checkpoints.saving import Checkpointing
        from pa_npu.control.channel import StoreChannel
        from pa_npu.families.spec import ModelSpec
        from pa_npu.samples.rollout_buffer import RolloutBuffer
        from pa_npu.telemetry.timeline import Timeline
        from pa_npu.trainer.assemble import rollout_source
        from pa_npu.trainer.learner import Learner

        self.config, self.rank = config, rank
        spec, timeline, device = (
            ModelSpec.read(config.model.path),
            Timeline(None, ""),
            platform.device(0),
        )
        channel = StoreChannel(dist.PrefixStore(name, store))
        self.buffer = RolloutBuffer(channel, "run", readers=1)
        self.backend: Any
        if config.trainer.backend == "megatron":
            stage = load_stage(config, spec, platform)
            self.backend = MegatronBackend(stage, config, spec, platform, device, timeline)
        else:
            make = backend_module(config.trainer.backend).create
            shards = dist.PrefixStore("trainer", store)
            self.backend = make(config, spec, platform, shards, rank, 0, timeline)
        self.learner = Learner(config, self.backend, platform, timeline)
        self.rollouts = rollout_source(config, channel, self.learner, timeline)
        self.checkpoints = Checkpointing(
            config, self.learner, partial(data_state, config), timeline
        )

    def train(self, iteration: int) -> dict[str, float]:
        from pa_npu.trainer.loop import consume

        if self.rank == 0:
            put_groups(self.config, self.buffer, iteration, None)
        self.learner.publish(iteration)
        updates = self.config.schedule.updates_per_iteration
        return numbers(consume(self.learner, self.rollouts(iteration), updates).report)


def resume(
    job: dict[str, Any], config: Any, platform: Any, store: dist.TCPStore, rank: int
) -> list[dict[str, float]]:
    """Load checkpoint.load, save it again at these sizes, go on to the end; then again from the
    version before the last.
    """
    first, last, directory = job["first"], job["last"], Path(config.run.dir)
    platform.seed_all(config.run.seed)
    run = Attempt(config, platform, store, rank, "first")
    assert run.checkpoints.load() == first
    run.backend.export(directory / "loaded")
    run.checkpoints.finish(first)
    reports = [
        run.train(iteration) | numbers(run.checkpoints.at_border(iteration + 1))
        for iteration in range(first, last)
    ]
    run.checkpoints.finish(last)
    run.backend.export(directory / "hf")

    platform.seed_all(config.run.seed + 1)
    load = directory / "checkpoints" / f"iteration_{last - 1:06d}"
    checkpoint = config.checkpoint.model_copy(update={"load": str(load)})
    again = Attempt(
        config.model_copy(update={"checkpoint": checkpoint}), platform, store, rank, "again"
    )
    assert again.checkpoints.load() == last - 1
    reports.append(again.train(last - 1))
    again.backend.export(directory / "resumed")
    return reports


def faults(
    job: dict[str, Any], config: Any, platform: Any, store: dist.TCPStore, rank: int
) -> list[dict[str, float]]:
    """Save versions 2, 4, 6, 8.

    While 4 is saved the last rank's disk is full; it is killed with its writer while it saves 8.
    """
    from pa_npu.backends.megatron.checkpoint import PlannedShards

    last_rank = rank == config.trainer.devices - 1
    run = Attempt(config, platform, store, rank, "run")
    reports = []
    for number, version in enumerate((2, 4, 6, 8)):
        report = run.train(number)
        if last_rank and version == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.RLIM_INFINITY))
        if last_rank and version == 8:
            PlannedShards.write = lambda self: signal.pause()  # type: ignore[method-assign, assignment, return-value]
        report |= numbers(run.checkpoints.at_border(version))
        if version == 8:
            break
        # what the next borders do until the write has ended, here without an iteration in between
        while run.checkpoints._saving is not None:
            report |= numbers(run.checkpoints.at_border(version + 1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        reports.append(report)
    if rank == 0:
        Path(job["out"]).write_text(json.dumps(reports))
    dist.barrier()
    if last_rank:
        writer = run.checkpoints._saving.writer  # type: ignore[union-attr]
        os.kill(writer.pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    run.checkpoints.finish(8)
    return reports


ROLLED_BACK = "moments of one rank"


def moments_of(backend: Any) -> list[torch.Tensor]:
    parts = [part for one in backend.stepped() for part in (one.mean, one.square)]
    return [part for part in parts if part is not None]


def damage(
    job: dict[str, Any], config: Any, platform: Any, store: dist.TCPStore, rank: int
) -> list[dict[str, Any]]:
    """Save versions 1 and 2; what every rank says to version 2 after each kind of damage, and after
    none.
    """
    from pa_npu.errors import UserError
    from tests.helpers import checkpoint_damage as kinds

    run = Attempt(config, platform, store, rank, "run")
    moments = []
    for version in (1, 2):
        run.train(version - 1)
        run.checkpoints.finish(version)
        moments.append([part.clone() for part in moments_of(run.backend)])
    load_backend = run.backend.load

    def roll_back(directory: Path) -> Any:
        """Of the last rank alone, to the version before."""
        meta = load_backend(directory)
        if rank == config.trainer.devices - 1:
            for part, older in zip(moments_of(run.backend), moments[0], strict=True):
                part.copy_(older)
        return meta

    reports = []
    for signed, name in (
        (False, "flip_a_bit"),
        (True, "take_the_shard_of_another_version"),
        (True, "forge_the_index"),
        (False, ROLLED_BACK),
        (False, ""),
    ):
        run.backend.load = roll_back if name == ROLLED_BACK else load_backend
        parent = Path(config.run.dir) / (name or "whole").replace(" ", "_")
        load = parent / "iteration_000002"
        if rank == 0:
            shutil.copytree(Path(config.run.dir) / "checkpoints", parent)
            if name and name != ROLLED_BACK:
                getattr(kinds, name)(load, *([] if name == "forge_the_index" else ["__1_0.distcp"]))
            if signed:
                kinds.sign_anew(load)
        dist.barrier()
        checkpoint = config.checkpoint.model_copy(update={"load": str(load)})
        run.checkpoints._config = config.model_copy(update={"checkpoint": checkpoint})
        output = ""
        try:
            assert run.checkpoints.load() == 2
        except UserError as error:
            output = str(error)
        everyone: list[Any] = [None] * config.trainer.devices
        dist.all_gather_object(everyone, output)
        reports.append({"said": everyone, "made": (parent / "made").exists()})
    return reports


if __name__ == "__main__":
    main(sys.argv[1])

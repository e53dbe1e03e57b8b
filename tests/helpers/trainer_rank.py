"""One trainer rank on prepared groups, without engines: the real assembly, buffer, schedule, step and checkpoints.

    python -m tests.helpers.trainer_rank JOB.json      with RANK, LOCAL_RANK, WORLD_SIZE and PA_NPU_STORE set

JOB.json is written by run_job. Rank 0 puts the groups and writes the reports.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from pa_npu.algorithm.advantages import batch_advantages, group_advantages
from pa_npu.algorithm.registry import build_algorithm
from pa_npu.config.load import dump_config
from pa_npu.config.schema import Config
from pa_npu.control.messages import DISPATCHED, Dispatched, DispatchedGroup
from pa_npu.samples.group import Group
from tests.helpers.gradient_faults import put_advantages
from tests.helpers.groups import with_trained
from tests.helpers.preloaded import start_rank
from tests.helpers.reports import numbers
from tools.groups import group_of_responses

ROOT = Path(__file__).resolve().parents[2]


def with_advantages(group: Group, advantages: np.ndarray) -> Group:
    """advantages: [G]."""
    return with_trained(group, advantages=np.repeat(advantages, group.trained_lengths))


def make_groups(
    iteration: int,
    count: int,
    responses: int,
    seed: int,
    vocab: int = 128,
    prompt_tokens: int | None = None,
) -> list[Group]:
    """Random groups with ragged responses and nonzero advantages. prompt_tokens: None: 2 to 8."""
    rng = np.random.default_rng((seed, iteration))
    groups = []
    for index in range(count):
        lengths = rng.integers(1, 9, responses).astype(np.int32)
        total = int(lengths.sum())
        num_prompt_tokens = prompt_tokens or int(rng.integers(2, 9))
        groups.append(
            group_of_responses(
                iteration=iteration,
                version=iteration,
                index=index,
                prompt_id=index,
                prompt_tokens=rng.integers(3, vocab, num_prompt_tokens).astype(np.int32),
                response_tokens=rng.integers(3, vocab, total).astype(np.int32),
                response_lengths=lengths,
                logprobs=-rng.random(total).astype(np.float32),
                rewards=rng.random(responses).astype(np.float32),
                advantages=rng.standard_normal(responses).astype(np.float32),
                finished=np.ones(responses, np.uint8),
            )
        )
    return groups


@dataclass
class Job:
    config: Config
    directory: Path
    first: int = 0
    last: int = 1
    export: str | None = None
    # arrival order of the groups, by index; only with schedule.order=completion
    order: list[int] | None = None
    module: str = "tests.helpers.trainer_rank"  # what a rank runs
    # further values of JOB.json, for another module
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


def run_job(
    job: Job, timeout_s: float = 240, ends: tuple[int, ...] | None = None
) -> list[dict[str, float]]:
    """Start all ranks, wait, and return the reports of the iterations. Raises AssertionError with
    the logs on failure.

    ends: the ranks' exit codes, where some are meant to fail.
    """
    job.directory.mkdir(parents=True, exist_ok=True)
    config_file, job_file, out = (
        job.directory / name for name in ("config.yaml", "job.json", "reports.json")
    )
    config_file.write_text(dump_config(job.config))
    job_file.write_text(
        json.dumps(
            {
                "config": str(config_file),
                "first": job.first,
                "last": job.last,
                "export": job.export,
                "order": job.order,
                "out": str(out),
                **job.options,
            }
        )
    )
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = job.config.trainer.devices
    base = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(world),
        "PA_NPU_STORE": f"127.0.0.1:{store.port}",
        **job.environment,
    }
    ranks = []
    for rank in range(world):
        environment = {**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(
            start_rank(job.module, str(job_file), environment, job.directory / f"rank{rank}.log")
        )
    try:
        codes = [process.wait(timeout_s) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    logs = "\n".join(
        f"--- rank {r}\n{(job.directory / f'rank{r}.log').read_text()[-3000:]}"
        for r in range(world)
    )
    assert tuple(codes) == (ends or (0,) * world), f"exit codes {codes}\n{logs}"
    reports: list[dict[str, float]] = json.loads(out.read_text())
    return reports


def main(job_file: str) -> None:
    from pa_npu import platform as platforms
    from pa_npu.backends.registry import backend_module
    from pa_npu.checkpoints.saving import Checkpointing
    from pa_npu.config.load import load_config
    from pa_npu.control.channel import StoreChannel, connect
    from pa_npu.control.messages import UPDATE_SIZE, UpdateSize
    from pa_npu.families.spec import ModelSpec
    from pa_npu.samples.rollout_buffer import RolloutBuffer
    from pa_npu.telemetry.timeline import Timeline
    from pa_npu.trainer.assemble import rollout_source
    from pa_npu.trainer.invariants import check_dispatched, check_normalisers, check_trained
    from pa_npu.trainer.learner import Learner
    from pa_npu.trainer.loop import consume

    job: dict[str, Any] = json.loads(Path(job_file).read_text())
    config = load_config([job["config"]])
    platform = platforms.get(config.run.device)
    rank = int(os.environ["RANK"])
    host, port = os.environ["PA_NPU_STORE"].rsplit(":", 1)
    store = connect(host, int(port), 60)
    timeline = Timeline(None, "")
    platform.seed_all(config.run.seed)
    platform.set_deterministic(True)
    spec = ModelSpec.from_config(config)
    if "bucket_mib" in job:
        from pa_npu.backends.megatron import backend as megatron

        megatron._GRADIENT_BUCKET_MIB = job["bucket_mib"]
    module = backend_module(config.trainer.backend)
    backend = module.create(
        config, spec, platform, dist.PrefixStore("trainer", store), rank, 0, timeline
    )
    channel = StoreChannel(store)
    learner = Learner(config, backend, platform, timeline)
    if "fault" in job:
        from tests.helpers.gradient_faults import inject

        inject(job["fault"], learner)
    rollouts = rollout_source(config, channel, learner, timeline)
    checkpoints = Checkpointing(config, learner, partial(data_state, config), timeline)
    assert checkpoints.load() == job["first"]
    reports = []
    for iteration in range(job["first"], job["last"]):
        if rank == 0:
            buffer = RolloutBuffer(channel, "run", readers=1)
            dispatched = put_groups(
                config=config,
                buffer=buffer,
                iteration=iteration,
                order=job["order"],
                sizes=job.get("sizes"),
                fault=job.get("fault"),
                equal=job["equal"][iteration] if "equal" in job else None,
                images=job.get("images", False),
                prompt_tokens=job.get("prompt_tokens"),
            )
            DISPATCHED.put(channel, dispatched, iteration=iteration)
            if "sizes" in job:
                UPDATE_SIZE.put(channel, UpdateSize(job["sizes"][iteration]), iteration=iteration)
        learner.publish(iteration)
        consumed = consume(learner, rollouts(iteration), config.schedule.updates_per_iteration)
        output = DISPATCHED.wait(channel, 60, iteration=iteration)
        replicas = config.mesh.data
        check_dispatched(output, iteration, replicas, len(output.groups) // replicas)
        check_trained(output, backend.place.replica, consumed.trained, consumed.by_rule)
        check_normalisers(output, consumed.normalisers, build_algorithm(config))
        reports.append(numbers(consumed.report, checkpoints.at_border(iteration + 1)))
    if config.checkpoint.every:
        checkpoints.finish(job["last"])
    if job["export"]:
        backend.export(Path(job["export"]))
    if rank == 0:
        Path(job["out"]).write_text(json.dumps(reports))
    backend.close()


def data_state(config: Config, version: int) -> dict[str, Any]:
    """Makes the coordinator's state of the prompts taken before iteration `version`."""
    return {
        "position": version * config.schedule.prompts_per_iteration,
        "fingerprint": "prepared groups",
    }


def put_groups(
    config: Config,
    buffer: Any,
    iteration: int,
    order: list[int] | None,
    sizes: list[int] | None = None,
    fault: str | None = None,
    equal: list[int] | None = None,
    images: bool = False,
    prompt_tokens: int | None = None,
) -> Dispatched:
    """Slots as the coordinator assigns them with order=prompt, or in the given arrival order;
    advantages are those of the rewards.

    equal: indices of groups whose rewards are all the same. images: whether every second group
    shows one, beginning with the first.
    sizes: of every iteration, as many groups for each replica as schedule.tokens_per_update is said
    to take; None: all.
    """
    groups = make_groups(
        iteration,
        config.schedule.prompts_per_iteration,
        config.rollout.responses_per_prompt,
        config.run.seed,
        prompt_tokens=prompt_tokens,
    )
    if images:
        from tests.helpers.vision import showing_image

        groups[::2] = [showing_image(group, Path(config.model.path)) for group in groups[::2]]
    for index in equal or ():
        groups[index] = replace(
            groups[index], rewards=np.ones(groups[index].num_samples, np.float32)
        )
    kind = config.algorithm.advantage
    rewards = [group.rewards for group in groups]
    every = (
        batch_advantages(rewards)
        if kind == "batch-std"
        else [group_advantages(reward, kind) for reward in rewards]
    )
    every = [put_advantages(fault, number, advantages) for number, advantages in enumerate(every)]
    groups = [
        with_advantages(group, advantages) for group, advantages in zip(groups, every, strict=True)
    ]
    taken = len(groups) if sizes is None else sizes[iteration] * config.mesh.data
    trains_by_rule = build_algorithm(config).trains_by_rule
    sent = []
    for place, index in enumerate(order or range(taken)):
        group = groups[index]
        by_rule = trains_by_rule and not group.advantages.any()
        replica, slot = place % config.mesh.data, place // config.mesh.data
        buffer.put(group, replica, slot, by_rule=by_rule)
        lengths = tuple(group.trained_lengths.tolist())
        sent.append(DispatchedGroup(index, replica, lengths, by_rule=by_rule))
    return Dispatched(iteration, tuple(sent))


if __name__ == "__main__":
    main(sys.argv[1])

"""One trainer rank whose replicas have unequal numbers of microbatches, through the real backend and learner.

python -m tests.helpers.unequal_rank JOB.json      started by trainer_rank.run_job, like that module

JOB.json's "shares": the groups of each replica, by index. Rank 0 writes the reports, which have the
probe's difference before the update ("probe_max").
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pa_npu.algorithm.advantages import group_advantages
from pa_npu.samples.expert_choices import ExpertChoices
from pa_npu.samples.microbatch import pack
from pa_npu.samples.rollout_buffer import run_columns
from tests.helpers.groups import with_random_expert_choices
from tests.helpers.reports import numbers
from tests.helpers.shelf import shelf_iterator
from tests.helpers.trainer_rank import make_groups, with_advantages


def main(job_file: str) -> None:
    from pa_npu import platform as platforms
    from pa_npu.backends.registry import backend_module
    from pa_npu.config.load import load_config
    from pa_npu.control.channel import connect
    from pa_npu.families.spec import ModelSpec
    from pa_npu.telemetry.timeline import Timeline
    from pa_npu.trainer.learner import Learner
    from pa_npu.trainer.loop import consume

    job: dict[str, Any] = json.loads(Path(job_file).read_text())
    config = load_config([job["config"]])
    platform = platforms.get(config.run.device)
    host, port = os.environ["PA_NPU_STORE"].rsplit(":", 1)
    store, rank = dist.PrefixStore("trainer", connect(host, int(port), 60)), int(os.environ["RANK"])
    platform.seed_all(config.run.seed)
    platform.set_deterministic(True)
    spec, timeline = ModelSpec.read(config.model.path), Timeline(None, "")
    backend = backend_module(config.trainer.backend).create(
        config, spec, platform, store, rank, 0, timeline
    )
    learner = Learner(config, backend, platform, timeline)
    reports, expert_choices = [], ExpertChoices.from_config(config)
    for iteration in range(job["first"], job["last"]):
        groups = make_groups(
            iteration,
            config.schedule.prompts_per_iteration,
            config.rollout.responses_per_prompt,
            config.run.seed,
        )
        kind = config.algorithm.advantage
        groups = [with_advantages(group, group_advantages(group.rewards, kind)) for group in groups]
        if expert_choices is not None:
            groups = [
                with_random_expert_choices(
                    group, expert_choices, 100 * iteration + group.index, 0.02
                )
                for group in groups
            ]
        own = [
            replace(groups[index], index=slot)
            for slot, index in enumerate(job["shares"][backend.place.replica])
        ]
        learner.publish(iteration)
        probed = learner.probe([pack([group], True, config.trainer.pad_multiple) for group in own])
        rollouts = shelf_iterator(
            own,
            iteration,
            responses=config.microbatch_responses,
            pad_multiple=config.trainer.pad_multiple,
            columns=run_columns(config),
        )
        report = consume(learner, rollouts, config.schedule.updates_per_iteration).report
        reports.append(numbers(report) | {"probe_max": probed.largest})
    backend.export(Path(job["export"]))
    if rank == 0:
        Path(job["out"]).write_text(json.dumps(reports))
    backend.close()


if __name__ == "__main__":
    main(sys.argv[1])

"""Keys and values that earlier releases had: what took their place, or why there is none. One that is removed gets a row here."""

from __future__ import annotations

import re

REMOVED: dict[str, str] = {
    "algorithm.advantage_scale": "use algorithm.advantage, whose group-std and batch-std divide",
    "algorithm.name=ppo": "use algorithm.name=critic-free-ppo; it always had the group's mean reward where PPO has a critic",
    "buffer.backend": "groups lie in the store, or with buffer.shards=node with the replicas that train them",
    "buffer.timeout_s": "with buffer.shards=node a shard has two minutes to take or give one group",
    "checkpoint.asynchronous": "checkpoints are written while training goes on, each within checkpoint.timeout_s",
    "data.skip": "use schedule.dynamic_sampling, which replaces groups that are all right or all wrong",
    "data.skip_after": "use schedule.dynamic_sampling, which replaces groups that are all right or all wrong",
    "data.skip_epochs": "use schedule.dynamic_sampling, which replaces groups that are all right or all wrong",
    "environment.name=clients": "use environment.name=agents, whose programs ask the run's policy (docs/agents.md)",
    "evaluate.patience": "use checkpoint.keep_best, and pa_npu.Run, whose loop may stop the run (docs/evaluation.md)",
    "evaluate.stop_at": "use checkpoint.keep_best, and pa_npu.Run, whose loop may stop the run (docs/evaluation.md)",
    "placement.api_port": "use agent.port, whose gateway gives samples and groups to other programs (docs/agents.md)",
    "lora.dropout": "log-probs have to be the same each time; a lower lora.rank keeps adapters small",
    "microbatch.pad_to_multiple_of": "packed lengths follow trainer.sequence_parallel",
    "placement.master_addr": "use placement.host",
    "placement.node_rank": "a cluster's nodes have no rank to set; use placement.cluster=ray",
    "publish.false_stop_rate": "use publish.noise_margin",
    "publish.shared_through": "engines of placement.colocate get weights through host memory, or with gloo in everyone's group",
    "reward.code.files_mib": "a program may write 16 MiB into files, and has reward.code.memory_mib beside them",
    "reward.code.output_kib": "a program may write 256 KiB of output, and of errors; reward.code.timeout_s ends it",
    "reward.code.processes": "a program may have 32 processes and threads, which share reward.code.memory_mib",
    "reward.judge.score_key": "use reward.judge.score_pattern, such as '\"score\": *(\\d+)'",
    "rollout.enforce_eager": "use rollout.graph_mode, which is its opposite",
    "rollout.engine_settings[].via": "every engine gets its weights from the trainers",
    "rollout.expandable_segments": 'use rollout.env, such as {PYTORCH_NPU_ALLOC_CONF: "expandable_segments:True"}',
    "rollout.probe_every_s": "use rollout.probe_timeout_s, in which an engine is probed twice",
    "rollout.restart_window_s": "rollout.restarts counts within an hour",
    "rollout.shared_engines": "use placement.colocate, with which every device decodes, then trains",
    "rollout.too_long": "a group that is too long ends the run; raise rollout.request_timeout_s, or lower max_response_tokens",
    "rollout.top_k": "engines sample from the whole distribution, which trainers match exactly; use rollout.temperature",
    "rollout.top_p": "engines sample from the whole distribution, which trainers match exactly; use rollout.temperature",
    "run.restart_window_s": "run.restarts counts within an hour",
    "schedule.on_publish": "a publish waits for the responses in flight; with publish.swap=rolling engines that are through do not",
    "schedule.stream=alternate": "use schedule.compare_iterations, the number of the last iterations to compare",
    "schedule.tokens_per_version": "a response is written by one version, up to rollout.max_response_tokens",
    "telemetry.samples_per_iteration": "use telemetry.samples",
    "telemetry.tensorboard": "use telemetry.trackers, such as [tensorboard] or []",
    "telemetry.tracker_python": "install trackers beside pa_npu; engines that need other versions have rollout.python",
    "trainer.expert_dispatch": "with trainer.expert_parallel tokens go to the ranks that have their experts",
}


def removed(key: str) -> str | None:
    """Returns the remedy for a key, a section or a key=value that an earlier release had; None if no release had it."""
    key = re.sub(r"\.\d+", "[]", key)  # an entry of a list
    return next((remedy for old, remedy in REMOVED.items() if f"{key}.".startswith(f"{old}.")), None)

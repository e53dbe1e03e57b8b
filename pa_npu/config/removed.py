"""Keys and values of earlier releases, each with what replaced it or why nothing did.

Whoever removes a key adds a row here.
"""

from __future__ import annotations

import re

REMOVED: dict[str, str] = {
    "agent.container_options": "write them before the image, such as agent.container='--memory=8g "
    "IMAGE'",
    "agent.timeout_s": "use environment.timeout_s",
    "algorithm.advantage_scale": "use algorithm.advantage, whose group-std and batch-std divide",
    "algorithm.dpo_beta": "use algorithm.kl_coef, which is beta of algorithm.loss=dpo",
    "algorithm.importance_rule": "use algorithm.importance_floor: a number masks, such as 0; none "
    "truncates",
    "algorithm.name=ppo": "use algorithm.name=critic-free-ppo; it always had the group's mean "
    "reward where PPO has a critic",
    "buffer.backend": "groups lie in the store, or with buffer.shards=node with the replicas that "
    "train them",
    "buffer.timeout_s": "with buffer.shards=node a shard has two minutes to take or give one group",
    "checkpoint.asynchronous": "checkpoints of checkpoint.every are written in the background, "
    "always",
    "checkpoint.timeout_s": "a checkpoint has trainer.wait_timeout_s to be written",
    "data.max_rows": "use max_rows of a dataset, such as data.train=[{path: FILE, max_rows: 100}]",
    "data.max_test_rows": "use max_rows of the held-out set, such as data.test={path: FILE, "
    "max_rows: 100}",
    "data.skip": "use schedule.dynamic_sampling, which replaces groups that are all right or all "
    "wrong",
    "data.skip_after": "use schedule.dynamic_sampling, which replaces groups that are all right or "
    "all wrong",
    "data.skip_epochs": "use schedule.dynamic_sampling, which replaces groups that are all right "
    "or all wrong",
    "environment.name=clients": "use environment.name=agents, whose programs ask the run's policy "
    "(docs/agents.md)",
    "evaluate.greedy": "greedy answers are one per question, beside evaluate.samples",
    "evaluate.patience": "use checkpoint.keep_best, and pa_npu.Run, whose loop may stop the run "
    "(docs/evaluation.md)",
    "evaluate.stop_at": "use checkpoint.keep_best, and pa_npu.Run, whose loop may stop the run "
    "(docs/evaluation.md)",
    "placement.api_port": "use agent.port, whose gateway gives samples and groups to other "
    "programs (docs/agents.md)",
    "lora.dropout": "log-probs have to be the same each time; a lower lora.rank keeps adapters "
    "small",
    "lora.export_merged": "use checkpoint.export_hf=merged",
    "lora.rank_stabilized": "use lora.alpha, times the square root of lora.rank",
    "microbatch.pad_to_multiple_of": "packed lengths follow trainer.tensor_parallel",
    "model.frozen_dtype": "old policy and reference have model.dtype; with model.dtype=bf16 they "
    "take half the memory of fp32",
    "optimizer.beta1": "use optimizer.betas, such as [0.9, 0.95]",
    "optimizer.beta2": "use optimizer.betas, such as [0.9, 0.95]",
    "placement.engine_devices": "use placement.devices: the engines' indices, then those of the "
    "trainer ranks",
    "placement.engine_port": "use placement.port, the store's; engines have those behind it",
    "placement.join_timeout_s": "use run.startup_timeout_s",
    "placement.master_addr": "use placement.host",
    "placement.node_rank": "a cluster's nodes have no rank to set; use placement.cluster=ray",
    "placement.node_timeout_s": "with placement.cluster=ray a node is lost that is not heard of "
    "for a minute",
    "placement.pin_cores": "with run.device=cpu processes are pinned to cores where there are "
    "enough",
    "placement.ray_address": "with placement.cluster=ray set RAY_ADDRESS=HOST:PORT in the "
    "environment",
    "placement.store_port": "use placement.port",
    "placement.trainer_devices": "use placement.devices: the engines' indices, then those of the "
    "trainer ranks",
    "publish.bucket_mib": "buckets follow the device's free memory; publish.timeout_s ends a "
    "publish",
    "publish.false_stop_rate": "use publish.noise_margin",
    "publish.shared_through": "engines of placement.colocate get weights through host memory, or "
    "with gloo in everyone's group",
    "publish.swap": "use publish.mode=rolling, or delayed for what was together",
    "publish.when": "use publish.divergence; none publishes every version",
    "reward.code.concurrency": "use reward.workers: twice as many programs run at once",
    "reward.code.files_mib": "a program may write 16 MiB into files, and has "
    "reward.code.memory_mib beside them",
    "reward.code.most_tests": "the first 32 tests of a row are run, each for reward.code.timeout_s",
    "reward.code.output_kib": "a program may write 256 KiB of output, and of errors; "
    "reward.code.timeout_s ends it",
    "reward.code.processes": "a program may have 32 processes and threads, which share "
    "reward.code.memory_mib",
    "reward.functions[].max_tokens": "an overlong reward is -1 at rollout.max_response_tokens",
    "reward.judge.api_key_variable": "export the key of reward.judge.url in JUDGE_API_KEY",
    "reward.judge.attempts": "a score is asked for four times, each for reward.judge.timeout_s",
    "reward.judge.cache": "scores are kept in run.dir",
    "reward.judge.highest": "use reward.judge.scores, such as [0, 10]",
    "reward.judge.lowest": "use reward.judge.scores, such as [0, 10]",
    "reward.judge.max_tokens": "use reward.judge.request, such as {temperature: 0, max_tokens: "
    "512}",
    "reward.judge.score_key": "use reward.judge.score_pattern, such as '\"score\": *(\\d+)'",
    "reward.judge.system": "write it into reward.judge.template",
    "reward.judge.temperature": "use reward.judge.request, such as {temperature: 0, max_tokens: "
    "512}",
    "reward.max_failing_share": "a function of reward.functions that fails for most of 64 groups "
    "ends the run",
    "rollout.enforce_eager": "use rollout.graph_mode, which is its opposite",
    "rollout.engine_settings[].via": "every engine gets its weights from the trainers",
    "rollout.expandable_segments": "use rollout.env, such as {PYTORCH_NPU_ALLOC_CONF: "
    '"expandable_segments:True"}',
    "rollout.key_file": "set VLLM_API_KEY to the file's content beside rollout.attach",
    "rollout.prefix_caching": "engines keep a group's prompt; rollout.extra_args can say otherwise",
    "rollout.probe_every_s": "use rollout.probe_timeout_s, in which an engine is probed twice",
    "rollout.restart_window_s": "run.restarts counts within an hour",
    "rollout.restarts": "use run.restarts, which is also how often each engine is started again",
    "rollout.shared_engines": "use placement.colocate, with which every device decodes, then "
    "trains",
    "rollout.shared_memory_fraction": "use rollout.memory_fraction; with placement.colocate it is "
    "the share beside a trainer",
    "rollout.startup_timeout_s": "use run.startup_timeout_s",
    "rollout.too_long": "a group that is too long ends the run; raise rollout.request_timeout_s, "
    "or lower max_response_tokens",
    "rollout.top_k": "engines sample from the whole distribution, which trainers match exactly; "
    "use rollout.temperature",
    "rollout.top_p": "engines sample from the whole distribution, which trainers match exactly; "
    "use rollout.temperature",
    "run.restart_window_s": "run.restarts counts within an hour",
    "schedule.dynamic_sampling_limit": "schedule.dynamic_sampling ends the run at eight times "
    "schedule.prompts_per_iteration",
    "schedule.on_publish": "a publish waits for the responses in flight; with publish.mode=rolling "
    "engines that are through do not",
    "schedule.stream=alternate": "use schedule.compare_iterations, the number of the last "
    "iterations to compare",
    "schedule.tokens_per_version": "a response is written by one version, up to "
    "rollout.max_response_tokens",
    "telemetry.offline": "set the variable of each of telemetry.trackers, such as "
    "WANDB_MODE=offline or SWANLAB_MODE=offline",
    "telemetry.profile_ranks": "telemetry.profile_iterations profiles a rank of each pipeline "
    "stage",
    "telemetry.run_name": "the name is that of run.dir's last folder",
    "telemetry.samples_per_iteration": "use telemetry.samples",
    "telemetry.tags": "set the variable of each of telemetry.trackers, such as WANDB_TAGS",
    "telemetry.tensorboard": "use telemetry.trackers, such as [tensorboard] or []",
    "telemetry.timeline": "the timeline is always written into run.dir; `pa-npu view` draws it",
    "telemetry.tracker_python": "install trackers beside pa_npu; engines that need other versions "
    "have rollout.python",
    "telemetry.tracker_timeout_s": "a tracker of telemetry.trackers has a minute to answer",
    "telemetry.warmup_iterations": "`pa-npu report --warmup N run.dir` leaves out N iterations, "
    "the first one by default",
    "trainer.expert_dispatch": "with trainer.expert_parallel tokens go to the ranks that have "
    "their experts",
    "trainer.gradient_bucket_mib": "with trainer.backend=megatron gradients are reduced in buckets "
    "of 160 MiB",
    "trainer.sequence_parallel": "it is on where trainer.tensor_parallel is above 1",
    "trainer.startup_timeout_s": "use run.startup_timeout_s",
}


def removed(key: str) -> str | None:
    """Returns the remedy for a key, a section or a key=value of an earlier release, or None."""
    key = re.sub(r"\.\d+", "[]", key)  # an entry of a list
    for old, remedy in REMOVED.items():
        if f"{key}.".startswith(f"{old}."):
            return remedy
    return None

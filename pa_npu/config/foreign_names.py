"""Names that TRL's GRPOConfig and verl's ppo_trainer.yaml have for our keys: for hints, and for importing their files.

Names are those of TRL's trl/trainer/grpo_config.py (and transformers' TrainingArguments, which it extends) and of verl's
verl/trainer/config. SAME holds what means the same and takes the same values; what must be converted is in RELATED, with the key
that it is about, and in tools/foreign/translate.py, with how.
"""

from __future__ import annotations

from typing import Literal

Origin = Literal["trl", "verl"]

SAME: dict[Origin, dict[str, str]] = {
    "trl": {
        "model_name_or_path": "model.path",
        "output_dir": "run.dir",
        "seed": "run.seed",
        "learning_rate": "optimizer.learning_rate",
        "warmup_steps": "optimizer.warmup_iterations",
        "weight_decay": "optimizer.weight_decay",
        "adam_epsilon": "optimizer.epsilon",
        "max_grad_norm": "optimizer.clip_grad",
        "num_generations": "rollout.responses_per_prompt",
        "max_completion_length": "rollout.max_response_tokens",
        "max_prompt_length": "data.max_prompt_tokens",
        "temperature": "rollout.temperature",
        "shuffle_dataset": "data.shuffle",
        "beta": "algorithm.kl_coef",
        "epsilon_high": "algorithm.clip_high",
        "delta": "algorithm.delta",
        "vllm_gpu_memory_utilization": "rollout.memory_fraction",
        "vllm_tensor_parallel_size": "rollout.tensor_parallel",
        "save_total_limit": "checkpoint.keep_last",
    },
    "verl": {
        "actor_rollout_ref.model.path": "model.path",
        "actor_rollout_ref.actor.optim.lr": "optimizer.learning_rate",
        "actor_rollout_ref.actor.optim.min_lr": "optimizer.min_learning_rate",
        "actor_rollout_ref.actor.optim.weight_decay": "optimizer.weight_decay",
        "actor_rollout_ref.actor.optim.clip_grad": "optimizer.clip_grad",
        "actor_rollout_ref.actor.grad_clip": "optimizer.clip_grad",
        "actor_rollout_ref.actor.clip_ratio_low": "algorithm.clip_low",
        "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip_high",
        "actor_rollout_ref.actor.clip_ratio_c": "algorithm.dual_clip",
        "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coef",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "trainer.tensor_parallel",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": "trainer.pipeline_parallel",
        "actor_rollout_ref.actor.megatron.use_distributed_optimizer": "trainer.distributed_optimizer",
        "actor_rollout_ref.rollout.n": "rollout.responses_per_prompt",
        "actor_rollout_ref.rollout.temperature": "rollout.temperature",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout.memory_fraction",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.tensor_parallel",
        "actor_rollout_ref.rollout.max_num_seqs": "rollout.max_num_seqs",
        "actor_rollout_ref.rollout.max_num_batched_tokens": "rollout.max_num_batched_tokens",
        "actor_rollout_ref.rollout.ignore_eos": "rollout.ignore_eos",
        "data.max_prompt_length": "data.max_prompt_tokens",
        "data.max_response_length": "rollout.max_response_tokens",
        "data.train_batch_size": "schedule.prompts_per_iteration",
        "data.shuffle": "data.shuffle",
        "data.seed": "run.seed",
        "algorithm.filter_groups.enable": "schedule.dynamic_sampling",
        "trainer.total_training_steps": "schedule.iterations",
        "trainer.default_local_dir": "run.dir",
        "trainer.nnodes": "placement.nnodes",
        "trainer.project_name": "telemetry.project",
    },
}

RELATED: dict[Origin, dict[str, str]] = {
    "trl": {
        "dtype": "model.dtype",
        "torch_dtype": "model.dtype",
        "bf16": "model.dtype",
        "dataset_name": "data.train",
        "report_to": "telemetry.trackers",
        "adam_beta1": "optimizer.betas",
        "adam_beta2": "optimizer.betas",
        "run_name": "run.dir",
        "max_steps": "schedule.iterations",
        "num_train_epochs": "schedule.iterations",
        "eval_dataset": "data.test",
        "lr_scheduler_type": "optimizer.decay",
        "epsilon": "algorithm.clip_low",
        "generation_batch_size": "schedule.prompts_per_iteration",
        "loss_type": "algorithm.aggregation",
        "importance_sampling_level": "algorithm.loss",
        "scale_rewards": "algorithm.advantage",
        "reward_weights": "reward.functions",
        "reward_funcs": "reward.functions",
        "ref_model_sync_steps": "algorithm.reference_refresh_every",
        "vllm_importance_sampling_correction": "algorithm.importance_sampling",
        "vllm_importance_sampling_mode": "algorithm.importance_sampling",
        "vllm_importance_sampling_cap": "algorithm.importance_cap",
        "save_steps": "checkpoint.every",
        "eval_steps": "schedule.evaluate_every",
        "per_device_train_batch_size": "microbatch.responses",
        "gradient_checkpointing": "trainer.recompute",
        "num_iterations": "schedule.updates_per_iteration",
        "steps_per_generation": "schedule.updates_per_iteration",
        "chat_template_path": "data.chat_template",
        "chat_template_kwargs": "data.template_options",
        "resume_from_checkpoint": "checkpoint.resume",
    },
    "verl": {
        "actor_rollout_ref.actor.clip_ratio": "algorithm.clip_low",
        "actor_rollout_ref.actor.loss_agg_mode": "algorithm.aggregation",
        "actor_rollout_ref.actor.policy_loss.loss_mode": "algorithm.loss",
        "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl_coef",
        "actor_rollout_ref.actor.use_kl_loss": "algorithm.kl_in",
        "actor_rollout_ref.actor.kl_loss_type": "algorithm.kl_estimator",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "schedule.updates_per_iteration",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "microbatch.max_tokens",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "microbatch.responses",
        "actor_rollout_ref.actor.optim.betas": "optimizer.betas",
        "actor_rollout_ref.actor.optim.lr_warmup_steps": "optimizer.warmup_iterations",
        "actor_rollout_ref.actor.optim.lr_decay_style": "optimizer.decay",
        "actor_rollout_ref.actor.optim.lr_scheduler_type": "optimizer.decay",
        "actor_rollout_ref.actor.optim.warmup_style": "optimizer.decay",
        "actor_rollout_ref.rollout.dtype": "model.dtype",
        "actor_rollout_ref.rollout.enforce_eager": "rollout.graph_mode",
        "data.train_files": "data.train",
        "data.val_files": "data.test",
        "data.train_max_samples": "data.train",
        "data.val_max_samples": "data.test",
        "data.prompt_key": "data.question_column",
        "data.apply_chat_template_kwargs": "data.template_options",
        "data.filter_overlong_prompts": "data.overlong_prompt",
        "data.truncation": "data.overlong_prompt",
        "algorithm.adv_estimator": "algorithm.advantage",
        "algorithm.norm_adv_by_std_in_grpo": "algorithm.advantage",
        "algorithm.use_kl_in_reward": "algorithm.kl_in",
        "algorithm.kl_penalty": "algorithm.kl_estimator",
        "algorithm.kl_ctrl.kl_coef": "algorithm.kl_coef",
        "trainer.total_epochs": "schedule.iterations",
        "trainer.experiment_name": "run.dir",
        "actor_rollout_ref.actor.strategy": "trainer.backend",
        "actor_rollout_ref.model.enable_gradient_checkpointing": "trainer.recompute",
        "trainer.logger": "telemetry.trackers",
        "trainer.test_freq": "schedule.evaluate_every",
        "trainer.save_freq": "checkpoint.every",
        "trainer.max_actor_ckpt_to_keep": "checkpoint.keep_last",
        "trainer.resume_mode": "checkpoint.resume",
        "trainer.device": "run.device",
        "trainer.n_gpus_per_node": "placement.devices_per_node",
        "custom_reward_function.path": "reward.functions",
    },
}

# What people type besides: names of papers and of other frameworks' command lines.
_USUAL = {
    "lr": "optimizer.learning_rate",
    "group_size": "rollout.responses_per_prompt",
    "batch_size": "schedule.prompts_per_iteration",
    "rollout_batch_size": "schedule.prompts_per_iteration",
    "max_tokens": "rollout.max_response_tokens",
    "max_new_tokens": "rollout.max_response_tokens",
    "kl_beta": "algorithm.kl_coef",
    "kl_loss_coef": "algorithm.kl_coef",
    "init_kl_coef": "algorithm.kl_coef",
    "clip_eps": "algorithm.clip_low",
    "cliprange": "algorithm.clip_low",
    "eps_clip": "algorithm.clip_low",
    "warmup_ratio": "optimizer.warmup_iterations",
    "total_steps": "schedule.iterations",
    "num_steps": "schedule.iterations",
    "model_path": "model.path",
    "save_interval": "checkpoint.every",
    "eval_interval": "schedule.evaluate_every",
    "reward_fn": "reward.functions",
    "tp": "trainer.tensor_parallel",
    "pp": "trainer.pipeline_parallel",
}


def our_key(theirs: str) -> str | None:
    """Our key for a name of theirs, dotted or its last part alone where that is meant for one key only; None for no such name."""
    by_name: dict[str, set[str]] = {name: {ours} for name, ours in _USUAL.items()}
    for origin in SAME:
        for name, ours in (SAME[origin] | RELATED[origin]).items():
            for known in {name, name.rpartition(".")[2]} - _USUAL.keys():
                by_name.setdefault(known, set()).add(ours)
    found = by_name.get(theirs, set())
    return next(iter(found)) if len(found) == 1 else None

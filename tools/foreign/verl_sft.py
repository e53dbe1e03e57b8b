"""verl's sft_trainer.yaml, and the overrides of its scripts of the supervised stage, as ours."""

from __future__ import annotations

import re

from tools.foreign.common import (
    DECAYS,
    set_adapters,
    set_held_out,
    set_trackers,
    set_training_data,
)
from tools.foreign.translation import Translation

# Keys that say how verl works, or what is always done here: nothing is lost without them.
NOT_NEEDED = re.compile(
    r"model\.(use_liger|strategy|fsdp_config|external_lib|use_shm|hf_config_path|tokenizer_path|"
    r"use_remove_padding|override_config)|use_remove_padding|use_dynamic_bsz|max_token_len_per_gpu|"
    r"data\.(micro_batch_size$|use_shm|num_workers|balance_dp_token|pad_mode|ignore_input_ids_mismatch|"
    r"custom_cls|use_dynamic_bsz|multiturn\.(enable|messages_key|tools_key)|chat_template)|"
    r"trainer\.(default_hdfs_dir|device|checkpoint|resume_from_path|profile_interval|ray_wait)|"
    r"optim\.(optimizer|optimizer_impl|zero_indexed_step|num_cycles)|checkpoint\b|profiler\b|engine\b|hydra\b"
)
_USUAL_BATCH, _USUAL_LENGTH, _MAX_GROUP = 256, 1024, 8  # verl's own, and ours
_USUAL_RATE, _USUAL_EPOCHS, _USUAL_DEVICES = 1e-5, 4, 8
_DECAYS = {**DECAYS, "wsd": None}


def is_sft(work: Translation) -> bool:
    """Returns whether the file is of the supervised stage, which has no actor and no rollouts."""
    names = work.given_names
    if any(name.startswith("actor_rollout_ref") for name in names):
        return False
    return any(name.startswith(("model.", "optim.", "data.multiturn")) for name in names)


def from_verl_sft(work: Translation) -> None:
    """Translates all that has a counterpart here."""
    work.set("algorithm.name", "sft")
    work.set("trainer.backend", "megatron" if work.take("engine") == "megatron" else "fsdp")
    for name in ("model.partial_pretrain", "model.path"):
        if (path := work.take(name)) is not None:
            work.set("model.path", path, name)
    work.choose("model.trust_remote_code", "model.trust_remote_code", {True: True, False: None})
    work.choose(
        "model.enable_gradient_checkpointing", "trainer.recompute", {True: "full", False: "none"}
    )
    _adapters(work)
    _data(work)
    _optimizer(work)
    _operation(work)
    _batch(work)


def _adapters(work: Translation) -> None:
    rank, alpha = work.take_number("model.lora_rank"), work.take_number("model.lora_alpha")
    targets = work.take("model.target_modules")
    if rank:
        set_adapters(work, rank, 16 if alpha is None else alpha, targets or "all-linear")


def _data(work: Translation) -> None:
    set_training_data(work, "data.train_files")
    set_held_out(work, "data.val_files")
    for name, ours in (
        ("data.prompt_key", "data.question_column"),
        ("data.response_key", "data.answer_column"),
    ):
        column = work.take(name)
        inner = work.take(name.replace("_key", "_dict_keys"))
        if isinstance(inner, list) and inner:
            column = f"{column}.{inner[0]}" if column else inner[0]
        if column is not None:
            work.set(ours, column, name)
    length = work.take_count("data.max_length") or _USUAL_LENGTH
    work.set("data.max_prompt_tokens", max(1, length // 2), "data.max_length")
    work.set("rollout.max_response_tokens", length - max(1, length // 2) or 1, "data.max_length")
    work.choose("data.truncation", "data.overlong_prompt", {"error": "refuse", "right": "truncate"})
    work.choose("data.enable_thinking_default", "data.template_options", {})
    for name in ("data.train_max_samples", "data.val_max_samples"):
        if (max_rows := work.take_number(name)) is not None and max_rows > 0:
            work.lose(name, max_rows, "is max_rows of a dataset; see data.train")


def _optimizer(work: Translation) -> None:
    work.set("optimizer.learning_rate", work.take_number("optim.lr") or _USUAL_RATE, "optim.lr")
    for name, ours in (
        ("optim.weight_decay", "optimizer.weight_decay"),
        ("optim.clip_grad", "optimizer.clip_grad"),
        ("optim.betas", "optimizer.betas"),
        ("optim.min_lr", "optimizer.min_learning_rate"),
        ("optim.lr_warmup_steps_ratio", "optimizer.warmup_share"),
        ("optim.warmup_steps_ratio", "optimizer.warmup_share"),
    ):
        if (value := work.take(name)) is not None:
            work.set(ours, value, name)
    if (steps := work.take_number("optim.lr_warmup_steps")) is not None and steps > 0:
        work.set("optimizer.warmup_iterations", int(steps), "optim.lr_warmup_steps")
        work.values.pop("optimizer.warmup_share", None)
    for name in ("optim.lr_scheduler", "optim.lr_scheduler_type"):
        work.left.setdefault("optim.lr_scheduler", "cosine")
        decay = work.take(name)
        if decay is None:
            continue
        if _DECAYS.get(decay) is None:
            work.lose(name, decay, "has no counterpart; see optimizer.decay")
        else:
            work.set("optimizer.decay", _DECAYS[decay], name)
    if "optim.lr_scheduler" in work.given_names:
        return
    work.left.pop("optim.lr_scheduler", None)


def _operation(work: Translation) -> None:
    set_trackers(work, "trainer.logger")
    for name, ours in (
        ("trainer.save_freq", "checkpoint.every"),
        ("trainer.test_freq", "schedule.evaluate_every"),
    ):
        every = work.take_number(name)
        if isinstance(every, int) and every > 0:
            work.set(ours, every, name)
        elif every not in (None, -1):
            work.lose(name, every, f"set {ours} to a number of iterations")
    if (max_checkpoints := work.take_count("trainer.max_ckpt_to_keep")) is not None:
        work.set("checkpoint.keep_last", max_checkpoints, "trainer.max_ckpt_to_keep")
    work.choose("trainer.resume_mode", "checkpoint.resume", {"disable": None, "auto": "auto"})
    directory, name = work.take("trainer.default_local_dir"), work.take("trainer.experiment_name")
    if directory or name:
        work.set("run.dir", directory or f"runs/{name}", "trainer.default_local_dir")
    if (project := work.take("trainer.project_name")) is not None:
        work.set("telemetry.project", project, "trainer.project_name")
    if (seed := work.take("trainer.seed")) is not None:
        work.set("run.seed", seed, "trainer.seed")


def _batch(work: Translation) -> None:
    """Devices, rows of an update in groups of up to 8, and the run's length."""
    nodes = work.take_count("trainer.nnodes") or 1
    per_node = work.take_count("trainer.n_gpus_per_node") or work.take_count("devices_per_node")
    devices = work.extent.devices or nodes * (per_node or _USUAL_DEVICES)
    work.set("trainer.devices", devices)
    for name in ("ulysses_sequence_parallel_size", "engine.ulysses_sequence_parallel_size"):
        if (parts := work.take_count(name)) is not None and parts > 1:
            work.set("trainer.context_parallel", parts, name)
    batch = work.take_count("data.train_batch_size") or _USUAL_BATCH
    size = max(n for n in range(1, _MAX_GROUP + 1) if batch % n == 0)
    work.set("rollout.responses_per_prompt", size)
    work.set("schedule.prompts_per_iteration", batch // size, "data.train_batch_size")
    batch_per_device = work.take_count("data.micro_batch_size_per_gpu")
    if batch_per_device is not None:
        work.set(
            "microbatch.responses",
            max(n for n in range(1, min(batch_per_device, size) + 1) if size % n == 0),
        )
    steps, epochs = (
        work.take("trainer.total_training_steps"),
        work.take_number("trainer.total_epochs"),
    )
    if isinstance(steps, int):
        work.set("schedule.iterations", steps, "trainer.total_training_steps")
    else:
        work.set("schedule.epochs", float(epochs or _USUAL_EPOCHS), "trainer.total_epochs")

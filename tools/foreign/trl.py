"""TRL's GRPOConfig, RLOOConfig, OnlineDPOConfig and those of trl_rows.py, its ModelConfig and its trainers' arguments, as ours."""

from __future__ import annotations

import re
from typing import Any

from tools.foreign import trl_rows
from tools.foreign.common import (
    DECAYS,
    DTYPES,
    epochs_to_iterations,
    is_hub_name,
    set_adapters,
    set_clip_range,
    set_colocated,
    set_held_out,
    set_separate,
    set_template_options,
    set_trackers,
    set_training_data,
    whole_distribution,
)
from tools.foreign.translation import Translation

# Keys that say how TRL works, or what is always done here: nothing is lost without them.
NOT_NEEDED = re.compile(
    r"use_vllm|vllm_(mode|model_impl|enable_sleep_mode|server_\w+|group_port|max_model_length)|logging_\w+|log_\w+|"
    r"num_completions_to_print|remove_unused_columns|ds3_gather_for_generation|do_(eval|train)|(eval|save)_strategy|"
    r"disable_dropout|gradient_checkpointing_kwargs|processing_class|tokenizer|dataloader_\w+|push_to_hub|hub_\w+|"
    r"overwrite_output_dir|ddp_\w+|deepspeed|fsdp|fsdp_config|optim|tf32|trackio_space_id|callbacks|bf16_full_eval|"
    r"use_liger_kernel|use_liger_loss|attn_implementation|model_revision|per_device_eval_batch_size|num_generations_eval|"
    r"pad_to_multiple_of|cache_implementation|use_transformers_paged|use_transformers_continuous_batching|"
    r"dataset_(train|test)_split|dataset_config|dataset_streaming|lora_task_type|load_best_model_at_end|"
    r"model_init_kwargs\.(attn_implementation|use_cache|revision|device_map)|disable_tqdm|save_only_model|save_safetensors|"
    r"restore_callback_states_from_checkpoint|average_tokens_across_devices|torch_compile|torch_empty_cache_steps"
)
# of TRL's own configuration
_USUAL_GROUP = 8
_USUAL_BATCH = 8
_PAIR = 2  # responses of a prompt that OnlineDPOTrainer compares
_THOUGHTS = r"^<think>(?!.*<think>)(.*?)</think>.*$"


def from_trl(work: Translation) -> None:
    """Translates all that has a counterpart here."""
    trainer = work.take("trainer") or "GRPO"
    work.set("trainer.backend", "fsdp")  # the model of transformers, as TRL trains it
    if trainer in trl_rows.NAMES:
        trl_rows.set_usual(work, trainer)
    _model(work)
    _adapters(work)
    _data(work)
    _optimizer(work)
    if trainer in trl_rows.NAMES:
        return _rows_or_teacher(work, trainer)
    whole_distribution(work, "top_p", "top_k")
    {"GRPO": _grpo, "AsyncGRPO": _grpo, "RLOO": _rloo, "OnlineDPO": _online_dpo}[trainer](work)
    _correction(work)
    _rewards(work)
    _operation(work)
    _environment(work)
    for name in ("tools", "rollout_func"):
        value = work.unread.pop(name, None) or work.take(name)
        if value is not None:
            work.set("environment.name", "agents")
            work.lose(
                name, value, "several turns are an agent's; set agent.command (docs/agents.md)"
            )
    if (
        max_calls := work.take_count("max_tool_calling_iterations")
    ) is not None and "environment.name" in work.values:
        work.set("environment.max_turns", max_calls + 1)
    work.copy_same()
    _devices(work, trainer)
    _iterations(work)


def _rows_or_teacher(work: Translation, trainer: str) -> None:
    """The rest of a trainer that learns from rows of data or from a teacher."""
    translators = {"SFT": trl_rows.from_sft, "DPO": trl_rows.from_dpo, "GKD": trl_rows.from_gkd}
    translators[trainer](work)
    _operation(work)
    work.ignore("formatting_func", "data_collator", "compute_loss_func", "eos_token", "pad_token")
    work.ignore("dataset_num_proc", "activation_offloading", "label_pad_token_id")
    trl_rows.set_batch(work, trainer)
    work.copy_same()
    if trainer == "GKD":
        _iterations(work)
    else:
        trl_rows.set_epochs(work)


def _model(work: Translation) -> None:
    for name in (
        "dtype",
        "torch_dtype",
        "model_init_kwargs.dtype",
        "model_init_kwargs.torch_dtype",
    ):
        if work.left.get(name) == "auto":
            work.ignore(name)
        work.choose(name, "model.dtype", DTYPES)
    work.choose("bf16", "model.dtype", {True: "bf16", False: None})
    for name in ("trust_remote_code", "model_init_kwargs.trust_remote_code"):
        work.choose(name, "model.trust_remote_code", {True: True, False: None})
    work.choose("gradient_checkpointing", "trainer.recompute", {True: "full", False: "none"})
    for name in (
        "load_in_4bit",
        "load_in_8bit",
        "quantization_config",
        "model_init_kwargs.quantization_config",
    ):
        if value := work.take(name):
            work.lose(name, value, "weights are not quantised; see model.dtype")
    for name in ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"):
        work.ignore(name)
    work.choose("chat_template_path", "data.chat_template", {})


def _adapters(work: Translation) -> None:
    """LoRA: peft_config=LoraConfig(...) of a program, or the options of ModelConfig behind
    use_peft.
    """
    config = work.take_all("peft_config.")
    options = {
        key: work.take(f"lora_{key}")
        for key in ("r", "alpha", "target_modules", "dropout", "modules_to_save")
    }
    options |= {key: work.take(key) for key in ("use_rslora", "use_dora")}
    work.ignore("lora_target_parameters")
    if work.take("use_peft"):
        config = {
            "r": 16 if options["r"] is None else options["r"],
            "lora_alpha": 32 if options["alpha"] is None else options["alpha"],
            "target_modules": options["target_modules"],
            "lora_dropout": options["dropout"],
            "modules_to_save": options["modules_to_save"],
            **{key: options[key] for key in ("use_rslora", "use_dora")},
        }
    if not config:
        return
    targets = config.get("target_modules")
    if targets is None:
        targets = ["q_proj", "v_proj"]  # peft's own for most models
    if isinstance(targets, str) and targets != "all-linear" and not targets.isidentifier():
        work.lose("target_modules", targets, "is a pattern; name the layers in lora.targets")
        targets = "all-linear"
    if isinstance(targets, list):
        # `--lora_target_modules "q_proj", "v_proj"`
        targets = [str(target).strip(",") for target in targets]
    rank = config.get("r", 8)
    alpha = config.get("lora_alpha", 8)
    set_adapters(work, rank, alpha, targets, by_root=bool(config.get("use_rslora")))
    for name, why in (
        ("lora_dropout", "adapters have no dropout here; see docs/lora.md"),
        ("use_dora", "adapters are LoRA's; see docs/lora.md"),
        ("modules_to_save", "only adapters are trained; see docs/lora.md"),
        ("layers_to_transform", "all layers get adapters; see lora.targets"),
        ("init_lora_weights", "A is drawn and B is zero; see docs/lora.md"),
    ):
        value = config.get(name)
        # init_lora_weights=True is the usual one
        if value and (value is not True or name == "use_dora"):
            work.lose(name, value, why)
    if config.get("bias") not in (None, "none"):
        work.lose("bias", config["bias"], "only adapters are trained; see docs/lora.md")


def _data(work: Translation) -> None:
    for name, place in (("dataset_name", set_training_data), ("eval_dataset", set_held_out)):
        hub = is_hub_name(work.left.get(name))
        value = work.left.get(name)
        place(work, name)
        ours = "data.train" if name == "dataset_name" else "data.test"
        if hub and ours in work.values:
            work.adapt(
                ours,
                value,
                "is a name on a hub; download it and set this to its directory, or set it to "
                f"datasets:{value} where the package datasets is installed",
            )
    set_template_options(work, "chat_template_kwargs")


def _optimizer(work: Translation) -> None:
    work.choose("lr_scheduler_type", "optimizer.decay", DECAYS)
    betas = [work.take(name) for name in ("adam_beta1", "adam_beta2")]
    if betas != [None, None]:
        pairs = zip(betas, (0.9, 0.999), strict=True)
        work.set(
            "optimizer.betas",
            [usual if beta is None else beta for beta, usual in pairs],
            "adam_beta1",
        )


def _grpo(work: Translation) -> None:
    work.choose("importance_sampling_level", "algorithm.loss", {"token": None, "sequence": "gspo"})
    work.choose(
        "scale_rewards",
        "algorithm.advantage",
        {
            True: "group-std",
            "group": "group-std",
            "batch": "batch-std",
            False: "centred",
            "none": "centred",
        },
    )
    if work.values.get("algorithm.advantage") == "batch-std":
        work.adapt(
            "schedule.stream", False, "batch-std needs the whole batch before the first update"
        )
    loss = work.take("loss_type")
    aggregations = {
        "grpo": "sequence-mean",
        "dr_grpo": "dr-grpo",
        "dapo": "token-mean",
        "bnpo": "token-mean",
    }
    if loss == "cispo":
        work.set("algorithm.loss", "cispo")
    elif loss in aggregations:
        work.set("algorithm.aggregation", aggregations[loss])
    elif loss is not None:
        work.lose(
            "loss_type", loss, "has no counterpart; see algorithm.loss and algorithm.aggregation"
        )
    set_clip_range(work, "epsilon")
    if (repeats := work.take("num_iterations")) not in (None, 1):
        work.lose(
            "num_iterations",
            repeats,
            "here every response is trained once per iteration; schedule.updates_per_iteration "
            "makes several steps on shares of them",
        )
    if work.take("mask_truncated_completions"):
        work.lose(
            "mask_truncated_completions",
            True,
            "responses that were cut are trained; {name: overlong} in reward.functions punishes "
            "them",
        )
    if not work.take("sync_ref_model"):
        work.ignore("ref_model_sync_steps", "ref_model_mixup_alpha")
    elif (every := work.take_count("ref_model_sync_steps")) is not None:
        work.set("algorithm.reference_refresh_every", every, "ref_model_sync_steps")


def _rloo(work: Translation) -> None:
    work.set("algorithm.name", "rloo")
    for name in ("epsilon", "epsilon_high"):
        if (value := work.take(name)) is not None:
            work.lose(name, value, "algorithm.loss=reinforce has no ratio to clip")
    if work.take("normalize_advantages"):
        work.lose(
            "normalize_advantages", True, "advantages are not divided; see algorithm.advantage"
        )
    if (repeats := work.take("num_iterations")) not in (None, 1):
        work.lose("num_iterations", repeats, "here every response is trained once per iteration")
    work.left.setdefault("num_generations", _PAIR)


def _online_dpo(work: Translation) -> None:
    work.set("algorithm.name", "online-dpo")
    work.set("rollout.responses_per_prompt", _PAIR)
    work.choose("loss_type", "algorithm.loss", {"sigmoid": None})
    if (max_tokens := work.take("max_new_tokens")) is not None:
        work.set("rollout.max_response_tokens", max_tokens, "max_new_tokens")
    work.ignore("max_length")
    if (penalty := work.take("missing_eos_penalty")) is not None:
        work.lose(
            "missing_eos_penalty",
            penalty,
            "{name: overlong} in reward.functions punishes responses that were cut",
        )
    for name in ("reward_model_path", "judge"):
        if (value := work.take(name)) is not None:
            work.lose(
                name,
                value,
                "is asked over HTTP; see reward.judge (api: pooling for a reward model)",
            )


def _correction(work: Translation) -> None:
    correction = work.take("vllm_importance_sampling_correction")
    mode = work.take("vllm_importance_sampling_mode")
    caps = [work.take_number(f"vllm_importance_sampling_{name}") for name in ("cap", "clip_max")]
    floor = work.take_number("vllm_importance_sampling_clip_min")
    cap = next((value for value in caps if value is not None), None)
    if correction is False:
        return work.set("algorithm.importance_sampling", "none")
    if mode not in ("token_truncate", "sequence_truncate", "token_mask", "sequence_mask"):
        if correction or mode:
            work.lose(
                "vllm_importance_sampling_mode",
                mode,
                "has no counterpart; see algorithm.importance_sampling",
            )
        return
    level, _, how = mode.partition("_")
    work.set("algorithm.importance_sampling", level)
    if cap is not None:
        work.set("algorithm.importance_cap", cap, "vllm_importance_sampling_cap")
    if how == "mask":
        work.set("algorithm.importance_floor", floor or 0.0, "vllm_importance_sampling_clip_min")


def _environment(work: Translation) -> None:
    """A class whose methods are tools, which is the same class here."""
    factory = work.unread.pop("environment_factory", None) or work.take("environment_factory")
    if factory is None:
        return
    name = str(factory).partition(":")[0]  # behind it stands why it is no value
    work.set("environment.name", "tool_class")
    work.lose(
        "environment_factory",
        name,
        "put the class into a module that can be imported without training, and set "
        f"environment.options.factory=MODULE:{name.rpartition('.')[2]}",
    )


def _rewards(work: Translation) -> None:
    """TRL's own functions; others are a program's, and listed with what makes them ours."""
    functions = work.take("reward_funcs")
    weights = work.take("reward_weights")
    work.ignore("reward_processing_classes")
    if functions is None:
        if weights is not None:
            work.lose("reward_weights", weights, "are the weights of reward.functions")
        return
    several = functions if isinstance(functions, list) else [functions]
    ours: list[dict[str, Any]] = []
    names = []
    for number, function in enumerate(several):
        name = str(function).rpartition(".")[2]
        entry = _reward(name)
        if entry is None:
            names.append(str(function))
            continue
        if isinstance(weights, list) and len(weights) == len(several):
            entry["weight"] = weights[number]
        ours.append(entry)
    if names:
        named = ", ".join(f"{{name: 'MODULE:{name.rpartition('.')[2]}'}}" for name in names)
        work.lose(
            "reward_funcs",
            functions,
            "put them into a module that can be imported without training, and set "
            f"reward.functions=[{named}]",
        )
    if ours:
        work.set("reward.functions", ours)


def _reward(name: str) -> dict[str, Any] | None:
    """One of TRL's reward functions."""
    if name in ("accuracy_reward", "reasoning_accuracy_reward"):
        return {"name": "math"}
    if name == "think_format_reward":
        return {"name": "format", "pattern": _THOUGHTS}
    if name == "get_soft_overlong_punishment":
        return {"name": "overlong"}
    return None


def _operation(work: Translation) -> None:
    set_trackers(work, "report_to")
    if (project := work.take("project")) is not None:
        work.set("telemetry.project", project, "project")
    for name, ours in (
        ("save_steps", "checkpoint.every"),
        ("eval_steps", "schedule.evaluate_every"),
    ):
        every = work.take_number(name)
        if every is None:
            continue
        if isinstance(every, int):
            work.set(ours, every, name)
        else:
            work.lose(name, every, f"a share of the run; set {ours} to a number of iterations")


def _devices(work: Translation, trainer: str) -> None:
    """How many devices train, from the command that starts them; whether they also decode; what a
    batch then is.
    """
    processes = work.take_count("num_processes")
    work.ignore("starts_on_all_devices")
    unknown = processes is None and work.extent.devices is None
    served = {
        key: work.take_count(f"vllm_serve.{key}")
        for key in ("tensor_parallel_size", "data_parallel_size")
    }
    serves = work.take("vllm_serve") is not None or any(served.values())
    per_node = work.take_count("devices_per_node")
    mode = work.take("vllm_mode")
    uses_server = serves or mode == "server" or trainer == "AsyncGRPO"
    size = work.values.pop("rollout.tensor_parallel", None) or 1
    devices = work.extent.devices
    if trainer == "AsyncGRPO":
        work.set("schedule.max_staleness", work.take_count("max_staleness") or 1, "max_staleness")
    if uses_server:
        size = served["tensor_parallel_size"] or 1
        engines = served["data_parallel_size"] or 1
        if processes is None:
            processes = 1 if devices is None else max(1, devices - size * engines)
        if not serves:
            work.done.adapted["rollout.engines"] = (
                f"{engines}: the server's devices are not in this file; set what it has"
            )
        set_separate(work, processes, size * engines, size, per_node or processes + size * engines)
    else:
        processes = devices or processes or 1
        set_colocated(work, processes, size, per_node or processes)
    if unknown:
        work.done.adapted["trainer.devices"] = (
            f"{processes}: the file does not say how many processes train; --devices N does"
        )
    _batch(work, processes, not unknown)


def _batch(work: Translation, processes: int, knows_processes: bool) -> None:
    """Prompts of an iteration, from the responses that are generated at once; and its updates."""
    values = work.values
    group = work.values.get("rollout.responses_per_prompt", _USUAL_GROUP)
    batch_size = work.take_count("per_device_train_batch_size")
    steps = work.take_count("gradient_accumulation_steps")
    per_generation = work.take_count("steps_per_generation")
    size = work.take_count("generation_batch_size")
    if not isinstance(group, int) or group < 1:
        return
    if values.get("algorithm.name") == "online-dpo":
        values["schedule.prompts_per_iteration"] = (
            (batch_size or _USUAL_BATCH) * (steps or 1) * processes
        )
        return
    step = (batch_size or _USUAL_BATCH) * processes  # responses of a forward on all devices
    generated = size or step * (per_generation or steps or 1)
    if generated % group:
        named = "generation_batch_size" if size else "per_device_train_batch_size"
        return work.lose(
            named,
            size or batch_size or _USUAL_BATCH,
            f"is no multiple of num_generations = {group}",
        )
    work.set("schedule.prompts_per_iteration", generated // group)
    updates = max(1, generated // (step * (steps or 1)))
    if knows_processes and updates > 1:
        work.set("schedule.updates_per_iteration", updates)
    if batch_size is not None and batch_size < group and values.get("algorithm.name") != "rloo":
        work.set("microbatch.responses", max(n for n in range(1, batch_size + 1) if group % n == 0))


def _iterations(work: Translation) -> None:
    updates = work.values.get("schedule.updates_per_iteration", 1)
    steps = work.take_number("max_steps")
    epochs = work.take_number("num_train_epochs")
    if steps is not None and steps > 0:
        work.set("schedule.iterations", max(1, round(steps / updates)), "max_steps")
    elif "max_steps" not in work.unread and epochs:
        epochs_to_iterations(work, "num_train_epochs", epochs, keeps_last=False)
    share = work.take_number("warmup_ratio")
    warmup = work.take_number("warmup_steps")
    if warmup is not None and warmup != 0 and warmup < 1:
        share = warmup
        warmup = None
    if warmup is not None:
        work.set("optimizer.warmup_iterations", round(warmup / updates), "warmup_steps")
    elif share:
        iterations = work.values.get("schedule.iterations")
        if iterations is None:
            work.lose("warmup_ratio", share, "a share of the run; set optimizer.warmup_iterations")
        else:
            work.set("optimizer.warmup_iterations", round(share * iterations))

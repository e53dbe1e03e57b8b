"""verl's ppo_trainer.yaml and ppo_megatron_trainer.yaml, and the overrides of its scripts, as ours."""

from __future__ import annotations

import re
from typing import Any

from tools.foreign.common import (
    DECAYS,
    DTYPES,
    epochs_to_iterations,
    set_adapters,
    set_clip_range,
    set_colocated,
    set_held_out,
    set_reward_function,
    set_separate,
    set_template_options,
    set_trackers,
    set_training_data,
    whole_distribution,
)
from tools.foreign.rows import has_column
from tools.foreign.translation import Translation
from tools.foreign.verl_distillation import set_teachers

# Keys that say how verl works, or what is always done here: nothing is lost without them.
NOT_NEEDED = re.compile(
    r"actor_rollout_ref\.(hybrid_engine|nccl_timeout|ref\b|model\.(use_remove_padding|use_fused_kernels|fused_kernel_options|"
    r"use_shm|use_liger|tokenizer_path|hf_config_path|external_lib|lora\.lora_[AB]_init_method|lora\.(type|merge)))|"
    r"actor_rollout_ref\.actor\.(use_torch_compile|ppo_micro_batch_size$|use_fused_kernels|use_remove_padding|rollout_n|"
    r"data_loader_seed|shuffle$|checkpoint\b|profiler\b|entropy_from_logits_with_chunking|entropy_checkpointing|"
    r"calculate_entropy|loss_scale_factor|use_prefix_grouper|fsdp_config\.(wrap_policy|forward_prefetch|reshard_after_forward|"
    r"model_dtype|dtype|mixed_precision|use_orig_params|use_torch_compile|entropy_|forward_only|seed|full_determinism)|"
    r"optim\.(optimizer|optimizer_impl|num_cycles|total_training_steps|override_optimizer_config\.(overlap_cpu_|"
    r"use_precision_aware))|"
    r"megatron\.(use_mbridge|vanilla_mbridge|use_dist_checkpointing|dist_checkpointing_path|sequence_parallel|load_weight|seed|"
    r"use_remove_padding|virtual_pipeline_model_parallel_size|override_ddp_config|override_mcore_model_config|extra|"
    r"override_transformer_config\.(\w*fusion\w*|\w*fused\w*|persist_layer_norm|moe_grouped_gemm|moe_token_dispatcher_type|"
    r"moe_router_dtype|moe_enable_deepep|moe_router_bias_update_rate|moe_shared_expert_overlap|deallocate_pipeline_outputs|"
    r"attention_backend|use_flash_attn|account_for_\w+|num_layers_in_\w+|recompute_modules|recompute_method|"
    r"recompute_num_layers)))|"
    r"actor_rollout_ref\.rollout\.(mode|free_cache_engine|load_format|do_sample|prompt_length|response_length|log_prob_|"
    r"enable_chunked_prefill|enable_prefix_caching|layered_summon|disable_log_stats|skip_tokenizer_init|calculate_log_probs|"
    r"max_model_len|cudagraph_capture_sizes|logprobs_mode|scheduling_policy|multi_stage_wake_up|update_weights_bucket_megabytes|"
    r"checkpoint_engine|agent\.num_workers|trace|profiler|prometheus|skip_rollout|skip_dump_dir|over_sample_rate|"
    r"val_kwargs\.top_k|engine_kwargs\.\w+\.(disable_mm_preprocessor_cache|attention_backend))|"
    r"critic\b|model_engine|actor@|ref@|critic@|data\.(return_|reward_fn_key|dataloader_num_workers|val_batch_size|"
    r"filter_overlong_prompts_workers|validation_shuffle|use_shm|image_patch_size|trust_remote_code|video_key)|"
    r"algorithm\.(gamma|lam|kl_ctrl|kl_penalty|use_pf_ppo|pf_ppo|filter_groups\.(metric|max_num_gen_batches))|"
    r"reward_model\.(reward_manager|enable|use_reward_loop|launch_reward_fn_async|num_workers|reward_kwargs\.max_resp_len)|"
    r"reward\.(reward_manager|num_workers)|reward_manager\b|"
    r"trainer\.(critic_warmup|balance_batch|val_before_train|log_val_generations|val_only|use_legacy_worker_impl|esi_|"
    r"default_hdfs_dir|del_local_ckpt_after_load|max_critic_ckpt_to_keep|ray_wait|rollout_data_dir|validation_data_dir|"
    r"val_generations_to_log_to_wandb|remote_)|"
    r"(?:global_)?profiler\b|npu_profile|ray_(?:init|kwargs)\b|transfer_queue\b|hydra\b"
)
# of verl's own files
_USUAL_DEVICES = 8
_USUAL_ENGINE = 2
_USUAL_ALPHA = 16
_TARGETS_OF_MEGATRON = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",),
}
_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
_OPTIM = f"{_ACTOR}.optim"
_MEGATRON = f"{_ACTOR}.megatron"
_FSDP = f"{_ACTOR}.fsdp_config"


def from_verl(work: Translation) -> None:
    """Translates all that has a counterpart here."""
    _data(work)
    _model(work)
    _algorithm(work)
    _rewards(work)
    _turns(work)
    _optimizer(work)
    _trainer(work)
    _operation(work)
    _engines(work)
    if work.left.get("data.train_batch_size") == 0:
        work.ignore("data.train_batch_size")  # as verl's asynchronous trainer wants it
    work.copy_same()
    _devices(work)
    _ahead(work)
    _batch(work)
    set_teachers(work)
    _iterations(work)


def _data(work: Translation) -> None:
    set_training_data(work, "data.train_files")
    set_held_out(work, "data.val_files")
    set_template_options(work, "data.apply_chat_template_kwargs")
    for name, ours in (
        ("data.train_max_samples", "data.train"),
        ("data.val_max_samples", "data.test"),
    ):
        if (max_rows := work.take_number(name)) is None or max_rows <= 0:  # -1 is all
            continue
        path = work.values.get(ours)
        if isinstance(path, str):
            limited = {"path": path, "max_rows": max_rows}
            work.set(ours, [limited] if ours == "data.train" else limited, name)
        else:
            work.lose(name, max_rows, f"is max_rows of a dataset; see {ours}")
    # prompt is found without being named
    if (column := work.take("data.prompt_key")) not in (None, "prompt"):
        work.set("data.question_column", column, "data.prompt_key")
    if (column := work.take("data.image_key")) not in (None, "images"):
        work.set("data.images_column", column, "data.image_key")
    tower = "actor_rollout_ref.actor.freeze_vision_tower"
    work.choose(tower, "model.vision", {True: "frozen", False: "trained"})
    # as all that verl's own scripts prepare
    if has_column(work.values.get("data.train"), "reward_model") is not False:
        work.set("data.answer_column", "reward_model.ground_truth")
    work.choose("data.truncation", "data.overlong_prompt", {"error": "refuse", "left": "truncate"})
    work.choose("data.filter_overlong_prompts", "data.overlong_prompt", {True: "skip", False: None})


def _model(work: Translation) -> None:
    """The model's type and code, and adapters, by both names that verl has for them."""
    work.choose(f"{_ROLLOUT}.dtype", "model.dtype", DTYPES)
    work.choose(f"{_MODEL}.trust_remote_code", "model.trust_remote_code", {True: True, False: None})
    rank = work.take_number(f"{_MODEL}.lora_rank") or work.take_number(f"{_MODEL}.lora.rank")
    work.ignore(f"{_MODEL}.lora.rank")
    lora = {
        key: first
        for key, names in {
            "alpha": (f"{_MODEL}.lora_alpha", f"{_MODEL}.lora.alpha"),
            "targets": (f"{_MODEL}.target_modules", f"{_MODEL}.lora.target_modules"),
            "adapter": (f"{_MODEL}.lora_adapter_path", f"{_MODEL}.lora.adapter_path"),
        }.items()
        if (
            first := next((value for name in names if (value := work.take(name)) is not None), None)
        )
        is not None
    }
    if adapter := lora.get("adapter"):
        return work.set("model.adapter", adapter, f"{_MODEL}.lora_adapter_path")
    if rank:
        targets = lora.get("targets", "all-linear")
        if isinstance(targets, list):
            targets = [
                name for target in targets for name in _TARGETS_OF_MEGATRON.get(target, (target,))
            ]
        set_adapters(work, rank, lora.get("alpha", _USUAL_ALPHA), targets)
    if (dropout := work.take(f"{_MODEL}.lora.dropout")) and rank:
        work.lose(
            f"{_MODEL}.lora.dropout", dropout, "adapters have no dropout here; see docs/lora.md"
        )
    work.ignore(f"{_MODEL}.lora.dropout_position")
    if (excluded := work.take(f"{_MODEL}.exclude_modules")) and rank:
        work.lose(
            f"{_MODEL}.exclude_modules",
            excluded,
            "name the layers that get adapters in lora.targets",
        )


def _algorithm(work: Translation) -> None:
    whole_distribution(work, f"{_ROLLOUT}.top_p", f"{_ROLLOUT}.top_k")
    set_clip_range(work, f"{_ACTOR}.clip_ratio")
    work.choose(
        f"{_ACTOR}.loss_agg_mode",
        "algorithm.aggregation",
        {
            "token-mean": "token-mean",
            "seq-mean-token-sum": "sequence-sum",
            "seq-mean-token-mean": "sequence-mean",
            "seq-mean-token-sum-norm": "dr-grpo",
        },
    )
    losses = {"vanilla": "clip", "gspo": "gspo", "cispo": "cispo"}
    work.choose(f"{_ACTOR}.policy_loss.loss_mode", "algorithm.loss", losses)
    work.take_all(f"{_ACTOR}.policy_loss.")  # settings of losses that verl has besides
    _advantage(work)
    _kl(work)
    _correction(work)
    if work.values.get("algorithm.loss") == "cispo":
        work.ignore(f"{_ACTOR}.clip_ratio_c")  # which bounds what cispo does not have
    replay = {"disabled": None, "R3": "rollout"}
    work.choose(f"{_ACTOR}.router_replay.mode", "algorithm.router_replay", replay)
    work.take_all(f"{_ACTOR}.router_replay.")
    work.ignore(f"{_ROLLOUT}.enable_rollout_routing_replay")
    coefficient = work.take_number(f"{_MEGATRON}.override_transformer_config.moe_aux_loss_coeff")
    if coefficient:
        name = f"{_MEGATRON}.override_transformer_config.moe_aux_loss_coeff"
        work.set("algorithm.router_aux_coef", coefficient, name)
    work.ignore(f"{_MEGATRON}.override_transformer_config.moe_router_load_balancing_type")


def _advantage(work: Translation) -> None:
    estimator = work.take("algorithm.adv_estimator")
    by_std = work.take("algorithm.norm_adv_by_std_in_grpo")
    known = {
        "grpo": "group-std",
        "rloo": "leave-one-out",
        "reinforce_plus_plus_baseline": "batch-std",
    }
    if estimator is not None and estimator not in known:
        why = "has no counterpart; see algorithm.advantage"
        if estimator == "gae":
            why = (
                "needs a critic, which this project has not; algorithm.name=critic-free-ppo "
                "takes the group's mean instead"
            )
        return work.lose("algorithm.adv_estimator", estimator, why)
    if estimator == "grpo" and by_std is False:
        return work.set("algorithm.advantage", "centred")
    if estimator is not None:
        work.set("algorithm.advantage", known[estimator], "algorithm.adv_estimator")
    if estimator == "reinforce_plus_plus_baseline":
        work.adapt(
            "schedule.stream", False, "batch-std needs the whole batch before the first update"
        )


def _kl(work: Translation) -> None:
    """KL in the loss (actor.use_kl_loss) or in the reward (algorithm.use_kl_in_reward); their
    coefficients wait for these.
    """
    estimators = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    in_loss = work.take(f"{_ACTOR}.use_kl_loss")
    in_reward = work.take("algorithm.use_kl_in_reward")
    loss = (work.take_number(f"{_ACTOR}.kl_loss_coef"), f"{_ACTOR}.kl_loss_type")
    reward = (work.take_number("algorithm.kl_ctrl.kl_coef"), "algorithm.kl_penalty")
    if in_loss and in_reward:
        return work.lose(
            "algorithm.use_kl_in_reward",
            True,
            "KL goes into the loss or into the reward; see algorithm.kl_in",
        )
    if in_reward and work.values.get("algorithm.advantage") not in ("centred", "leave-one-out"):
        in_reward = False
        work.lose(
            "algorithm.use_kl_in_reward",
            True,
            "goes with algorithm.advantage=centred or leave-one-out; with others set "
            "algorithm.kl_coef, for the loss",
        )
    for wanted, (coefficient, estimator), place in (
        (in_loss, loss, "loss"),
        (in_reward, reward, "reward"),
    ):
        if not wanted or coefficient == 0:
            work.take(estimator)
            continue
        work.set("algorithm.kl_coef", 0.001 if coefficient is None else coefficient)
        work.set("algorithm.kl_in", place)
        work.choose(estimator, "algorithm.kl_estimator", estimators)


def _correction(work: Translation) -> None:
    """Weights of the trainer's policy over the engine's, by the three names that verl has had for
    them.
    """
    section = "algorithm.rollout_correction"
    level = work.take(f"{section}.rollout_is") or work.take("algorithm.rollout_is_level")
    work.ignore(
        "algorithm.rollout_is", f"{section}.bypass_mode", f"{section}.rollout_is_batch_normalize"
    )
    work.ignore(
        f"{section}.loss_type", f"{section}.use_policy_gradient", "algorithm.rollout_is_mode"
    )
    cap = work.take_number(f"{section}.rollout_is_threshold") or work.take_number(
        "algorithm.rollout_is_threshold"
    )
    older = work.take_number(f"{_ACTOR}.tis_imp_ratio_cap")
    if older is not None and older > 0:
        level = level or "token"
        cap = older
    if level in ("token", "sequence"):
        work.set("algorithm.importance_sampling", level)
        if cap is not None:
            work.set("algorithm.importance_cap", cap, f"{section}.rollout_is_threshold")
    elif level:
        work.lose(
            f"{section}.rollout_is", level, "has no counterpart; see algorithm.importance_sampling"
        )


def _rewards(work: Translation) -> None:
    """A reward function of the user's, and DAPO's punishment of long responses."""
    functions: list[dict[str, Any]] = [{"name": "math"}]
    for section in ("custom_reward_function", "reward.custom_reward_function"):
        path = work.take(f"{section}.path")
        name = work.take(f"{section}.name") or "compute_score"
        if (
            path is not None
            and (reference := set_reward_function(work, f"{section}.path", path, name)) is not None
        ):
            functions = [{"name": reference}]
    for prefix in (
        "reward_model.reward_kwargs.overlong_buffer_cfg.",
        "reward.reward_kwargs.overlong_buffer_cfg.",
        "reward_model.overlong_buffer.",
        "reward.overlong_buffer.",
    ):
        buffer = work.take_all(prefix)
        if not buffer.get("enable"):
            continue
        overlong: dict[str, Any] = {"name": "overlong"}
        if buffer.get("len") is not None:
            overlong["buffer_tokens"] = buffer["len"]
        if buffer.get("penalty_factor") not in (None, 1, 1.0):
            overlong["weight"] = buffer["penalty_factor"]
        functions.append(overlong)
    if functions != [{"name": "math"}]:
        work.set("reward.functions", functions)
    if work.left.get("reward_model.enable"):
        work.lose(
            "reward_model.enable",
            work.take("reward_model.enable"),
            "a reward model is asked over HTTP; see reward.judge (api: pooling)",
        )
        work.take_all("reward_model.")


def _turns(work: Translation) -> None:
    """Responses of several turns: verl's tools and interactions are written as an agent here."""
    multi = work.take_all(f"{_ROLLOUT}.multi_turn.")
    loop = work.take(f"{_ROLLOUT}.agent.default_agent_loop")
    options = {
        f"{_ROLLOUT}.multi_turn.tool_config_path": multi.get("tool_config_path"),
        f"{_ROLLOUT}.multi_turn.interaction_config_path": multi.get("interaction_config_path"),
        f"{_ROLLOUT}.agent.agent_loop_config_path": work.take(
            f"{_ROLLOUT}.agent.agent_loop_config_path"
        ),
        "data.tool_config_path": work.take("data.tool_config_path"),
        "data.custom_cls.path": work.take("data.custom_cls.path"),
    }
    work.ignore("data.custom_cls.name")
    options = {name: value for name, value in options.items() if value is not None}
    unread = any(name.startswith(f"{_ROLLOUT}.multi_turn.") for name in work.unread)
    turns = multi.get("enable") or loop not in (None, "single_turn_agent") or unread
    if not turns and not any(name.startswith(_ROLLOUT) for name in options):
        for name, value in options.items():
            work.lose(
                name, value, "classes of verl are not read; write rows that data.train can hold"
            )
        return
    work.set("environment.name", "agents")
    if (max_turns := multi.get("max_assistant_turns") or multi.get("max_user_turns")) is not None:
        work.set("environment.max_turns", max_turns, f"{_ROLLOUT}.multi_turn.max_assistant_turns")
    for name, value in options.items():
        work.lose(
            name,
            value,
            "classes of verl are not called; write them as an agent and set agent.command "
            "(docs/agents.md)",
        )
    if not options:
        work.lose(
            f"{_ROLLOUT}.multi_turn.enable",
            True,
            "several turns are an agent's; set agent.command (docs/agents.md)",
        )


def _optimizer(work: Translation) -> None:
    for name in (
        f"{_OPTIM}.lr_decay_style",
        f"{_OPTIM}.lr_scheduler_type",
        f"{_OPTIM}.warmup_style",
    ):
        work.choose(name, "optimizer.decay", DECAYS)
    if (betas := work.take(f"{_OPTIM}.betas")) is not None:
        work.set("optimizer.betas", list(betas), f"{_OPTIM}.betas")
    decays = work.values.get("optimizer.decay", "constant") != "constant"
    ratio = work.take_number(f"{_OPTIM}.min_lr_ratio")
    rate = work.left.get(f"{_OPTIM}.lr")
    if decays and ratio and isinstance(rate, (int, float)):
        work.set("optimizer.min_learning_rate", ratio * rate)
    if not decays:
        work.ignore(f"{_OPTIM}.min_lr")  # the end of a decay
    offloads = [
        work.take(name)
        for name in (
            f"{_FSDP}.optimizer_offload",
            f"{_MEGATRON}.optimizer_offload",
            f"{_FSDP}.offload_policy",
            f"{_OPTIM}.override_optimizer_config.optimizer_cpu_offload",
        )
    ]
    fraction = work.take_number(f"{_OPTIM}.override_optimizer_config.optimizer_offload_fraction")
    if True in offloads or (fraction and False not in offloads):
        work.set("optimizer.offload", True)
    elif False in offloads:
        work.set("optimizer.offload", False)
    for name in (
        f"{_FSDP}.param_offload",
        f"{_MEGATRON}.param_offload",
        f"{_MEGATRON}.grad_offload",
    ):
        if work.take(name):
            work.lose(
                name,
                True,
                "weights and gradients stay on their devices; the optimizer's state goes "
                "(optimizer.offload)",
            )


def _trainer(work: Translation) -> None:
    """The backend, its parallel sizes, and recomputation."""
    strategies = {"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}
    for name in ("actor_rollout_ref.actor.strategy", f"{_FSDP}.strategy", "model_engine"):
        if work.left.get(name) in strategies:
            work.choose(name, "trainer.backend", strategies)
    engine = work.take("actor@actor_rollout_ref.actor")
    if engine is not None:
        work.set("trainer.backend", "megatron" if "megatron" in str(engine) else "fsdp")
    sizes = ("tensor_model", "pipeline_model", "expert_model")
    if "trainer.backend" not in work.values:
        named = any(name.startswith(f"{_MEGATRON}.") for name in (*work.left, *work.unread))
        work.set("trainer.backend", "megatron" if named else "fsdp")
    has_adapters = work.values.get("lora.rank") or "model.adapter" in work.values
    if has_adapters and work.values["trainer.backend"] == "megatron":
        work.adapt("trainer.backend", "fsdp", "adapters are trained by the model of transformers")
    recompute = work.take(f"{_MEGATRON}.override_transformer_config.recompute_granularity")
    checkpointing = work.take(f"{_MODEL}.enable_gradient_checkpointing")
    megatron = work.values["trainer.backend"] == "megatron"
    if recompute in ("full", "selective") and (megatron or recompute == "full"):
        work.set("trainer.recompute", recompute)
    elif recompute is None and checkpointing is not None and not megatron:
        work.set("trainer.recompute", "full" if checkpointing else "none")
    if megatron:
        work.take_all(f"{_FSDP}.")
        _megatron_sizes(work)
    else:
        for size in sizes:
            work.ignore(f"{_MEGATRON}.{size}_parallel_size")
        shards = work.take_number(f"{_FSDP}.fsdp_size")
        if shards is not None and shards > 0:
            work.set("trainer.shards", shards, f"{_FSDP}.fsdp_size")
    for name in (
        f"{_MEGATRON}.context_parallel_size",
        f"{_ACTOR}.ulysses_sequence_parallel_size",
        f"{_FSDP}.ulysses_sequence_parallel_size",
    ):
        if (parts := work.take_count(name)) is not None and parts > 1:
            work.set("trainer.context_parallel", parts, name)


def _megatron_sizes(work: Translation) -> None:
    experts = work.take_count(f"{_MEGATRON}.expert_model_parallel_size")
    if experts is not None and experts > 1:
        work.set("trainer.expert_parallel", experts, f"{_MEGATRON}.expert_model_parallel_size")
    divided = work.take(f"{_MEGATRON}.expert_tensor_parallel_size")
    if divided not in (None, 1):
        work.lose(
            f"{_MEGATRON}.expert_tensor_parallel_size",
            divided,
            "each expert is whole on one rank; see trainer.expert_parallel",
        )


def _operation(work: Translation) -> None:
    set_trackers(work, "trainer.logger")
    run = work.take("trainer.experiment_name")
    if run is not None and "trainer.default_local_dir" not in work.left:
        work.set("run.dir", f"runs/{run}", "trainer.experiment_name")
    for name, ours in (
        ("trainer.save_freq", "checkpoint.every"),
        ("trainer.test_freq", "schedule.evaluate_every"),
    ):
        if (every := work.take_number(name)) is not None:
            work.set(ours, max(every, 0), name)
    if (kept := work.take_number("trainer.max_actor_ckpt_to_keep")) is not None:
        work.set("checkpoint.keep_last", max(kept, 0), "trainer.max_actor_ckpt_to_keep")
    work.choose("trainer.resume_mode", "checkpoint.resume", {"auto": "auto", "disable": None})
    work.choose("trainer.device", "run.device", {name: name for name in ("cuda", "npu", "cpu")})
    answers = {
        name: work.take(f"{_ROLLOUT}.val_kwargs.{name}")
        for name in ("do_sample", "n", "temperature", "top_p")
    }
    sampled = answers.pop("do_sample")  # else one greedy answer, which is the default here
    if sampled and "data.test" in work.values:
        work.set("evaluate.samples", answers.pop("n") or 1)
        for name, value in answers.items():
            if value is not None and value != 0:
                work.set(f"evaluate.{name}", value, f"{_ROLLOUT}.val_kwargs.{name}")


def _engines(work: Translation) -> None:
    work.choose(f"{_ROLLOUT}.enforce_eager", "rollout.graph_mode", {True: False, False: None})
    if (engine := work.take(f"{_ROLLOUT}.name")) not in (None, "vllm", "hf"):
        work.lose(f"{_ROLLOUT}.name", engine, "engines are vLLM's; see rollout.backend")


def _devices(work: Translation) -> None:
    """Which devices decode and which train: all both, or, where verl is told so, each its own."""
    values = work.values
    nodes = work.values.get("placement.nnodes", 1)
    per_node = work.take_count("trainer.n_gpus_per_node")
    open_name = next(
        (name for name in ("trainer.n_gpus_per_node", "trainer.nnodes") if name in work.unread),
        None,
    )
    size = values.get("rollout.tensor_parallel")
    copies = work.take_number(f"{_ROLLOUT}.data_parallel_size") or 1
    work.ignore(f"{_ROLLOUT}.expert_parallel_size")
    if copies > 1:
        size = (size or 1) * copies
        work.adapt(
            "rollout.tensor_parallel",
            size,
            f"an engine is divided over all devices of {_ROLLOUT}.data_parallel_size",
        )
    if work.extent.devices is not None:
        per_node = max(1, work.extent.devices // nodes)
    elif open_name is not None or not isinstance(nodes, int):
        values.pop("placement.nnodes", None)
        return
    per_node = per_node or _USUAL_DEVICES
    size = size or min(_USUAL_ENGINE, per_node)
    apart = {key: work.take(f"rollout.{key}") for key in ("nnodes", "n_gpus_per_node")}
    if work.take("actor_rollout_ref.hybrid_engine") is False or apart["n_gpus_per_node"]:
        decoding = (apart["nnodes"] or nodes) * (apart["n_gpus_per_node"] or per_node)
        return set_separate(work, nodes * per_node, decoding, size, per_node)
    set_colocated(work, nodes * per_node, size, per_node)


def _ahead(work: Translation) -> None:
    """verl's asynchronous trainers: how far engines are ahead, and what an update then has."""
    settings = work.take_all("async_training.")
    if settings or work.values.get("placement.colocate") is False:
        behind = settings.get("staleness_threshold", 1)
        work.set("schedule.max_staleness", 1 if behind else 0)
    mini = work.left.get(f"{_ACTOR}.ppo_mini_batch_size")
    steps = work.take("rollout.total_rollout_steps")
    if not settings or not isinstance(mini, int):
        return
    work.ignore("data.gen_batch_size")
    updates = settings.get("trigger_parameter_sync_step") or 1
    prompts = mini * (settings.get("require_batches") or 1) * updates
    work.set("schedule.prompts_per_iteration", prompts)
    if isinstance(steps, int):
        work.set("schedule.iterations", max(2, steps // prompts))


def _batch(work: Translation) -> None:
    """Updates of an iteration, and how its responses are packed."""
    mini = work.take_count(f"{_ACTOR}.ppo_mini_batch_size")
    batch = work.values.get("schedule.prompts_per_iteration")
    further = work.take_count("data.gen_batch_size")
    if (
        further is not None
        and batch is not None
        and further != batch
        and not work.values.get("schedule.dynamic_sampling")
    ):
        work.lose(
            "data.gen_batch_size",
            further,
            "prompts are replaced one by one; see schedule.dynamic_sampling",
        )
    if mini is not None and isinstance(batch, int):
        if batch % mini == 0:
            work.set("schedule.updates_per_iteration", batch // mini)
        else:
            work.lose(
                f"{_ACTOR}.ppo_mini_batch_size",
                mini,
                f"does not divide data.train_batch_size = {batch}",
            )
    elif mini is not None:
        work.lose(
            f"{_ACTOR}.ppo_mini_batch_size",
            mini,
            "set schedule.updates_per_iteration = data.train_batch_size / this",
        )
    if (epochs := work.take(f"{_ACTOR}.ppo_epochs")) not in (None, 1):
        work.lose(
            f"{_ACTOR}.ppo_epochs", epochs, "here every response is trained once per iteration"
        )
    dynamic = work.take(f"{_ACTOR}.use_dynamic_bsz")
    tokens = work.take(f"{_ACTOR}.ppo_max_token_len_per_gpu")
    responses = work.take_number(f"{_ACTOR}.ppo_micro_batch_size_per_gpu")
    stages = work.values.get("trainer.pipeline_parallel", 1)
    if dynamic and tokens is not None and stages == 1:
        work.set("microbatch.max_tokens", tokens, f"{_ACTOR}.ppo_max_token_len_per_gpu")
    elif dynamic and tokens is not None:
        work.lose(
            f"{_ACTOR}.ppo_max_token_len_per_gpu",
            tokens,
            "pipelines need the number of microbatches beforehand; see microbatch.responses",
        )
    group = work.values.get("rollout.responses_per_prompt", 8)
    if responses and (not dynamic or stages > 1) and isinstance(group, int) and responses < group:
        fitting = max(n for n in range(1, int(responses) + 1) if group % n == 0)
        work.set("microbatch.responses", fitting)


def _iterations(work: Translation) -> None:
    epochs = work.take_number("trainer.total_epochs")
    if "schedule.iterations" not in work.values and epochs:
        epochs_to_iterations(work, "trainer.total_epochs", epochs, keeps_last=False)
    share = work.take_number(f"{_OPTIM}.lr_warmup_steps_ratio")
    steps = work.take_number(f"{_OPTIM}.lr_warmup_steps")
    if steps is not None and steps >= 0:
        work.set("optimizer.warmup_iterations", steps, f"{_OPTIM}.lr_warmup_steps")
    elif share:
        iterations = work.values.get("schedule.iterations")
        if iterations is None:
            work.lose(
                f"{_OPTIM}.lr_warmup_steps_ratio",
                share,
                "a share of the run; set optimizer.warmup_iterations",
            )
        else:
            work.set("optimizer.warmup_iterations", round(share * iterations))

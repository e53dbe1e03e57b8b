"""Configurations of TRL and verl as ours: every key of theirs is translated, without a counterpart that matters, or listed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pa_npu.config.sections.operation import TRACKERS
from pa_npu.telemetry.secrets import flat
from tools.foreign.names import RELATED, SAME, Origin

# Keys that say how the other framework works, or what this one always does: nothing is lost without them.
_NOT_NEEDED: dict[Origin, re.Pattern[str]] = {
    "trl": re.compile(
        r"use_vllm|vllm_mode|logging_(steps|strategy|first_step)|log_completions|remove_unused_columns|ds3_gather_for_generation|"
        r"do_eval|(eval|save)_strategy|disable_dropout|gradient_checkpointing_kwargs|processing_class|tokenizer|"
        r"model_init_kwargs\.(attn_implementation|use_cache)"
    ),
    "verl": re.compile(
        r"actor_rollout_ref\.(hybrid_engine|ref\b|model\.use_remove_padding)|critic|model_engine|"
        r"actor_rollout_ref\.rollout\.(name|mode|free_cache_engine|load_format|do_sample|prompt_length|response_length|log_prob_|"
        r"enable_chunked_prefill)|data\.(return_raw_|prompt_key|reward_fn_key)|trainer\.critic_warmup"
    ),
}
_DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "float32": "fp32", "fp32": "fp32"}
_DECAYS = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}


@dataclass
class Imported:
    """values: our dotted keys. untranslated: their keys, in order, with the reason or the remedy."""

    values: dict[str, Any] = field(default_factory=dict)
    untranslated: dict[str, str] = field(default_factory=dict)

    def tree(self) -> dict[str, Any]:
        """The values as a configuration file has them."""
        tree: dict[str, Any] = {}
        for name, value in self.values.items():
            section, _, key = name.partition(".")
            tree.setdefault(section, {})[key] = value
        return tree


class _Import:
    """One file on its way: what of it is left, and what has become of the rest. References to other keys count as not given."""

    def __init__(self, origin: Origin, given: Mapping[str, Any]) -> None:
        self.left = {name: value for name, value in flat(given).items() if not _is_reference(name, value)}
        self.origin = origin
        self.done = Imported()

    def take(self, name: str) -> Any:
        """A value that is translated by its taker; None where it is not given."""
        return self.left.pop(name, None)

    def set(self, ours: str, value: Any) -> None:
        self.done.values[ours] = value

    def lose(self, name: str, value: Any, why: str) -> None:
        self.done.untranslated[name] = f"{value!r}: {why}"

    def choose(self, name: str, ours: str, choices: Mapping[Any, Any]) -> None:
        """A value that is called otherwise here."""
        value = self.take(name)
        if value is None:
            return
        if not isinstance(value, (str, int, float, bool)) or value not in choices:
            return self.lose(name, value, f"has no counterpart; see {ours}")
        if choices[value] is not None:
            self.set(ours, choices[value])

    def finish(self) -> Imported:
        for name, ours in SAME[self.origin].items():
            value = self.take(name)
            if value is not None:
                self.set(ours, value)
        for name, value in self.left.items():
            if _NOT_NEEDED[self.origin].match(name) or value is None:
                continue
            related = RELATED[self.origin].get(name)
            self.lose(name, value, f"not translated; see {related}" if related else "no counterpart here")
        return self.done


def import_config(origin: Origin, given: Mapping[str, Any], unread: Mapping[str, str] | None = None) -> Imported:
    """given: the parsed file, nested or with dotted names. unread: names whose value could not be read, with the reason."""
    work = _Import(origin, given)
    for name, why in (unread or {}).items():
        ours = (SAME[origin] | RELATED[origin]).get(name)
        work.done.untranslated[name] = f"{why}; set {ours}" if ours else why
    _CONVERSIONS[origin](work)
    return work.finish()


def _is_reference(name: str, value: Any) -> bool:
    """Whether it is OmegaConf's own: the class of a section, another key's value, a value that is to be given."""
    return name.endswith("_target_") or (isinstance(value, str) and value.startswith(("${", "???")))


def _template_options(work: _Import, name: str) -> None:
    """A mapping, which is one key per entry here, or an empty one."""
    found = {key: work.take(key) for key in list(work.left) if key.startswith(f"{name}.")}
    work.take(name)
    if found:
        work.set("data.template_options", {key.removeprefix(f"{name}."): value for key, value in found.items()})


def _from_trl(work: _Import) -> None:
    for name in ("dtype", "torch_dtype"):
        work.choose(name, "model.dtype", _DTYPES)
    for name in ("model_init_kwargs.dtype", "model_init_kwargs.torch_dtype"):
        work.choose(name, "model.dtype", _DTYPES)
    work.choose("bf16", "model.dtype", {True: "bf16", False: None})
    work.choose("gradient_checkpointing", "trainer.recompute", {True: "full", False: "none"})
    work.choose("lr_scheduler_type", "optimizer.decay", _DECAYS)
    _whole_distribution(work, "top_p", "top_k")
    work.choose("importance_sampling_level", "algorithm.loss", {"token": None, "sequence": "gspo"})
    work.choose(
        "scale_rewards",
        "algorithm.advantage",
        {True: "group-std", "group": "group-std", "batch": "batch-std", False: "centred", "none": "centred"},
    )
    loss = work.take("loss_type")
    if loss == "cispo":
        work.set("algorithm.loss", "cispo")
    elif loss in ("grpo", "dr_grpo", "dapo"):
        ours = {"grpo": "sequence-mean", "dr_grpo": "dr-grpo", "dapo": "token-mean"}[loss]
        work.set("algorithm.aggregation", ours)
    elif loss is not None:
        work.lose("loss_type", loss, "has no counterpart; see algorithm.loss and algorithm.aggregation")
    if (epsilon := work.take("epsilon")) is not None:
        work.set("algorithm.clip_low", epsilon)
        work.set("algorithm.clip_high", epsilon)  # epsilon_high, where it is given, comes later and wins
    _dataset(work, "dataset_name", "data.train")
    _dataset(work, "eval_dataset", "data.test")
    _template_options(work, "chat_template_kwargs")
    _trackers(work, "report_to")
    if (steps := work.take("max_steps")) is not None and steps > 0:
        work.set("schedule.iterations", steps)
    for name, ours in (("save_steps", "checkpoint.every"), ("eval_steps", "schedule.evaluate_every")):
        if (every := work.take(name)) is not None:
            if isinstance(every, int):
                work.set(ours, every)
            else:
                work.lose(name, every, f"a share of the run; set {ours} to a number of iterations")
    size, group = work.take("generation_batch_size"), work.left.get("num_generations", 8)
    if size is not None:
        if size % group == 0:
            work.set("schedule.prompts_per_iteration", size // group)
        else:
            work.lose("generation_batch_size", size, f"is no multiple of num_generations = {group}")
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"):
        if (value := work.take(name)) is not None:
            work.lose(
                name,
                value,
                "depends on the number of processes; set schedule.prompts_per_iteration = completions per step / "
                "num_generations, and microbatch.* for memory",
            )
    if (repeats := work.take("num_iterations")) not in (None, 1):
        work.lose(
            "num_iterations",
            repeats,
            "here every response is trained once per iteration; schedule.updates_per_iteration "
            "makes several steps on shares of them",
        )
    correction, mode = work.take("vllm_importance_sampling_correction"), work.take("vllm_importance_sampling_mode")
    cap = work.take("vllm_importance_sampling_cap")
    if correction is False:
        work.set("algorithm.importance_sampling", "none")
    elif mode in ("token_truncate", "sequence_truncate"):
        work.set("algorithm.importance_sampling", mode.partition("_")[0])
        if cap is not None:
            work.set("algorithm.importance_cap", cap)
    elif correction or mode:
        work.lose(
            "vllm_importance_sampling_mode",
            mode,
            "weights are truncated here, not masked; see algorithm.importance_sampling",
        )
    betas = [work.take(name) for name in ("adam_beta1", "adam_beta2")]
    if betas != [None, None]:
        work.set(
            "optimizer.betas",
            [usual if given is None else given for given, usual in zip(betas, (0.9, 0.999), strict=True)],
        )
    if work.left.get("warmup_steps") is not None and work.left["warmup_steps"] < 1 and work.left["warmup_steps"]:
        work.lose("warmup_steps", work.take("warmup_steps"), "a share of the run; set optimizer.warmup_iterations")


def _from_verl(work: _Import) -> None:
    actor, rollout, optim = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "actor.optim"))
    _dataset(work, "data.train_files", "data.train")
    _dataset(work, "data.val_files", "data.test")
    _template_options(work, "data.apply_chat_template_kwargs")
    for name, ours in (("data.train_max_samples", "data.train"), ("data.val_max_samples", "data.test")):
        if (most := work.take(name)) is None or most <= 0:  # -1 is all
            continue
        if path := work.done.values.get(ours):
            limited = {"path": path, "max_rows": most}
            work.set(ours, [limited] if ours == "data.train" else limited)
        else:
            work.lose(name, most, f"is max_rows of a dataset; see {ours}")
    if (column := work.take("data.prompt_key")) not in (None, "prompt"):  # prompt is found without being named
        work.set("data.question_column", column)
    _trackers(work, "trainer.logger")
    strategies = {"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}
    work.choose(f"{actor}.strategy", "trainer.backend", strategies)
    recompute = {True: "full", False: "none"}
    work.choose("actor_rollout_ref.model.enable_gradient_checkpointing", "trainer.recompute", recompute)
    work.choose("data.truncation", "data.overlong_prompt", {"error": "refuse", "left": "truncate"})
    work.choose("data.filter_overlong_prompts", "data.overlong_prompt", {True: "skip", False: None})
    _whole_distribution(work, f"{rollout}.top_p", f"{rollout}.top_k")
    work.choose(f"{rollout}.dtype", "model.dtype", _DTYPES)
    work.choose(f"{rollout}.enforce_eager", "rollout.graph_mode", {True: False, False: None})
    for name in (f"{optim}.lr_decay_style", f"{optim}.lr_scheduler_type", f"{optim}.warmup_style"):
        work.choose(name, "optimizer.decay", _DECAYS)
    if (betas := work.take(f"{optim}.betas")) is not None:
        work.set("optimizer.betas", list(betas))
    if (warmup := work.take(f"{optim}.lr_warmup_steps")) is not None and warmup >= 0:
        work.set("optimizer.warmup_iterations", warmup)
    if (clip := work.take(f"{actor}.clip_ratio")) is not None:
        work.set("algorithm.clip_low", clip)
        work.set("algorithm.clip_high", clip)  # clip_ratio_low and _high, where they are given, come later and win
    work.choose(
        f"{actor}.loss_agg_mode",
        "algorithm.aggregation",
        {
            "token-mean": "token-mean",
            "seq-mean-token-sum": "sequence-sum",
            "seq-mean-token-mean": "sequence-mean",
            "seq-mean-token-sum-norm": "dr-grpo",
        },
    )
    work.choose(
        f"{actor}.policy_loss.loss_mode", "algorithm.loss", {"vanilla": "clip", "gspo": "gspo", "cispo": "cispo"}
    )
    _verl_advantage(work)
    _verl_kl(work, actor)
    answers = {name: work.take(f"{rollout}.val_kwargs.{name}") for name in ("do_sample", "n", "temperature", "top_p")}
    if answers.pop("do_sample"):  # else one greedy answer, which is the default here
        work.set("evaluate.samples", answers.pop("n") or 1)
        for name, value in answers.items():
            if value is not None:
                work.set(f"evaluate.{name}", value)
    _verl_batch(work, actor)
    work.take(f"{actor}.megatron.sequence_parallel")  # on wherever there is tensor parallelism
    for name, ours in (("trainer.save_freq", "checkpoint.every"), ("trainer.test_freq", "schedule.evaluate_every")):
        if (every := work.take(name)) is not None:
            work.set(ours, max(every, 0))
    if (kept := work.take("trainer.max_actor_ckpt_to_keep")) is not None:
        work.set("checkpoint.keep_last", kept)
    work.choose("trainer.resume_mode", "checkpoint.resume", {"auto": "auto", "disable": None})
    work.choose("trainer.device", "run.device", {name: name for name in ("cuda", "npu", "cpu")})
    if (devices := work.take("trainer.n_gpus_per_node")) is not None:
        work.lose(
            "trainer.n_gpus_per_node",
            devices,
            "engines and trainers have devices of their own; set rollout.engines and trainer.devices",
        )


def _verl_batch(work: _Import, actor: str) -> None:
    """Updates of an iteration, and how its responses are packed."""
    mini, batch = work.take(f"{actor}.ppo_mini_batch_size"), work.left.get("data.train_batch_size")
    if mini is not None and batch is not None:
        if batch % mini == 0:
            work.set("schedule.updates_per_iteration", batch // mini)
        else:
            work.lose(f"{actor}.ppo_mini_batch_size", mini, f"does not divide data.train_batch_size = {batch}")
    elif mini is not None:
        work.lose(
            f"{actor}.ppo_mini_batch_size", mini, "set schedule.updates_per_iteration = data.train_batch_size / this"
        )
    if (epochs := work.take(f"{actor}.ppo_epochs")) not in (None, 1):
        work.lose(f"{actor}.ppo_epochs", epochs, "here every response is trained once per iteration")
    dynamic, tokens = work.take(f"{actor}.use_dynamic_bsz"), work.take(f"{actor}.ppo_max_token_len_per_gpu")
    if dynamic and tokens is not None:
        work.set("microbatch.max_tokens", tokens)


def _verl_advantage(work: _Import) -> None:
    estimator, by_std = work.take("algorithm.adv_estimator"), work.take("algorithm.norm_adv_by_std_in_grpo")
    known = {"grpo": "group-std", "rloo": "leave-one-out", "reinforce_plus_plus_baseline": "batch-std"}
    if estimator is not None and estimator not in known:
        return work.lose("algorithm.adv_estimator", estimator, "has no counterpart; see algorithm.advantage")
    if estimator == "grpo" and by_std is False:
        return work.set("algorithm.advantage", "centred")
    if estimator is not None:
        work.set("algorithm.advantage", known[estimator])


def _verl_kl(work: _Import, actor: str) -> None:
    """KL in the loss (actor.use_kl_loss) or in the reward (algorithm.use_kl_in_reward); their coefficients wait for these."""
    estimators = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    in_loss, in_reward = work.take(f"{actor}.use_kl_loss"), work.take("algorithm.use_kl_in_reward")
    loss = (work.take(f"{actor}.kl_loss_coef"), f"{actor}.kl_loss_type")
    reward = (work.take("algorithm.kl_ctrl.kl_coef"), "algorithm.kl_penalty")
    if in_loss and in_reward:
        return work.lose(
            "algorithm.use_kl_in_reward", True, "KL goes into the loss or into the reward; see algorithm.kl_in"
        )
    for wanted, (coefficient, estimator), place in ((in_loss, loss, "loss"), (in_reward, reward, "reward")):
        if not wanted:
            work.take(estimator)
            continue
        work.set("algorithm.kl_coef", 0.001 if coefficient is None else coefficient)
        work.set("algorithm.kl_in", place)
        work.choose(estimator, "algorithm.kl_estimator", estimators)


def _dataset(work: _Import, name: str, ours: str) -> None:
    """One file of ours to read; a name on a hub is none."""
    value = work.take(name)
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    if value is None:
        return
    if isinstance(value, str) and Path(value).suffix in (".jsonl", ".parquet"):
        return work.set(ours, value)
    work.lose(name, value, f"is no JSONL or parquet file; download it and name one in {ours}")


def _whole_distribution(work: _Import, top_p: str, top_k: str) -> None:
    """Engines sample from all of it, whose log-probs the trainer matches exactly."""
    work.choose(top_p, "rollout.temperature", {1.0: None})
    work.choose(top_k, "rollout.temperature", {0: None, -1: None})


def _trackers(work: _Import, name: str) -> None:
    """One tracker or several."""
    value = work.take(name)
    if value is None:
        return
    given = [
        tracker for tracker in ([value] if isinstance(value, str) else value) if tracker not in ("none", "console")
    ]
    chosen = [tracker for tracker in given if tracker in TRACKERS]
    work.set("telemetry.trackers", chosen)
    if len(chosen) < len(given):
        work.lose(name, value, f"not all have a counterpart; telemetry.trackers takes {', '.join(TRACKERS)}")


_CONVERSIONS: dict[Origin, Callable[[_Import], None]] = {"trl": _from_trl, "verl": _from_verl}

"""The one table of names: what a field of the iteration record is called in a tracker, by the convention of TRL or of verl.

TRL's names are those of its GRPOTrainer ("Logged metrics", under the prefix that transformers puts before them), verl's those of
its PPO trainer (verl/trainer/ppo/metric_utils.py, ray_trainer.py, and the rollout corrections). A field that a convention has no
name for is logged as pa_npu/FIELD, and so is every number of the record that is not in the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Convention = Literal["trl", "verl"]
OWN_PREFIX = "pa_npu"
_NOT_NUMBERS_OF_A_CURVE = frozenset({"iteration", "version", "time", "non_finite"})


@dataclass(frozen=True)
class Name:
    """field: of the iteration record; "a.*" is every field of a, whose name takes the place of the asterisk; "a + b" a sum."""

    field: str
    trl: str | None
    verl: str | None
    meaning: str


NAMES = (
    Name(
        "reward_mean", "train/reward", "critic/score/mean", "weighted sum of the reward functions, mean over responses"
    ),
    Name("reward_std", "train/reward_std", None, "its standard deviation within a group, mean over groups"),
    Name("rewards.*", "train/rewards/*/mean", "reward/*/mean", "of one reward function, unweighted"),
    Name("equal_reward_ratio", "train/frac_reward_zero_std", None, "share of groups whose rewards are all equal"),
    Name("loss", "train/loss", "actor/loss", "loss over the iteration's normaliser"),
    Name("policy_loss", None, "actor/pg_loss", "its part without KL and entropy terms"),
    Name("kl", "train/kl", "actor/kl_loss", "KL to the reference (K3)"),
    Name("entropy", "train/entropy", "actor/entropy", "nats per token"),
    Name("clip_ratio", "train/clip_ratio/region_mean", "actor/pg_clipfrac", "share of clipped tokens"),
    Name("grad_norm", "train/grad_norm", "actor/grad_norm", "before clipping"),
    Name("learning_rate", "train/learning_rate", "actor/lr", "of the last step"),
    Name("response_length_mean", "train/completions/mean_length", "response_length/mean", "tokens"),
    Name("response_length_min", "train/completions/min_length", "response_length/min", "tokens"),
    Name("response_length_max", "train/completions/max_length", "response_length/max", "tokens"),
    Name("truncated_ratio", "train/completions/clipped_ratio", "response_length/clip_ratio", "share of cut responses"),
    Name("prompt_length_mean", None, "prompt_length/mean", "tokens"),
    Name(
        "logprob_diff_mean",
        "train/sampling/sampling_logp_difference/mean",
        None,
        "difference of log-probs, engine against trainer, absolute",
    ),
    Name("logprob_diff_max", "train/sampling/sampling_logp_difference/max", None, "the largest"),
    Name("logprob_k3", None, "rollout_corr/k3_kl", "KL(engine, trainer), K3"),
    Name(
        "importance_weight_mean",
        "train/sampling/importance_sampling_ratio/mean",
        "rollout_corr/rollout_is_mean",
        "importance weights",
    ),
    Name("iteration_s", "train/step_time", "timing_s/step", "seconds from publish to publish"),
    Name("generate_s", None, "timing_s/gen", "seconds until the last group was there"),
    Name("train_s", None, "timing_s/update_actor", "seconds of forward, backward and step"),
    Name("publish_s", None, "timing_s/update_weights", "seconds of the weight publish"),
    Name("evaluation_s", None, "timing_s/testing", "seconds of the evaluation"),
    Name("checkpoint_s", None, "timing_s/save_checkpoint", "seconds that training stood still for a checkpoint"),
    Name("tpspd", None, "perf/throughput", "tokens per second per device, all devices, prompts included"),
    Name("tokens_prompt + tokens_response", None, "perf/total_num_tokens", "tokens of the iteration"),
)
"""In the order of the documented table."""

EVALUATION: Mapping[Convention, str] = {"trl": "eval/{set}/{metric}", "verl": "val-core/{set}/acc/{metric}"}
STEP: Mapping[Convention, str] = {"trl": "train/global_step", "verl": "training/global_step"}
SAMPLES_TABLE: Mapping[Convention, str] = {"trl": "completions", "verl": "train/generations"}


def tracked(record: Mapping[str, Any], convention: Convention) -> dict[str, float]:
    """The numbers of an iteration record under the convention's names; what is not a finite number is left out."""
    flat = dict(_numbers(record, ""))
    values: dict[str, float] = {STEP[convention]: float(record["iteration"])}
    named: set[str] = set()
    for name in NAMES:
        chosen = getattr(name, convention)
        if " + " in name.field:
            parts = name.field.split(" + ")
            if all(part in flat for part in parts):
                values[chosen or f"{OWN_PREFIX}/{'_and_'.join(parts)}"] = sum(flat[part] for part in parts)
            continue
        for field, label in _matches(name.field, flat):
            named.add(field)
            values[chosen.replace("*", label) if chosen else _own(field)] = flat[field]
    values.update({_own(field): value for field, value in flat.items() if field not in named})
    return values


def tracked_evaluation(record: Mapping[str, Any], convention: Convention) -> dict[str, float]:
    """The numbers of an evaluation record: of each set its metrics."""
    values: dict[str, float] = {STEP[convention]: float(record["version"])}
    for name, found in record.get("sets", {}).items():
        for metric, value in found["metrics"].items():
            if _is_number(value["value"]):
                values[EVALUATION[convention].format(set=name, metric=metric)] = float(value["value"])
    return values


def _own(field: str) -> str:
    return f"{OWN_PREFIX}/{field.replace('.', '/')}"


def _matches(field: str, flat: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """(field, what the asterisk stands for) of the record's fields that this one of the table means."""
    if not field.endswith(".*"):
        return iter([(field, "")] if field in flat else [])
    prefix = field[:-1]
    return ((found, found.removeprefix(prefix)) for found in flat if found.startswith(prefix))


def _numbers(record: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}.")
        elif _is_number(value) and not (prefix == "" and key in _NOT_NUMBERS_OF_A_CURVE):
            yield prefix + key, float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)

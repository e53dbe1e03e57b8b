"""Names of numbers in trackers: as TRL calls them, pa_npu/FIELD where it has no name; docs/trackers.md has the table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pa_npu.telemetry.secrets import flat

# By field of the iteration record; "a.*" is every field of a, whose name takes the place of the asterisk.
NAMES = {
    "reward_mean": "train/reward",
    "reward_std": "train/reward_std",
    "rewards.*": "train/rewards/*/mean",
    "equal_reward_ratio": "train/frac_reward_zero_std",
    "loss": "train/loss",
    "kl": "train/kl",
    "entropy": "train/entropy",
    "clip_ratio": "train/clip_ratio/region_mean",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "response_length_mean": "train/completions/mean_length",
    "response_length_min": "train/completions/min_length",
    "response_length_max": "train/completions/max_length",
    "truncated_ratio": "train/completions/clipped_ratio",
    "logprob_diff_mean": "train/sampling/sampling_logp_difference/mean",
    "logprob_diff_max": "train/sampling/sampling_logp_difference/max",
    "importance_weight_mean": "train/sampling/importance_sampling_ratio/mean",
    "iteration_s": "train/step_time",
}
SAMPLES_TABLE = "completions"
_STEP = "train/global_step"
_NOT_NUMBERS_OF_A_CURVE = frozenset({"iteration", "version", "time", "non_finite"})


def tracked(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an iteration record under their names; what is not a finite number is left out."""
    found = {
        _named(field): float(value)
        for field, value in flat(record).items()
        if _is_number(value) and field not in _NOT_NUMBERS_OF_A_CURVE
    }
    return {_STEP: float(record["iteration"])} | found


def tracked_evaluation(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an evaluation record: of each set its metrics."""
    values = {_STEP: float(record["version"])}
    for name, found in record.get("sets", {}).items():
        for metric, value in found["metrics"].items():
            if _is_number(value["value"]):
                values[f"eval/{name}/{metric}"] = float(value["value"])
    return values


def _named(field: str) -> str:
    section, _, label = field.partition(".")
    if label and (pattern := NAMES.get(f"{section}.*")):
        return pattern.replace("*", label)
    return NAMES.get(field) or f"pa_npu/{field.replace('.', '/')}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)

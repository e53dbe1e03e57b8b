"""TPSPD, tokens per second per device: what it counts, for one iteration and for a run.

    TPSPD = sum over trained samples of (prompt + response tokens), the prompt counted once per sample
            / wall seconds from one completed weight publish to the next
            / number of ALL devices, trainers and engines

This is the end-to-end figure of MindSpeed-RL, (mean response + mean prompt) x samples / devices / iteration seconds.
Evaluation and checkpoints inside an iteration are inside its seconds; they are reported beside it, not subtracted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pa_npu.config.words import counted
from pa_npu.errors import DataError

WARMUP_ITERATIONS = 1
"""Iterations at a run's start that summaries leave out: kernels are compiled and caches filled in the first."""
_LARGEST = 1e15
"""Bound of every number of a record: far above what a run can count, and far below where arithmetic overflows."""
_TOKENS = ("tokens_prompt", "tokens_response", "tokens_computed")
_MEANS = {
    "iteration_s": None,
    "generate_s": None,
    "train_s": None,
    "publish_s": None,
    "evaluation_s": 0.0,
    "checkpoint_s": 0.0,
}
"""Seconds that are means per iteration, with what stands for one that an iteration did not have."""
_NEEDED = frozenset({"trainer_idle", "engine_idle"})


def throughput(tokens: Mapping[str, float], seconds: float, devices: int) -> dict[str, float]:
    """Tokens per second per device by name: of samples, of their responses alone, and of tokens that were computed.

    Raises ValueError on non-positive seconds or devices.

    Args:
        tokens: tokens_prompt, the prompt once per sample; tokens_response; tokens_computed, those that went through the trainer, a
            shared prompt once.
        seconds: from publish to publish.
        devices: trainers and engines together.
    """
    if not seconds > 0 or devices < 1:
        raise ValueError(f"throughput needs seconds > 0 and devices >= 1, found {seconds} s, {devices} devices")
    device_seconds = seconds * devices
    return {
        "tpspd": (tokens["tokens_prompt"] + tokens["tokens_response"]) / device_seconds,
        "tpspd_response": tokens["tokens_response"] / device_seconds,
        "tpspd_computed": tokens["tokens_computed"] / device_seconds,
    }


def run_throughput(records: Sequence[Mapping[str, Any]], warmup_iterations: int) -> dict[str, float | None]:
    """Numbers of a run from its iteration records, the first `warmup_iterations` of them left out, by name.

    Rates (tpspd and its kin) come from sums, seconds are means per iteration, ratios are means weighted by the iterations' seconds.
    tail_waste, replica_imbalance: None where records do not have them. Of a run with iterations of both kinds only the periodic
    ones count; synchronous_s is the mean of the others, which are there for comparison.
    Raises DataError when nothing is left, a record lacks a number, or the number of devices changed on the way.
    """
    kept = records[warmup_iterations:]
    if not kept:
        raise DataError(
            f"{counted(len(records), 'iteration')}, all within the warm-up of {warmup_iterations}; use a shorter warm-up"
        )
    apart = [record for record in kept if record.get("periodic") is False]
    if len(apart) < len(kept):
        kept = [record for record in kept if record.get("periodic") is not False]
    else:
        apart = []  # a synchronous run
    devices = {int(number(record, "devices")) for record in kept}
    if len(devices) > 1:
        raise DataError(f"the number of devices changed during the run: {sorted(devices)}; report its parts separately")
    if min(devices) < 1:
        raise DataError(f"the number of devices is {min(devices)}, which cannot be")
    seconds = sum(number(record, "iteration_s") for record in kept)
    if seconds <= 0:
        raise DataError(f"iteration_s adds up to {seconds} s over {counted(len(kept), 'iteration')}, which cannot be")
    tokens = {name: sum(number(record, name) for record in kept) for name in _TOKENS}
    found: dict[str, float | None] = {**throughput(tokens, seconds, min(devices))}
    for name, default in _MEANS.items():
        found[name] = sum(number(record, name, default) for record in kept) / len(kept)
    for name in ("trainer_idle", "engine_idle", "tail_waste", "replica_imbalance"):
        missing = name not in _NEEDED and any(record.get(name) is None for record in kept)
        weighted = (number(record, name) * number(record, "iteration_s") for record in kept)
        found[name] = None if missing else sum(weighted) / seconds
    return found | {
        "synchronous_s": sum(number(record, "iteration_s") for record in apart) / len(apart) if apart else None,
        "devices": min(devices),
        "iterations": len(kept),
        "dropped_iterations": len(records) - len(kept) - len(apart),
    }


def number(record: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number of a record; `default` stands for what an iteration did not do (no evaluation, no checkpoint)."""
    value = record.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LARGEST:
        raise DataError(
            f"iteration {record.get('iteration')}: {key} is {value!r:.40}, expected a number from 0 to {_LARGEST:g}"
        )
    return value

"""TPSPD, tokens per second per device: what it counts, for one iteration and for a run.

    TPSPD = sum over trained samples of (prompt + response tokens), the prompt counted once per sample
            / wall seconds from one completed weight publish to the next
            / number of ALL devices, trainers and engines

This is the end-to-end figure of MindSpeed-RL, (mean response + mean prompt) x samples / devices / iteration seconds.
Evaluation and checkpoints inside an iteration are inside its seconds; they are reported beside it, not subtracted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pa_npu.config.words import counted
from pa_npu.errors import DataError

WARMUP_ITERATIONS = 1
"""Iterations at a run's start that summaries leave out: kernels are compiled and caches filled in the first."""
_LARGEST = 1e15
"""Bound of every number of a record: far above what a run can count, and far below where arithmetic overflows."""


@dataclass(frozen=True)
class Work:
    """Tokens that some iterations trained, and the seconds that they took.

    tokens_prompt: prompt tokens, the prompt once per sample. tokens_response: response tokens.
    tokens_computed: tokens that went through the trainer, a shared prompt once.
    seconds: wall seconds from publish to publish. devices: trainers and engines together.
    """

    tokens_prompt: int
    tokens_response: int
    tokens_computed: int
    seconds: float
    devices: int


@dataclass(frozen=True)
class Throughput:
    """Tokens per second per device: of samples, of their responses alone, and of tokens actually computed."""

    tpspd: float
    tpspd_response: float
    tpspd_computed: float


@dataclass(frozen=True)
class RunThroughput:
    """Throughput of a run's iterations after the warm-up. Rates come from sums, seconds are means per iteration.

    tail_waste, replica_imbalance: None where records do not have them. Of a run with iterations of both kinds only the periodic
    ones count; synchronous_s is the mean of the others, which are there for comparison.
    """

    throughput: Throughput
    devices: int
    iterations: int
    dropped_iterations: int
    iteration_s: float
    generate_s: float
    train_s: float
    publish_s: float
    evaluation_s: float
    checkpoint_s: float
    trainer_idle: float
    engine_idle: float
    tail_waste: float | None
    replica_imbalance: float | None
    synchronous_s: float | None = None


def throughput(work: Work) -> Throughput:
    """The formula of the module's docstring. Raises ValueError on non-positive seconds or devices."""
    if not work.seconds > 0 or work.devices < 1:
        raise ValueError(
            f"throughput needs seconds > 0 and devices >= 1, found {work.seconds} s, {work.devices} devices"
        )
    device_seconds = work.seconds * work.devices
    return Throughput(
        tpspd=(work.tokens_prompt + work.tokens_response) / device_seconds,
        tpspd_response=work.tokens_response / device_seconds,
        tpspd_computed=work.tokens_computed / device_seconds,
    )


def run_throughput(records: Sequence[Mapping[str, Any]], warmup_iterations: int) -> RunThroughput:
    """Throughput of a run from its iteration records, the first `warmup_iterations` of them left out.

    Idle ratios are means weighted by the iterations' seconds. Raises DataError when nothing is left, a record lacks a
    number, or the number of devices changed on the way.
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
    work = Work(
        tokens_prompt=int(sum(number(record, "tokens_prompt") for record in kept)),
        tokens_response=int(sum(number(record, "tokens_response") for record in kept)),
        tokens_computed=int(sum(number(record, "tokens_computed") for record in kept)),
        seconds=seconds,
        devices=devices.pop(),
    )
    if seconds <= 0:
        raise DataError(f"iteration_s adds up to {seconds} s over {counted(len(kept), 'iteration')}, which cannot be")

    def mean(key: str, default: float | None = None) -> float:
        return sum(number(record, key, default) for record in kept) / len(kept)

    def weighted(key: str) -> float:
        return sum(number(record, key) * number(record, "iteration_s") for record in kept) / seconds

    def weighted_if_there(key: str) -> float | None:
        return weighted(key) if all(record.get(key) is not None for record in kept) else None

    return RunThroughput(
        throughput=throughput(work),
        devices=work.devices,
        iterations=len(kept),
        dropped_iterations=len(records) - len(kept) - len(apart),
        iteration_s=seconds / len(kept),
        generate_s=mean("generate_s"),
        train_s=mean("train_s"),
        publish_s=mean("publish_s"),
        evaluation_s=mean("evaluation_s", 0.0),
        checkpoint_s=mean("checkpoint_s", 0.0),
        trainer_idle=weighted("trainer_idle"),
        engine_idle=weighted("engine_idle"),
        tail_waste=weighted_if_there("tail_waste"),
        replica_imbalance=weighted_if_there("replica_imbalance"),
        synchronous_s=sum(number(record, "iteration_s") for record in apart) / len(apart) if apart else None,
    )


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

"""Runs beside each other: curves with bands over seeds, and differences stated in numbers.

Runs whose configurations differ only in their seed and in where they ran form a group; a group is
named by the keys in which it differs from the others. A curve of a group is the mean over its runs,
its band the range over them. A difference compares the means over the last quarter of the
iterations: Welch's t-test interval at 95% over runs (B. L. Welch, Biometrika 34, 1947), where each
group has at least two of them. Runs of two groups with the same seed are also compared value by
value, which shows equal updates.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from pa_npu.errors import DataError
from pa_npu.telemetry.records import read_evaluations, read_records
from pa_npu.telemetry.report import read_config
from pa_npu.telemetry.secrets import Secrets

T = TypeVar("T")

_PLACE_OF_A_RUN = ("run.dir", "run.seed", "run.restarts", "checkpoint.", "placement.", "telemetry.")
_LAST_SHARE = 0.25
# Quantiles of Student's t distribution for a two-sided 95% interval, by degrees of freedom from 1.
_T_95 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
    2.080,
    2.074,
    2.069,
    2.064,
    2.060,
    2.056,
    2.052,
    2.048,
    2.045,
    2.042,
)


@dataclass(frozen=True)
class Metric:
    """A number of every iteration's record. title and unit are for axes."""

    key: str
    title: str
    unit: str


METRICS = (
    Metric("reward_mean", "mean reward", "reward"),
    Metric("eval_accuracy", "held-out accuracy", "share"),
    Metric("kl", "KL to the reference", "nats per token"),
    Metric("entropy", "entropy", "nats per token"),
    Metric("response_length_mean", "response length", "tokens"),
    Metric("logprob_diff_mean", "trainer against engine log-prob, mean |difference|", "nats"),
    Metric("tpspd", "TPSPD", "tokens / s / device"),
)

AXES = {"iteration": "iterations", "samples": "trained samples", "seconds": "wall time in s"}


@dataclass(frozen=True)
class RunCurves:
    """One run: configuration, flat; by weight version (0 to the number of iterations) the x of
    every axis of AXES, and METRICS.

    A value at version v is of the iteration that made v, and an accuracy of the evaluation of v;
    None: not there.
    """

    name: str
    seed: int | None
    config: Mapping[str, Any]
    x: Mapping[str, Sequence[float]]
    values: Mapping[str, Sequence[float | None]]


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in their seed only."""

    label: str
    runs: Sequence[RunCurves]


@dataclass(frozen=True)
class Difference:
    """A metric of a group against the first group, over the last quarter of the iterations.

    mean, first_mean: over runs and iterations. half_width: of the 95% interval of mean -
    first_mean; None with fewer than two runs on a side. largest_gap: the largest |difference| of
    one iteration between runs with the same seed; None where there are none.
    """

    metric: Metric
    label: str
    mean: float
    first_mean: float
    half_width: float | None
    largest_gap: float | None


def load_runs(directories: Sequence[Path | str]) -> list[RunCurves]:
    """Returns the runs in the order given. Raises DataError for a directory that holds no
    iteration.
    """
    return [_load(Path(directory)) for directory in directories]


def group_runs(runs: Sequence[RunCurves]) -> list[RunGroup]:
    """Runs with equal configurations together, in order of their first run; labels are the keys
    that tell groups apart.
    """
    return [
        RunGroup(label, group)
        for label, group in alike(runs, lambda run: run.config, lambda run: run.name)
    ]


def alike(
    runs: Sequence[T], config: Callable[[T], Mapping[str, Any]], name: Callable[[T], str]
) -> list[tuple[str, list[T]]]:
    """As group_runs, of anything that has a configuration (flat) and a name."""
    members: dict[tuple[tuple[str, str], ...], list[T]] = {}
    for run in runs:
        shape = tuple(
            sorted((key, str(value)) for key, value in config(run).items() if not _of_place(key))
        )
        members.setdefault(shape, []).append(run)
    if len(members) == 1:
        return [(name(runs[0]), list(runs))]
    shapes = [dict(shape) for shape in members]
    # a key that only some of them have tells versions of this package apart, not what somebody
    # chose
    keys = sorted(set.intersection(*(set(shape) for shape in shapes)))
    telling = [key for key in keys if len({shape[key] for shape in shapes}) > 1]
    labels = [
        ", ".join(f"{key.rpartition('.')[2]}={shape[key]}" for key in telling[:3])
        for shape in shapes
    ]
    return [
        (label if label and labels.count(label) == 1 else name(group[0]), group)
        for label, group in zip(labels, members.values(), strict=True)
    ]


def _of_place(key: str) -> bool:
    return any(
        key == part or (part.endswith(".") and key.startswith(part)) for part in _PLACE_OF_A_RUN
    )


def curve(group: RunGroup, metric: str, axis: str) -> list[tuple[float, float, float, float]]:
    """(x, mean, smallest, largest) per weight version over the group's runs; iterations that a run
    lacks are left out of it.
    """
    points = []
    for index in range(max(len(run.x["iteration"]) for run in group.runs)):
        having = [
            run
            for run in group.runs
            if index < len(run.x["iteration"]) and run.values[metric][index] is not None
        ]
        if having:
            values = [float(run.values[metric][index] or 0.0) for run in having]
            x = statistics.fmean(run.x[axis][index] for run in having)
            points.append((x, statistics.fmean(values), min(values), max(values)))
    return points


def differences(groups: Sequence[RunGroup]) -> list[Difference]:
    """Returns every metric of every group, the first one included, against the first group."""
    listed = []
    for metric in METRICS:
        first = [
            mean for run in groups[0].runs if (mean := _last_mean(run, metric.key)) is not None
        ]
        for group in groups:
            means = [
                mean for run in group.runs if (mean := _last_mean(run, metric.key)) is not None
            ]
            if not means or not first:
                continue
            half_width = None if group is groups[0] else welch_half_width(means, first)
            gap = None if group is groups[0] else _largest_gap(group, groups[0], metric.key)
            listed.append(
                Difference(
                    metric,
                    group.label,
                    statistics.fmean(means),
                    statistics.fmean(first),
                    half_width,
                    gap,
                )
            )
    return listed


def welch_half_width(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Half the width of the 95% interval of mean(a) - mean(b) without assuming equal variances;
    None for fewer than 2 values.
    """
    if len(a) < 2 or len(b) < 2:
        return None
    va = statistics.variance(a) / len(a)
    vb = statistics.variance(b) / len(b)
    if va + vb == 0.0:
        return 0.0
    freedom = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    return _T_95[max(0, min(len(_T_95), math.floor(freedom)) - 1)] * math.sqrt(va + vb)


def _load(run_dir: Path) -> RunCurves:
    if not run_dir.is_dir():
        raise DataError(
            f"{run_dir}: is not a directory; give run directories, as in runs/grpo_tiny"
        )
    records = read_records(run_dir)
    if not records:
        raise DataError(f"{run_dir}: holds no finished iteration yet")
    config = Secrets(read_config(run_dir)).config
    evaluations = {
        entry.get("version"): _number(entry.get("accuracy")) for entry in read_evaluations(run_dir)
    }
    evaluations |= {
        record["version"]: accuracy
        for record in records
        if (accuracy := _number(record.get("eval_accuracy"))) is not None and "version" in record
    }
    values: dict[str, list[float | None]] = {
        metric.key: [None, *(_number(record.get(metric.key)) for record in records)]
        for metric in METRICS
    }
    values["eval_accuracy"] = [evaluations.get(version) for version in range(len(records) + 1)]
    per_group = _number(config.get("rollout.responses_per_prompt")) or 1
    x = {
        "iteration": [float(version) for version in range(len(records) + 1)],
        "samples": _running(
            [per_group * (_number(record.get("groups")) or 0.0) for record in records]
        ),
        "seconds": _running([_number(record.get("iteration_s")) or 0.0 for record in records]),
    }
    seed = config.get("run.seed")
    return RunCurves(run_dir.name, seed if isinstance(seed, int) else None, config, x, values)


def _running(steps: Sequence[float]) -> list[float]:
    return list(accumulate(steps, initial=0.0))


def _last_mean(run: RunCurves, metric: str) -> float | None:
    count = len(run.x["iteration"])
    last = run.values[metric][count - max(1, round(count * _LAST_SHARE)) :]
    there = [value for value in last if value is not None]
    if not there:  # evaluated now and then only: the latest
        there = [value for value in run.values[metric] if value is not None][-1:]
    return statistics.fmean(there) if there else None


def _largest_gap(group: RunGroup, first: RunGroup, metric: str) -> float | None:
    gaps = [
        abs(a - b)
        for run in group.runs
        for peer in first.runs
        if run.seed == peer.seed
        for a, b in zip(run.values[metric], peer.values[metric], strict=False)
        if a is not None and b is not None
    ]
    return max(gaps, default=None)


def _number(value: Any) -> float | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None

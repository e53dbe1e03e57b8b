"""Throughput: TPSPD of an iteration and of runs side by side, as a table and as JSON.

    TPSPD = sum over trained samples of (prompt + response tokens), the prompt counted once per
    sample
            / wall seconds from one completed weight publish to the next
            / number of ALL devices, trainers and engines

This is the end-to-end figure of MindSpeed-RL, (mean response + mean prompt) x samples / devices /
iteration seconds. Evaluation and checkpoints inside an iteration are inside its seconds; they are
reported beside it, not subtracted.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from pa_npu.config.words import counted
from pa_npu.config.yaml_source import read_yaml
from pa_npu.errors import DataError
from pa_npu.telemetry.records import read_records

WARMUP_ITERATIONS = 1
"""Iterations at a run's start that summaries leave out: kernels are compiled and caches filled in
the first.
"""
_LARGEST = 1e15
"""Bound of every number of a record: far above what a run can count, and far below where arithmetic
overflows.
"""
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
_DEVICE_UNITS = {"npu": "one NPU die", "cuda": "one GPU", "cpu": "one CPU core"}
# Bytes of a record, and what they are in words. Whatever a run does not have is left out.
PEAKS = {
    "memory_trainer_host_bytes": "trainer, host",
    "memory_trainer_device_bytes": "trainer, device",
    "memory_engine_host_bytes": "engine, host",
    "memory_engine_device_bytes": "engine, device",
    "memory_coordinator_bytes": "coordinator",
}
LEARNED = {"reward_mean": "reward", "accuracy": "accuracy"}
"""Numbers of a record whose mean over the last quarter of the iterations says what the run has come
to.
"""
_MIB = 2**20
_COLUMN_WIDTH = 24
_FIGURES = {
    "tpspd": ("TPSPD", ",.1f"),
    "tpspd_response": ("  response tokens only", ",.1f"),
    "tpspd_computed": ("  tokens computed", ",.1f"),
    "ratio": ("ratio to the first run", ".3f"),
    "iteration_s": ("iteration s", ".3f"),
    "synchronous_s": ("  synchronous iteration s", ".3f"),
    "generate_s": ("  generation Tg s", ".3f"),
    "train_s": ("  training Tt s", ".3f"),
    "publish_s": ("  publish s", ".3f"),
    "evaluation_s": ("  evaluation s", ".3f"),
    "checkpoint_s": ("  checkpoint s", ".3f"),
    "trainer_idle": ("trainer idle", ".1%"),
    "engine_idle": ("engine idle", ".1%"),
    "tail_waste": ("tail waste", ".1%"),
    "replica_imbalance": ("replica imbalance", ".1%"),
    "devices": ("devices", ",.0f"),
    "iterations": ("iterations", ",.0f"),
    "dropped_iterations": ("warm-up iterations dropped", ",.0f"),
    **{name: (f"{title}, last quarter", ".3f") for name, title in LEARNED.items()},
    **{name: (f"memory of an iteration, MiB: {title}", ",.0f") for name, title in PEAKS.items()},
}
"""Rows of the table: title and layout, as of format(), of every number by name."""
_OPTIONAL = frozenset({*PEAKS, "synchronous_s"})


def throughput(tokens: Mapping[str, float], seconds: float, devices: int) -> dict[str, float]:
    """Returns tokens per second per device by name: of samples, of their responses alone, and of
    tokens that were computed.

    Args:
        tokens: tokens_prompt, with the prompt once per sample; tokens_response; tokens_computed,
            which went through the trainer, with a shared prompt once.
        seconds: from publish to publish.
        devices: trainers and engines together.

    Raises ValueError on non-positive seconds or devices.
    """
    if not seconds > 0 or devices < 1:
        raise ValueError(
            f"throughput needs seconds > 0 and devices >= 1, found {seconds} s, {devices} devices"
        )
    device_seconds = seconds * devices
    return {
        "tpspd": (tokens["tokens_prompt"] + tokens["tokens_response"]) / device_seconds,
        "tpspd_response": tokens["tokens_response"] / device_seconds,
        "tpspd_computed": tokens["tokens_computed"] / device_seconds,
    }


def run_throughput(
    records: Sequence[Mapping[str, Any]], warmup_iterations: int
) -> dict[str, float | None]:
    """Returns the numbers of a run by name, from its iteration records without the first
    `warmup_iterations`.

    Rates (tpspd and its kin) come from sums, seconds are means per iteration, ratios are means
    weighted by the iterations' seconds. tail_waste, replica_imbalance: None where records do not
    have them. In a run with iterations of both kinds only the periodic ones count; synchronous_s is
    the mean of the others, which are there for comparison.

    Raises DataError when nothing is left, a record lacks a number, or the number of devices changed
    on the way.
    """
    kept = records[warmup_iterations:]
    if not kept:
        raise DataError(
            f"{counted(len(records), 'iteration')}, all within the warm-up of {warmup_iterations}; "
            "use a shorter warm-up"
        )
    apart = [record for record in kept if record.get("periodic") is False]
    if len(apart) < len(kept):
        kept = [record for record in kept if record.get("periodic") is not False]
    else:
        apart = []  # a synchronous run
    devices = {int(number(record, "devices")) for record in kept}
    if len(devices) > 1:
        raise DataError(
            f"the number of devices changed during the run: {sorted(devices)}; report its parts "
            "separately"
        )
    if min(devices) < 1:
        raise DataError(f"the number of devices is {min(devices)}, which cannot be")
    seconds = sum(number(record, "iteration_s") for record in kept)
    if seconds <= 0:
        raise DataError(
            f"iteration_s adds up to {seconds} s over {counted(len(kept), 'iteration')}, which "
            "cannot be"
        )
    tokens = {name: sum(number(record, name) for record in kept) for name in _TOKENS}
    numbers: dict[str, float | None] = {**throughput(tokens, seconds, min(devices))}
    # rows of data are trained without engines, to which nothing is published
    needed = _NEEDED
    means = _MEANS
    if all("rows" in record for record in kept):
        needed = _NEEDED - {"engine_idle"}
        means = {name: default for name, default in _MEANS.items() if name != "publish_s"}
        numbers["publish_s"] = None
    for name, default in means.items():
        numbers[name] = sum(number(record, name, default) for record in kept) / len(kept)
    for name in ("trainer_idle", "engine_idle", "tail_waste", "replica_imbalance"):
        missing = name not in needed and any(record.get(name) is None for record in kept)
        weighted = (number(record, name) * number(record, "iteration_s") for record in kept)
        numbers[name] = None if missing else sum(weighted) / seconds
    numbers["synchronous_s"] = None
    if apart:
        apart_s = sum(number(record, "iteration_s") for record in apart)
        numbers["synchronous_s"] = apart_s / len(apart)
    numbers["devices"] = min(devices)
    numbers["iterations"] = len(kept)
    numbers["dropped_iterations"] = len(records) - len(kept) - len(apart)
    return numbers


def number(record: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Returns a number of a record. Raises DataError if it is none, or out of bounds.

    default: stands for what an iteration did not do (no evaluation, no checkpoint).
    """
    value = record.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LARGEST:
        raise DataError(
            f"iteration {record.get('iteration')}: {key} is {value!r:.40}, expected a number from "
            f"0 to {_LARGEST:g}"
        )
    return value


@dataclass(frozen=True)
class RunReport:
    """Throughput of one run.

    Args:
        name: of the run directory.
        device: the configured kind (npu, cuda, cpu); None if the run has no config.yaml.
        values: numbers of run_throughput, and those of LEARNED and PEAKS that the run has.
        engines: devices of single engines in words (rollout.engine_settings); empty if none has
        any.
        records: of all iterations.
    """

    name: str
    device: str | None
    values: Mapping[str, float | None]
    engines: str
    records: Sequence[Mapping[str, Any]]


def load_report(run_dir: Path | str, warmup_iterations: int = WARMUP_ITERATIONS) -> RunReport:
    """Returns the report of a run directory. Raises DataError, which names the directory."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise DataError(
            f"{run_dir}: is not a directory; give run directories, as in runs/grpo_tiny"
        )
    records = read_records(run_dir)
    config = read_config(run_dir)
    try:
        values = run_throughput(records, warmup_iterations)
    except DataError as error:
        raise DataError(f"{run_dir}: {error}") from error
    values |= learned(records) | memory_peaks(records[warmup_iterations:])
    device = config.get("run", {}).get("device")
    device = device if isinstance(device, str) else None
    name = run_dir.name or str(run_dir)
    return RunReport(name, device, values, named_devices(config), records)


def named_devices(config: Mapping[str, Any]) -> str:
    """Names single engines' devices in words; empty if the configuration names none.

    config: plain values, as a file of any version has them.
    """
    rollout = config.get("rollout")
    entries = rollout.get("engine_settings") if isinstance(rollout, dict) else None
    if not isinstance(entries, list):
        return ""
    devices = []
    for entry in entries:
        if not isinstance(entry, dict) or not entry.get("device"):
            continue
        engines = entry.get("engines")
        if isinstance(engines, list):
            plural = "s" if len(engines) > 1 else ""
            numbers = ", ".join(map(str, engines))
            devices.append(f"{entry['device']} (engine{plural} {numbers})")
    return ", ".join(devices)


def learned(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the means over the last quarter of the iterations, by names of LEARNED."""
    last = records[-max(1, len(records) // 4) :]
    means = {}
    for name in LEARNED:
        values = [record[name] for record in last if isinstance(record.get(name), (int, float))]
        if values:
            means[name] = fmean(values)
    return means


def memory_peaks(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the means over the iterations of the largest memory use in bytes, by names of
    PEAKS.
    """
    means = {}
    for name in PEAKS:
        values = [number(record, name) for record in records if record.get(name) is not None]
        if values:
            means[name] = fmean(values)
    return means


def each_run(reports: Sequence[RunReport]) -> list[RunReport]:
    """Returns the reports under the names that they have in a table: directory names, numbered
    where two runs share one.
    """
    names = [report.name for report in reports]
    return [
        replace(report, name=f"{report.name} #{number}") if names.count(report.name) > 1 else report
        for number, report in enumerate(reports, start=1)
    ]


def render_text(reports: Sequence[RunReport]) -> str:
    """Returns a table with a column of equal width per run, followed by what the numbers mean."""
    from rich.box import ASCII2  # logs and terminals of any locale can show it
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Throughput", box=ASCII2)
    table.add_column("")
    for report in reports:
        table.add_column(report.name, justify="right", overflow="fold")
    for title, cells in table_rows(reports):
        table.add_row(title, *cells)
    output = io.StringIO()
    # Not a terminal: the width must fit the table, whoever reads it.
    console = Console(file=output, width=40 + _COLUMN_WIDTH * len(reports), color_system=None)
    console.print(table)
    for note in notes(reports):
        console.print(note, highlight=False, soft_wrap=True)
    return output.getvalue().rstrip("\n")


def as_json(reports: Sequence[RunReport]) -> dict[str, Any]:
    """Returns one object per run with plain numbers, and its `ratio` to the first run."""
    runs = [
        {
            "run": report.name,
            "device": report.device,
            **report.values,
            "ratio": _ratio(report, reports),
        }
        for report in reports
    ]
    return {"runs": runs, "notes": notes(reports)}


def notes(reports: Sequence[RunReport]) -> list[str]:
    """Explains the numbers to a reader: definition, device unit, dropped iterations."""
    units = sorted(
        {_DEVICE_UNITS.get(report.device or "", "one device of the run") for report in reports}
    )
    named = [
        f"Engines of {report.name} by device: {report.engines}."
        for report in reports
        if report.engines
    ]
    return [
        "TPSPD: trained prompt + response tokens (prompt once per sample) / seconds between "
        f"publishes / all devices, trainers and engines; a device is {' or '.join(units)}.",
        "Tail waste: share of the engines' places that are idle in a generation because nothing is "
        "left to dispatch. Replica imbalance: work of the busiest replica over the mean, minus 1.",
        "Reward and accuracy (of trained responses): means over the last quarter of the "
        "iterations. Synchronous iterations between periodic ones are in no other row than their "
        "own.",
        "Seconds are means per iteration without those of the warm-up; evaluation and checkpoint "
        "are part of the iteration.",
        "Memory: what an iteration needed at most, border included, the mean over iterations; of "
        "the fullest engine and trainer rank. Host memory is resident, a sum over processes that "
        "counts what they share for each.",
        *named,
    ]


def table_rows(reports: Sequence[RunReport]) -> list[tuple[str, list[str]]]:
    """Returns title and cells, one per run, of every figure that has a row.

    An optional figure has none if no run has it, and the ratio has none if there is one run.
    """
    values_of_runs = [{**report.values, "ratio": _ratio(report, reports)} for report in reports]
    rows = []
    for name, (title, layout) in _FIGURES.items():
        if name == "ratio" and len(reports) == 1:
            continue
        cells = [_cell(name, values.get(name), layout) for values in values_of_runs]
        if name in _OPTIONAL and all(cell == "-" for cell in cells):
            continue
        rows.append((title, cells))
    return rows


def _cell(name: str, value: float | None, layout: str) -> str:
    if value is None:
        return "-"
    if name in PEAKS:
        value /= _MIB
    return format(value, layout)


def _ratio(report: RunReport, reports: Sequence[RunReport]) -> float:
    """Returns the run's TPSPD over that of the first run; 0 if either has none."""
    tpspd = report.values["tpspd"]
    first = reports[0].values["tpspd"]
    if not tpspd or not first:
        return 0.0
    return tpspd / first


def read_config(run_dir: Path) -> dict[str, Any]:
    """Returns the run's resolved configuration as plain values; empty if it has none.

    It is not validated, since a report must read runs of older versions. Raises DataError if the
    file is no configuration.
    """
    path = run_dir / "config.yaml"
    if not path.exists():
        return {}
    config, _ = read_yaml(str(path))
    if not all(isinstance(config.get(key, {}), dict) for key in ("run", "telemetry")):
        raise DataError(f"{path}: is no run configuration; give a run directory")
    return config

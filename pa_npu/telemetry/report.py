"""Throughput reports: runs side by side as a table (text or markdown) and as JSON."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from pa_npu.config.yaml_source import read_yaml
from pa_npu.errors import DataError
from pa_npu.telemetry.metrics import read_records
from pa_npu.telemetry.tpspd import WARMUP_ITERATIONS, RunThroughput, number, run_throughput

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
"""Numbers of a record whose mean over the last quarter of the iterations says what the run has come to."""
_MIB = 2**20


@dataclass(frozen=True)
class RunReport:
    """Throughput of one run. `device` is the configured kind (npu, cuda, cpu), None if the run has no config.yaml.

    learned: by names of LEARNED. memory: by names of PEAKS, the mean over iterations of what each needed at most, in bytes.
    engines: on what those run of which the configuration says it (rollout.engine_settings), in words. records: of all iterations.
    """

    name: str
    device: str | None
    result: RunThroughput
    memory: Mapping[str, float]
    learned: Mapping[str, float]
    engines: str
    records: Sequence[Mapping[str, Any]]


def load_report(run_dir: Path | str, warmup_iterations: int = WARMUP_ITERATIONS) -> RunReport:
    """The report of a run directory. DataError names the directory."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise DataError(f"{run_dir}: is not a directory; give run directories, as in runs/grpo_tiny")
    records = read_records(run_dir)
    config = read_config(run_dir)
    try:
        result = run_throughput(records, warmup_iterations)
    except DataError as error:
        raise DataError(f"{run_dir}: {error}") from error
    peaks = memory_peaks(records[warmup_iterations:])
    device = config.get("run", {}).get("device")
    device = device if isinstance(device, str) else None
    name = run_dir.name or str(run_dir)
    return RunReport(name, device, result, peaks, learned(records), named_devices(config), records)


def named_devices(config: Mapping[str, Any]) -> str:
    """Names single engines' devices in words; empty if the configuration names none. config: plain values, of any version."""
    rollout = config.get("rollout")
    entries = rollout.get("engine_settings") if isinstance(rollout, dict) else None
    said = [
        f"{entry['device']} (engine{'s' if len(entry['engines']) > 1 else ''} {', '.join(map(str, entry['engines']))})"
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict) and entry.get("device") and isinstance(entry.get("engines"), list)
    ]
    return ", ".join(said)


def learned(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By names of LEARNED, the mean over the last quarter of the iterations."""
    last = records[-max(1, len(records) // 4) :]
    found = {name: [record[name] for record in last if isinstance(record.get(name), (int, float))] for name in LEARNED}
    return {name: fmean(values) for name, values in found.items() if values}


def memory_peaks(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By names of PEAKS, the mean over the iterations' records of what was needed at most, in bytes."""
    found = {name: [number(record, name) for record in records if record.get(name) is not None] for name in PEAKS}
    return {name: fmean(values) for name, values in found.items() if values}


def each_run(reports: Sequence[RunReport]) -> list[RunReport]:
    """The reports under the names that they have in a table: directory names, numbered where two runs share one."""
    names = [report.name for report in reports]
    return [
        replace(report, name=f"{report.name} #{number}") if names.count(report.name) > 1 else report
        for number, report in enumerate(reports, start=1)
    ]


def render_text(reports: Sequence[RunReport]) -> str:
    """A table, followed by what the numbers mean."""
    return text_table("Throughput", _names(reports), table_rows(reports), notes(reports), column_width=24)


def render_markdown(reports: Sequence[RunReport]) -> str:
    """The same as a markdown table."""
    return markdown_table(_names(reports), table_rows(reports), notes(reports))


def as_json(reports: Sequence[RunReport]) -> dict[str, Any]:
    """One object per run with plain numbers, `ratio` to the first run."""
    runs = []
    for report in reports:
        values = asdict(report.result)
        rates = values.pop("throughput")
        about = {"run": report.name, "device": report.device, **rates, **values, **report.learned, **report.memory}
        runs.append({**about, "ratio": _ratio(report, reports)})
    return {"runs": runs, "notes": notes(reports)}


def notes(reports: Sequence[RunReport]) -> list[str]:
    """Explains the numbers to a reader: definition, device unit, dropped iterations."""
    units = sorted({_DEVICE_UNITS.get(report.device or "", "one device of the run") for report in reports})
    dropped = [f"{report.name} {report.result.dropped_iterations}" for report in reports]
    named = [f"Engines of {report.name} by device: {report.engines}." for report in reports if report.engines]
    return [
        f"TPSPD: trained prompt + response tokens (prompt once per sample) / seconds between publishes / all devices, "
        f"trainers and engines; a device is {' or '.join(units)}.",
        "Tail waste: share of the engines' places that are idle in a generation because nothing is left to dispatch. Replica "
        "imbalance: work of the busiest replica over the mean, minus 1.",
        "Reward and accuracy (of trained responses): means over the last quarter of the iterations. Synchronous iterations between "
        "periodic ones are in no other row than their own.",
        f"Warm-up iterations dropped: {', '.join(dropped)}. Seconds are means per iteration; evaluation and "
        f"checkpoint are part of the iteration.",
        "Memory: what an iteration needed at most, border included, the mean over iterations; of the fullest engine and trainer "
        "rank. Host memory is resident, a sum over processes that counts what they share for each.",
        *named,
    ]


def table_rows(reports: Sequence[RunReport]) -> list[tuple[str, list[str]]]:
    """(title, a cell per run) of every figure."""
    found = [figures(report, _ratio(report, reports)) for report in reports]
    rows = [(figure.title, [one[name].cell for one in found]) for name, figure in found[0].items()]
    return [row for row in rows if row[0] not in _OPTIONAL or any(cell != "-" for cell in row[1])]


def _ratio(report: RunReport, reports: Sequence[RunReport]) -> float:
    """The run's TPSPD over that of the first."""
    first = reports[0].result.throughput.tpspd
    return report.result.throughput.tpspd / first if first else 0.0


@dataclass(frozen=True)
class Figure:
    """A number of a report. layout: as of format()."""

    title: str
    value: float | None
    layout: str

    @property
    def cell(self) -> str:
        return "-" if self.value is None else format(self.value, self.layout)


def figures(report: RunReport, ratio: float) -> dict[str, Figure]:
    """All of a run by name, in the order of the table. ratio: to the first run."""
    result, rates = report.result, report.result.throughput
    found = {
        "tpspd": Figure("TPSPD", rates.tpspd, ",.1f"),
        "tpspd_response": Figure("  response tokens only", rates.tpspd_response, ",.1f"),
        "tpspd_computed": Figure("  tokens computed", rates.tpspd_computed, ",.1f"),
        "ratio": Figure("ratio to the first run", ratio, ".3f"),
        "iteration_s": Figure("iteration s", result.iteration_s, ".3f"),
        "synchronous_s": Figure("  synchronous iteration s", result.synchronous_s, ".3f"),
        "generate_s": Figure("  generation Tg s", result.generate_s, ".3f"),
        "train_s": Figure("  training Tt s", result.train_s, ".3f"),
        "publish_s": Figure("  publish s", result.publish_s, ".3f"),
        "evaluation_s": Figure("  evaluation s", result.evaluation_s, ".3f"),
        "checkpoint_s": Figure("  checkpoint s", result.checkpoint_s, ".3f"),
        "trainer_idle": Figure("trainer idle", result.trainer_idle, ".1%"),
        "engine_idle": Figure("engine idle", result.engine_idle, ".1%"),
        "tail_waste": Figure("tail waste", result.tail_waste, ".1%"),
        "replica_imbalance": Figure("replica imbalance", result.replica_imbalance, ".1%"),
        "devices": Figure("devices", result.devices, ",.0f"),
        "iterations": Figure("iterations", result.iterations, ",.0f"),
        "dropped_iterations": Figure("warm-up iterations dropped", result.dropped_iterations, ",.0f"),
    }
    found |= {
        name: Figure(f"{title}, last quarter", report.learned.get(name), ".3f") for name, title in LEARNED.items()
    }
    memory = {name: Figure(_memory_title(name), _mib(report.memory.get(name)), ",.0f") for name in PEAKS}
    return found | memory


def _memory_title(name: str) -> str:
    return f"memory of an iteration, MiB: {PEAKS[name]}"


_OPTIONAL = frozenset({*map(_memory_title, PEAKS), "  synchronous iteration s"})


def _mib(value: float | None) -> float | None:
    return None if value is None else value / _MIB


def _names(reports: Sequence[RunReport]) -> list[str]:
    return [report.name for report in reports]


def read_config(run_dir: Path) -> dict[str, Any]:
    """The run's resolved configuration as plain values, not validated: a report must read runs of older versions."""
    path = run_dir / "config.yaml"
    if not path.exists():
        return {}
    config, _ = read_yaml(str(path))
    if not all(isinstance(config.get(key, {}), dict) for key in ("run", "telemetry")):
        raise DataError(f"{path}: is no run configuration; give a run directory")
    return config


def text_table(
    title: str,
    labels: Sequence[str],
    rows: Sequence[tuple[str, Sequence[str]]],
    notes: Sequence[str],
    column_width: int,
) -> str:
    """Lays out a table in columns of equal width. rows: a row's title and its cells."""
    from rich.box import ASCII2  # logs and terminals of any locale can show it
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=ASCII2)
    table.add_column("")
    for label in labels:
        table.add_column(label, justify="right", overflow="fold")
    for name, cells in rows:
        table.add_row(name, *cells)
    output = io.StringIO()
    # Not a terminal: the width must fit the table, whoever reads it.
    console = Console(file=output, width=40 + column_width * len(labels), color_system=None)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)
    return output.getvalue().rstrip("\n")


def markdown_table(labels: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], notes: Sequence[str]) -> str:
    """As text_table."""
    lines = ["| |" + "".join(f" {label} |" for label in labels), "|---|" + "---:|" * len(labels)]
    lines += [f"| {name} |" + "".join(f" {cell} |" for cell in cells) for name, cells in rows]
    return "\n".join([*lines, "", *notes])

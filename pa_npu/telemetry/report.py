"""Throughput reports: runs side by side as a table (text or markdown) and as JSON.

A column is one run, or a group of runs that differ only in their seed and in where they ran: then a cell is the median over them,
with the lowest and the highest value. A group is named by the keys in which it differs from the others.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

from pa_npu.config.yaml_source import read_yaml
from pa_npu.errors import DataError
from pa_npu.telemetry.metrics import read_records
from pa_npu.telemetry.secrets import Secrets
from pa_npu.telemetry.tpspd import RunThroughput, number, run_throughput

T = TypeVar("T")

_DEVICE_UNITS = {"npu": "one NPU die", "cuda": "one GPU", "cpu": "one CPU core"}
_DEFAULT_WARMUP = 1
# Bytes of a record, and what they are in words. Whatever a run does not have is left out.
PEAKS = {
    "memory_trainer_host_bytes": "trainer, host",
    "memory_trainer_device_bytes": "trainer, device",
    "memory_engine_host_bytes": "engine, host",
    "memory_engine_device_bytes": "engine, device",
    "memory_coordinator_bytes": "coordinator",
    "memory_workers_bytes": "its workers",
    "memory_launcher_bytes": "launcher and rollout buffer",
    "memory_keepers_bytes": "keepers",
}
LEARNED = {"reward_mean": "reward", "accuracy": "accuracy"}
"""Numbers of a record whose mean over the last quarter of the iterations says what the run has come to."""
_MIB = 2**20
_PLACE_OF_A_RUN = ("run.dir", "run.seed", "run.restarts", "checkpoint.", "placement.", "telemetry.")


@dataclass(frozen=True)
class RunReport:
    """Throughput of one run. `device` is the configured kind (npu, cuda, cpu), None if the run has no config.yaml.

    learned: by names of LEARNED. memory: by names of PEAKS, the mean over iterations of what each needed at most, in bytes.
    engines: on what those run of which the configuration says it (rollout.engine_settings), in words. config: flat. records: of all
    iterations.
    """

    directory: Path
    name: str
    device: str | None
    result: RunThroughput
    memory: Mapping[str, float]
    learned: Mapping[str, float]
    engines: str
    config: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]


def load_report(run_dir: Path | str, warmup_iterations: int | None = None) -> RunReport:
    """The report of a run directory; warm-up from its config.yaml unless given. DataError names the directory."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise DataError(f"{run_dir}: is not a directory; give run directories, as in runs/grpo_tiny")
    records = read_records(run_dir)
    config = read_config(run_dir)
    if warmup_iterations is None:
        warmup_iterations = config.get("telemetry", {}).get("warmup_iterations", _DEFAULT_WARMUP)
    if not isinstance(warmup_iterations, int) or warmup_iterations < 0:
        raise DataError(f"{run_dir}: telemetry.warmup_iterations is {warmup_iterations!r}, expected a count")
    try:
        result = run_throughput(records, warmup_iterations)
    except DataError as error:
        raise DataError(f"{run_dir}: {error}") from error
    peaks = memory_peaks(records[warmup_iterations:])
    device = config.get("run", {}).get("device")
    device = device if isinstance(device, str) else None
    name, plain = run_dir.name or str(run_dir), Secrets(config).config
    return RunReport(run_dir, name, device, result, peaks, learned(records), named_devices(config), plain, records)


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


@dataclass(frozen=True)
class Column:
    """One run, or the runs of a group."""

    label: str
    reports: Sequence[RunReport]

    @property
    def tpspd(self) -> float:
        """The median over its runs."""
        return median(report.result.throughput.tpspd for report in self.reports)


def each_run(reports: Sequence[RunReport]) -> list[Column]:
    """A column per run; directory names, numbered where two runs share one."""
    names = [report.name for report in reports]
    labels = [f"{name} #{number}" if names.count(name) > 1 else name for number, name in enumerate(names, start=1)]
    return [Column(label, [report]) for label, report in zip(labels, reports, strict=True)]


def grouped(reports: Sequence[RunReport]) -> list[Column]:
    """A column per group, in order of their first run."""
    found = alike(reports, lambda report: report.config, lambda report: report.name)
    return [Column(label, members) for label, members in found]


def alike(
    runs: Sequence[T], config: Callable[[T], Mapping[str, Any]], name: Callable[[T], str]
) -> list[tuple[str, list[T]]]:
    """As group_runs, of anything that has a configuration (flat) and a name."""
    members: dict[tuple[tuple[str, str], ...], list[T]] = {}
    for run in runs:
        shape = tuple(sorted((key, str(value)) for key, value in config(run).items() if not _of_place(key)))
        members.setdefault(shape, []).append(run)
    if len(members) == 1:
        return [(name(runs[0]), list(runs))]
    shapes = [dict(shape) for shape in members]
    # a key that only some of them have tells versions of this package apart, not what somebody chose
    keys = sorted(set.intersection(*(set(shape) for shape in shapes)))
    telling = [key for key in keys if len({shape[key] for shape in shapes}) > 1]
    labels = [", ".join(f"{key.rpartition('.')[2]}={shape[key]}" for key in telling[:3]) for shape in shapes]
    return [
        (label if label and labels.count(label) == 1 else name(group[0]), group)
        for label, group in zip(labels, members.values(), strict=True)
    ]


def _of_place(key: str) -> bool:
    return any(key == part or (part.endswith(".") and key.startswith(part)) for part in _PLACE_OF_A_RUN)


def render_text(columns: Sequence[Column]) -> str:
    """A table, followed by what the numbers mean."""
    width = 24 if _are_runs(columns) else 36
    return text_table("Throughput", _labels(columns), table_rows(columns), notes(columns), column_width=width)


def render_markdown(columns: Sequence[Column]) -> str:
    """The same as a markdown table."""
    return markdown_table(_labels(columns), table_rows(columns), notes(columns))


def as_json(columns: Sequence[Column]) -> dict[str, Any]:
    """One object per run with plain numbers, `ratio` to the first run; of groups the median, lowest and highest of each figure."""
    if not _are_runs(columns):
        groups = [
            {
                "group": column.label,
                "runs": [report.name for report in column.reports],
                **{
                    name: {"median": b.median, "low": b.low, "high": b.high}
                    for name, b in bands(column, columns).items()
                },
            }
            for column in columns
        ]
        return {"groups": groups, "notes": notes(columns)}
    runs = []
    for column in columns:
        (report,) = column.reports
        values = asdict(report.result)
        rates = values.pop("throughput")
        ratio = column.tpspd / columns[0].tpspd if columns[0].tpspd else 0.0
        about = {"run": column.label, "device": report.device, **rates, **values, **report.learned, **report.memory}
        runs.append({**about, "ratio": ratio})
    return {"runs": runs, "notes": notes(columns)}


def notes(columns: Sequence[Column]) -> list[str]:
    """Explains the numbers to a reader: definition, device unit, dropped iterations."""
    if _are_runs(columns):
        said, labelled = [], [(column.label, column.reports[0]) for column in columns]
    else:
        members = "; ".join(f"{one.label}: {', '.join(report.name for report in one.reports)}" for one in columns)
        said = [f"Runs by group: {members}. Medians, with the lowest and the highest in brackets."]
        labelled = [(report.name, report) for column in columns for report in column.reports]
    units = sorted({_DEVICE_UNITS.get(report.device or "", "one device of the run") for _, report in labelled})
    dropped = [f"{label} {report.result.dropped_iterations}" for label, report in labelled]
    named = [f"Engines of {label} by device: {report.engines}." for label, report in labelled if report.engines]
    return [
        *said,
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


def table_rows(columns: Sequence[Column]) -> list[tuple[str, list[str]]]:
    """(title, a cell per column) of every figure."""
    found = [bands(column, columns) for column in columns]
    rows = [] if _are_runs(columns) else [("runs", [str(len(column.reports)) for column in columns])]
    rows += [(band.title, [column[name].cell for column in found]) for name, band in found[0].items()]
    return [row for row in rows if row[0] not in _OPTIONAL or any(cell != "-" for cell in row[1])]


@dataclass(frozen=True)
class Band:
    """A figure over a column's runs; None where none of them has it."""

    title: str
    layout: str
    median: float | None
    low: float | None
    high: float | None

    @property
    def cell(self) -> str:
        middle, low, high = ("-" if n is None else format(n, self.layout) for n in (self.median, self.low, self.high))
        return middle if self.low == self.high else f"{middle} ({low} to {high})"


def bands(column: Column, columns: Sequence[Column]) -> dict[str, Band]:
    """By name, in the order of the table; the ratio is to the first of `columns`."""
    first = "the first run" if _are_runs(columns) else "the first group"
    of_runs = [figures(report, columns[0].tpspd, first) for report in column.reports]
    return {name: _band([run[name] for run in of_runs]) for name in of_runs[0]}


def _band(of_runs: Sequence[Figure]) -> Band:
    values = [figure.value for figure in of_runs if figure.value is not None]
    if not values:
        return Band(of_runs[0].title, of_runs[0].layout, None, None, None)
    return Band(of_runs[0].title, of_runs[0].layout, median(values), min(values), max(values))


@dataclass(frozen=True)
class Figure:
    """A number of a report. layout: as of format()."""

    title: str
    value: float | None
    layout: str


def figures(report: RunReport, first_tpspd: float, first: str) -> dict[str, Figure]:
    """All of a run by name, in the order of the table. first_tpspd: what the ratio is to, in words `first`."""
    result, rates = report.result, report.result.throughput
    ratio = rates.tpspd / first_tpspd if first_tpspd else 0.0
    found = {
        "tpspd": Figure("TPSPD", rates.tpspd, ",.1f"),
        "tpspd_response": Figure("  response tokens only", rates.tpspd_response, ",.1f"),
        "tpspd_computed": Figure("  tokens computed", rates.tpspd_computed, ",.1f"),
        "ratio": Figure(f"ratio to {first}", ratio, ".3f"),
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


def _labels(columns: Sequence[Column]) -> list[str]:
    return [column.label for column in columns]


def _are_runs(columns: Sequence[Column]) -> bool:
    return all(len(column.reports) == 1 for column in columns)


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

"""A folder of runs: a row per run for the table, and the runs that the page has opened."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pa_npu.config.plain_file import open_plain
from pa_npu.errors import UserError
from pa_npu.telemetry.records import EVALUATIONS, METRICS, JsonLines, parse_object
from pa_npu.telemetry.secrets import Secrets
from pa_npu.telemetry.timeline import DIRECTORY as TIMELINE
from pa_npu.viewer.advice import recent, steady
from pa_npu.viewer.facts import facts
from pa_npu.viewer.run import RunDirectory, by_index, evaluation, is_run_directory, read_yaml
from pa_npu.viewer.state import run_state

MAX_RUNS = 500
MAX_OPEN = 12
"""Runs that are kept open; each holds the records that it has read."""
_TAIL_BYTES = 256 << 10
_STATE = ("word", "cause", "iterations", "total", "started", "ended", "last_write", "left")
_METRICS = ("reward_mean", "accuracy", "tpspd", "iteration_s", "response_length_mean")


class Shelf:
    """The newest MAX_RUNS runs of a folder. Raises UserError where the folder has none."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._lock = threading.Lock()
        self._open: dict[str, RunDirectory] = {}
        self._rows: dict[str, tuple[Any, dict[str, Any]]] = {}
        if not self.names()[0]:
            raise UserError(
                f"{folder}: holds no run directory; give one, or a folder of them, as in runs"
            )

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def names(self) -> tuple[list[str], int]:
        """Returns the names of the runs, the run that was written to last first, and how many
        further runs there are.
        """
        dated = []
        for path in _children(self.folder):
            # a directory that may not be read is skipped, and hides no other
            with contextlib.suppress(OSError):
                if path.is_dir() and is_run_directory(path):
                    dated.append((_newest_s(path), path.name))
        dated.sort(key=lambda item: (-item[0], item[1]))
        return [name for _, name in dated[:MAX_RUNS]], max(0, len(dated) - MAX_RUNS)

    def open(self, name: str) -> RunDirectory | None:
        """Returns the run `name`; None where the folder has no such run."""
        with self._lock:
            run = self._open.pop(name, None)
            if run is None:
                if name in ("", ".", "..") or "/" in name or name not in self.names()[0]:
                    return None
                run = RunDirectory(self.folder / name)
            self._open[name] = run  # behind all others: the run used longest ago goes first
            while len(self._open) > MAX_OPEN:
                del self._open[next(iter(self._open))]
            return run

    def table(self) -> dict[str, Any]:
        """Returns everything that the table of runs shows."""
        names, left_out = self.names()
        rows = [self._row(name) for name in names]
        self._rows = {name: self._rows[name] for name in names}
        return {"folder": self.name, "runs": rows, "left_out": left_out}

    def _row(self, name: str) -> dict[str, Any]:
        """Returns the row of a run, read again if a file has changed or the run may be at work."""
        directory = self.folder / name
        stamp = tuple(_stamp(directory / file) for file in ("config.yaml", METRICS, EVALUATIONS))
        stamp += (_stamp(directory / TIMELINE / "launcher.jsonl"),)
        if name in self._rows:
            stamp_before, row = self._rows[name]
            if stamp_before == stamp and row["state"]["word"] != "running":
                return row
        row = run_row(directory)
        self._rows[name] = (stamp, row)
        return row


def run_row(directory: Path) -> dict[str, Any]:
    """Returns the table's row of a run. Reads only the ends of its files."""
    secrets = Secrets(read_yaml(directory / "config.yaml"))
    records = by_index(_last_objects(directory / METRICS), "iteration")
    state = run_state(
        launcher=JsonLines(directory / TIMELINE / "launcher.jsonl").read(),
        records=records,
        total=secrets.config.get("schedule.iterations"),
        newest_s=_newest_s(directory),
        secrets=secrets,
    )
    steady_records = steady(records)
    accuracies = []
    for record in by_index(_last_objects(directory / EVALUATIONS), "version"):
        accuracy = _accuracy(evaluation(record))
        if accuracy is not None:
            accuracies.append(accuracy)
    return {
        "name": directory.name,
        "state": {key: state[key] for key in _STATE},
        "facts": facts(secrets.config),
        "numbers": {name: recent(steady_records, name) for name in _METRICS},
        "evaluation": accuracies[-1] if accuracies else None,
        "best": max(accuracies) if accuracies else None,
    }


def _accuracy(record: Mapping[str, Any]) -> float | None:
    """Returns the accuracy of an evaluation, or the mean of its sets' first metrics."""
    if record["accuracy"] is not None:
        return float(record["accuracy"])
    values = []
    for summary in (record["sets"] or {}).values():
        estimates = list(summary["metrics"].values())
        if estimates:
            values.append(estimates[0]["value"])
    return statistics.fmean(values) if values else None


def _last_objects(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of the last lines of a file."""
    try:
        with open_plain(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines: Sequence[bytes] = file.read(_TAIL_BYTES).split(b"\n")
    except OSError:
        return []
    if size > _TAIL_BYTES:
        lines = lines[1:]
    records = [parse_object(line) for line in lines]
    return [record for record in records if record is not None]


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be read ({error.strerror}); give a run directory, or a folder of "
            "them"
        ) from None


def _newest_s(directory: Path) -> float:
    """Returns when a run's records, logs or launcher's timeline were written to last."""
    files = [directory / METRICS, directory / TIMELINE / "launcher.jsonl"]
    files += (directory / "logs").glob("*.log")
    return max(_stamp(file)[0] for file in files) / 1e9


def _stamp(path: Path) -> tuple[int, int]:
    """Returns (time of the last write in ns, size), which change when the file does."""
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size

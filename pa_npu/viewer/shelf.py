"""A folder of runs: one row per run for the table, from the ends of its files, and the runs that are opened."""

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
"""Runs that are kept open: each holds the records that it has read."""
_TAIL_BYTES = 256 << 10
_STATE = ("word", "cause", "iterations", "total", "started", "ended", "last_write", "left")
_LEARNED = ("reward_mean", "accuracy", "tpspd", "iteration_s", "response_length_mean")


class Shelf:
    """The runs of a folder, the newest MAX_RUNS of them. Raises UserError where it holds none."""

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
        """The names of the runs, those that were written to last first, and how many further ones
        there are.
        """
        dated = []
        for path in _children(self.folder):
            # one that may not be read is none, and hides no other
            with contextlib.suppress(OSError):
                if path.is_dir() and is_run_directory(path):
                    dated.append((_newest_s(path), path.name))
        dated.sort(key=lambda item: (-item[0], item[1]))
        return [name for _, name in dated[:MAX_RUNS]], max(0, len(dated) - MAX_RUNS)

    def open(self, name: str) -> RunDirectory | None:
        """One of the folder's runs; None where it has no such run."""
        with self._lock:
            run = self._open.pop(name, None)
            if run is None:
                if name in ("", ".", "..") or "/" in name or name not in self.names()[0]:
                    return None
                run = RunDirectory(self.folder / name)
            self._open[name] = run  # the one that was used last is the last to go
            while len(self._open) > MAX_OPEN:
                del self._open[next(iter(self._open))]
            return run

    def table(self) -> dict[str, Any]:
        """Everything that the table of runs shows."""
        names, left_out = self.names()
        rows = [self._row(name) for name in names]
        self._rows = {name: self._rows[name] for name in names}
        return {"folder": self.name, "runs": rows, "left_out": left_out}

    def _row(self, name: str) -> dict[str, Any]:
        """Made again when a file has changed; a run that may be at work is looked at each time."""
        directory = self.folder / name
        stamp = tuple(_stamp(directory / file) for file in ("config.yaml", METRICS, EVALUATIONS))
        stamp += (_stamp(directory / TIMELINE / "launcher.jsonl"),)
        known = self._rows.get(name)
        if known is not None and known[0] == stamp and known[1]["state"]["word"] != "running":
            return known[1]
        row = run_row(directory)
        self._rows[name] = (stamp, row)
        return row


def run_row(directory: Path) -> dict[str, Any]:
    """What the table says of a run. Reads the ends of its files only."""
    secrets = Secrets(read_yaml(directory / "config.yaml"))
    records = by_index(_last_objects(directory / METRICS), "iteration")
    evaluations = by_index(_last_objects(directory / EVALUATIONS), "version")
    launcher = JsonLines(directory / TIMELINE / "launcher.jsonl").read()
    total = secrets.config.get("schedule.iterations")
    state = run_state(launcher, records, total, _newest_s(directory), secrets)
    kept = steady(records)
    accuracies = [
        value for record in evaluations if (value := _accuracy(evaluation(record))) is not None
    ]
    return {
        "name": directory.name,
        "state": {key: state[key] for key in _STATE},
        "facts": facts(secrets.config),
        "numbers": {name: recent(kept, name) for name in _LEARNED},
        "evaluation": accuracies[-1] if accuracies else None,
        "best": max(accuracies) if accuracies else None,
    }


def _accuracy(record: Mapping[str, Any]) -> float | None:
    """The accuracy of an evaluation, or the mean of its sets' first numbers."""
    if record["accuracy"] is not None:
        return float(record["accuracy"])
    sets = (record["sets"] or {}).values()
    values = [
        next(iter(summary["metrics"].values()))["value"] for summary in sets if summary["metrics"]
    ]
    return statistics.fmean(values) if values else None


def _last_objects(path: Path) -> list[dict[str, Any]]:
    """The objects of the last lines of a file."""
    try:
        with open_plain(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines: Sequence[bytes] = file.read(_TAIL_BYTES).split(b"\n")
    except OSError:
        return []
    if size > _TAIL_BYTES:
        lines = lines[1:]
    return [record for line in lines if (record := parse_object(line)) is not None]


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be read ({error.strerror}); give a run directory, or a folder of "
            "them"
        ) from None


def _newest_s(directory: Path) -> float:
    """When a run was written to last: its records, its logs and its launcher's timeline."""
    stamps = [_stamp(directory / METRICS), _stamp(directory / TIMELINE / "launcher.jsonl")]
    with_logs = [*stamps, *(_stamp(path) for path in (directory / "logs").glob("*.log"))]
    return max(when for when, _ in with_logs) / 1e9


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size

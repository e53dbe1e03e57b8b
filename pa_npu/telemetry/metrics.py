"""Iteration records: RUN/metrics.jsonl (one object per iteration) and RUN/evaluations.jsonl."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pa_npu.config.plain_file import read_plain, reason
from pa_npu.errors import DataError
from pa_npu.telemetry.record_file import RecordFile, json_line, lost_records, note_lost

METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
_MAX_INDEX = 2**31
_LARGEST_BYTES = 1 << 30  # of a file of records; one has some 2 KiB


class MetricsWriter:
    """Appends records; owner closes it (context manager).

    first_iteration: the iteration a resumed run continues with. Records of it and later ones, which the killed run
    wrote after its last checkpoint, are removed, so that the file reads like that of a run that was never killed (I6).
    """

    def __init__(self, run_dir: Path | str, first_iteration: int = 0) -> None:
        self.run_dir = Path(run_dir)
        drop_records(self.run_dir / METRICS, "iteration", first_iteration)
        # The evaluation of version v comes before iteration v; the checkpoint that is resumed holds version v.
        drop_records(self.run_dir / EVALUATIONS, "version", first_iteration)
        self._metrics = RecordFile(self.run_dir / METRICS)
        self._evaluations = RecordFile(self.run_dir / EVALUATIONS)

    def write(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """One iteration, returned as written. Numbers that are not finite become null and are named under `non_finite`.

        What cannot be written is lost, said once in the log, and counted under `records_lost` of what can be written again.
        """
        lost = lost_records()
        clean = _json_ready({**record, "records_lost": lost} if lost else record)
        self._metrics.write(json_line(clean))
        return clean

    def write_evaluation(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """One evaluation, returned as written: {version, accuracy, questions, seconds, time, sets}; version v is before
        iteration v."""
        clean = _json_ready(record)
        self._evaluations.write(json_line(clean))
        return clean

    def close(self) -> None:
        self._metrics.close()
        self._evaluations.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_records(run_dir: Path | str) -> list[dict[str, Any]]:
    """The iteration records of a run, in order. Raises DataError with file:line if there are none or one is broken."""
    path = Path(run_dir) / METRICS
    if not path.exists():
        raise DataError(f"{run_dir}: has no {METRICS}, so it is no run directory, or its first iteration has not ended")
    records = _read_lines(path, "iteration")
    if not records:
        raise DataError(f"{path}: is empty, the run ended before its first iteration; see {Path(run_dir) / 'logs'}")
    return records


def read_evaluations(run_dir: Path | str) -> list[dict[str, Any]]:
    """The evaluations of a run by version; empty where it made none."""
    path = Path(run_dir) / EVALUATIONS
    return _read_lines(path, "version") if path.exists() else []


def _read_lines(path: Path, key: str) -> list[dict[str, Any]]:
    try:
        text = read_plain(path, _LARGEST_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({reason(error)}); give the directory of a run") from None
    records = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: is not JSON ({error}); remove the line") from error
        if not _has_index(record, key):
            raise DataError(f"{path}:{number}: is no object with an integer {key!r} of at least 0; remove the line")
        records.append(record)
    return records


def drop_records(path: Path, key: str, first: int) -> None:
    """Keep the records whose `key` is below `first`, as a run that is resumed there needs it; lines that are none go too.

    Such as a last one that a kill cut short.
    """
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if _has_index(record, key) and record[key] < first:
            kept.append(line + "\n")
    shortened = path.with_name(f"{path.name}.tmp")
    try:
        shortened.write_text("".join(kept), encoding="utf-8")
        shortened.replace(path)
    except OSError as error:
        note_lost(shortened, error)
        with contextlib.suppress(OSError):
            shortened.unlink(missing_ok=True)
        _cut_after(path, kept)


def _cut_after(path: Path, kept: Sequence[str]) -> None:
    """Cuts the file behind the kept records that stand first in it, if there is no room for a second file."""
    end = 0
    with contextlib.suppress(OSError):
        with path.open("rb") as file:
            for line, wanted in zip(file, kept, strict=False):
                if line.decode("utf-8", "replace") != wanted:
                    break
                end += len(line)
        os.truncate(path, end)


def _has_index(record: Any, key: str) -> bool:
    """Whether this is a record with the number by which its file is ordered."""
    value = record.get(key) if isinstance(record, dict) else None
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_INDEX


def _json_ready(record: Mapping[str, Any]) -> dict[str, Any]:
    non_finite: list[str] = []
    clean = {str(key): _plain(value, str(key), non_finite) for key, value in record.items()}
    if non_finite:
        clean["non_finite"] = non_finite
    return clean


def _plain(value: Any, path: str, non_finite: list[str]) -> Any:
    """Plain JSON types: numpy and torch scalars unpacked, numbers that JSON cannot hold replaced and named."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{path}.{key}", non_finite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{path}.{number}", non_finite) for number, item in enumerate(value)]
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        non_finite.append(path)
        return None
    return value

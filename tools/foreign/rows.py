"""How many rows the training files have, from which epochs become iterations; only of files that are here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pa_npu.data.rows import read_rows
from pa_npu.errors import UserError


def count_rows(datasets: Any) -> list[int] | None:
    """Returns the rows of each of `data.train`'s datasets; None where one of them is not here or
    cannot be read.
    """
    entries = [datasets] if isinstance(datasets, str) else datasets
    counts: list[int] = []
    for entry in entries or ():
        path, max_rows = (
            (entry, None) if isinstance(entry, str) else (entry["path"], entry.get("max_rows"))
        )
        if (rows := _rows_of(Path(path).expanduser())) is None:
            return None
        counts.append(rows if max_rows is None else min(rows, max_rows))
    return counts or None


def has_column(datasets: Any, column: str) -> bool | None:
    """Returns whether the first row of the first dataset has the column; None where that is not
    here or cannot be read.
    """
    entry = datasets if isinstance(datasets, str) else next(iter(datasets or ()), None)
    path = entry if isinstance(entry, str) or entry is None else entry["path"]
    if path is None or not Path(path).exists():
        return None
    try:
        _, row = next(iter(read_rows(str(path), "data.train")))
    except (UserError, StopIteration):
        return None
    return isinstance(row, Mapping) and column in row


def _rows_of(path: Path) -> int | None:
    if not path.exists():
        return None
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            return int(pyarrow.parquet.read_metadata(path).num_rows)
        except (OSError, ValueError):
            return None
    try:
        return sum(1 for _ in read_rows(str(path), "data.train"))
    except UserError:
        return None

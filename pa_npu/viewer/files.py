"""A run directory's files as they grow: JSON lines read once each, ends of logs, the configuration.

Nothing here fails for what a file holds: a line that is no record, such as the half one at the end of a file that is being
written, is left out.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

LONGEST_LINE_BYTES = 64 << 20


class JsonLines:
    """The objects of a file of JSON lines; each look reads only what came since the last one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""
        self._records: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """All so far. A file that is shorter than it was, as after a resume, is read again from its beginning."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                if size < self._offset:
                    self._offset, self._rest, self._records = 0, b"", []
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return self._records
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE_BYTES:
            self._rest = b""
        self._records += list(_objects(lines))
        return self._records


def _objects(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            record = json.loads(line.decode("utf-8", "replace"), parse_constant=lambda _: None)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def number(record: Mapping[str, Any], key: str) -> float | None:
    """A number of a record, None where it has none."""
    value = record.get(key)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def tail(path: Path, most_bytes: int) -> str:
    """The last lines of a text file, whole ones. A link is not followed: whoever shows a run shows nothing else of the machine."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return ""
            size = file.seek(0, 2)
            file.seek(max(0, size - most_bytes))
            data = file.read(most_bytes)
    except OSError:
        return ""
    if size > most_bytes:
        data = data.partition(b"\n")[2]
    return data.decode("utf-8", "replace")


def read_yaml(path: Path) -> dict[str, Any]:
    """A configuration as it was written; empty where it cannot be read."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, yaml.YAMLError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}

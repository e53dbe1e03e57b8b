"""A run directory's files as they grow: JSON lines read once each, ends of logs, the configuration.

Nothing here fails for what a file holds: a line that is no record, such as the half one at the end of a file that is being
written, is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pa_npu.config import yaml_source
from pa_npu.config.plain_file import open_plain
from pa_npu.errors import ConfigError

LONGEST_LINE_BYTES = 64 << 20
_MOST_AT_ONCE_BYTES = 1 << 30


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
            with open_plain(self._path) as file:
                size = file.seek(0, 2)
                if size < self._offset:
                    self._offset, self._rest, self._records = 0, b"", []
                file.seek(self._offset)
                data = file.read(_MOST_AT_ONCE_BYTES)
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
            record = json.loads(
                line.decode("utf-8", "replace"), parse_constant=lambda _: None, parse_float=_finite, parse_int=_count
            )
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _count(text: str) -> int | None:
    """None beyond 64 bits, which nothing of a run reaches and arithmetic with fractions fails on."""
    return int(text) if len(text) < 19 else None


def number(record: Mapping[str, Any], key: str) -> float | None:
    """A number of a record, None where it has none."""
    value = record.get(key)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def tail(path: Path, most_bytes: int) -> str:
    """The last lines of a text file, whole ones. A link is not followed: whoever shows a run shows nothing else of the machine."""
    try:
        with open_plain(path, follow_links=False) as file:
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
        return yaml_source.read_yaml(str(path))[0]
    except ConfigError:
        return {}

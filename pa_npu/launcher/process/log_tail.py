"""Reading the log files of running processes: the last lines, and new lines that carry a mark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pa_npu.errors import printable

_TAIL_BYTES = 64 * 1024


def last_lines(log: Path, count: int, written: Sequence[str] = ()) -> list[str]:
    """The last `count` lines that are not blank; empty when there is no log.

    written: lines that the process has written too, and that are the last ones where the log does not have them.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        text = ""
    lines = [printable(line.rstrip()) for line in text.split("\n") if line.strip()]
    missing = [line for line in written if line not in lines]
    return [*lines, *missing][-count:]


class MarkedLines:
    """Follows a growing log and yields its complete new lines that begin with `mark`, without the mark."""

    def __init__(self, log: Path, mark: str) -> None:
        self._log = log
        self._mark = mark.encode()
        self._position = log.stat().st_size if log.exists() else 0
        self._partial = b""

    def new(self) -> list[str]:
        try:
            with self._log.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return []
        self._position += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        marked = [line[len(self._mark) :] for line in lines if line.startswith(self._mark)]
        return [printable(line.decode("utf-8", "replace").rstrip()) for line in marked]

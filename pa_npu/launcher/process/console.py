"""Prints a run's lines: the launcher's own and the relayed progress lines; logs/launcher.log keeps both."""

from __future__ import annotations

import re
import shutil
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TextIO

from pa_npu.errors import HIGHLIGHT, plain, printable
from pa_npu.telemetry.progress import fitted
from pa_npu.telemetry.records import RecordFile

_HIGHLIGHTS = re.compile("|".join(f"({re.escape(code)})" for code in HIGHLIGHT))


class Console:
    """Prints lines at once; errors go to stderr. A console whose reader has gone, or a full disk,
    never stops the run.

    On a terminal, a progress line leaves out what does not fit.
    """

    def __init__(self, log: Path) -> None:
        self._log = RecordFile(log)

    def print_line(self, line: str) -> None:
        self._write(line, sys.stdout)

    def print_error(self, line: str) -> None:
        self._write(line, sys.stderr)

    def _write(self, line: str, stream: TextIO) -> None:
        # what processes wrote may hold anything
        line = "\n".join(map(_printable, line.split("\n")))
        self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {plain(line)}")
        try:
            if stream.isatty():
                line = fitted(line, shutil.get_terminal_size().columns)
            else:
                line = plain(line)
            print(line, file=stream, flush=True)
        except OSError:
            pass  # `run ... | head`, or a file on a full disk: the log keeps every line
        except UnicodeEncodeError:
            print(line.encode("ascii", "replace").decode(), file=stream, flush=True)

    def __enter__(self) -> Console:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._log.close()


def _printable(line: str) -> str:
    """Returns the line with escapes for all that a terminal would obey but HIGHLIGHT."""
    pieces = [piece for piece in _HIGHLIGHTS.split(line) if piece]
    return "".join(piece if piece in HIGHLIGHT else printable(piece) for piece in pieces)

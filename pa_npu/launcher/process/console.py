"""Prints a run's lines: the launcher's own and the relayed progress lines; logs/launcher.log keeps both."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TextIO

from pa_npu.errors import printable
from pa_npu.telemetry.progress import fitted
from pa_npu.telemetry.records import RecordFile


class Console:
    """Prints lines at once; errors go to stderr. A console whose reader has gone, or a full disk,
    never stops the run.

    On a terminal, a progress line leaves out what does not fit.
    """

    def __init__(self, log: Path) -> None:
        self._log = RecordFile(log)

    def say(self, line: str) -> None:
        self._write(line, sys.stdout)

    def complain(self, line: str) -> None:
        self._write(line, sys.stderr)

    def _write(self, line: str, stream: TextIO) -> None:
        line = "\n".join(map(printable, line.split("\n")))  # what processes wrote may hold anything
        self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}")
        try:
            if stream.isatty():
                line = fitted(line, shutil.get_terminal_size().columns)
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

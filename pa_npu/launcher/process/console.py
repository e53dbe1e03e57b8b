"""Prints a run's lines: the launcher's own and the relayed progress lines; logs/launcher.log keeps both."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from pa_npu.errors import printable
from pa_npu.telemetry.bars import Bar, Bars
from pa_npu.telemetry.progress import fitted
from pa_npu.telemetry.record_file import RecordFile

_SHOW_EVERY_S = 0.25


class Console:
    """Prints lines at once; errors go to stderr. A console whose reader has gone, or a full disk, never stops the run.

    On a terminal, bars below the lines say what is waited for, and a progress line leaves out what does not fit.
    """

    def __init__(self, log: Path) -> None:
        self._log = RecordFile(log)
        self._bars = Bars()
        self._next_show = 0.0

    def say(self, line: str) -> None:
        self._write(line, sys.stdout)

    def complain(self, line: str) -> None:
        self._write(line, sys.stderr)

    def show(self, bars: Callable[[], Sequence[Bar]]) -> None:
        """These bars, asked for only where there is a terminal to show them on."""
        if not self._bars.are_shown or time.monotonic() < self._next_show:
            return
        self._next_show = time.monotonic() + _SHOW_EVERY_S
        with contextlib.suppress(OSError, ValueError):  # ValueError: stdout was closed
            self._bars.show(bars())

    def clear(self) -> None:
        """No bars any more."""
        with contextlib.suppress(OSError, ValueError):
            self._bars.close()

    def _write(self, line: str, stream: object) -> None:
        line = "\n".join(map(printable, line.split("\n")))  # what processes wrote may hold anything
        self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}")
        try:
            if self._bars.are_shown:
                line = fitted(line, shutil.get_terminal_size().columns)
                if (stream is sys.stdout or sys.stderr.isatty()) and self._bars.print(line):
                    return
            print(line, file=stream, flush=True)  # type: ignore[call-overload]
        except OSError:
            pass  # `run ... | head`, or a file on a full disk: the log keeps every line
        except UnicodeEncodeError:
            print(line.encode("ascii", "replace").decode(), file=stream, flush=True)  # type: ignore[call-overload]

    def __enter__(self) -> Console:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.clear()
        self._log.close()

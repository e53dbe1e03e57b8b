"""What a run prints: the launcher's own lines and the relayed progress lines, also kept in logs/launcher.log."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType

from pa_npu.errors import printable
from pa_npu.telemetry.record_file import RecordFile


class Console:
    """Prints lines at once; errors go to stderr. A console whose reader has gone, or a full disk, never stops the run."""

    def __init__(self, log: Path) -> None:
        self._log = RecordFile(log)

    def say(self, line: str) -> None:
        self._write(line, sys.stdout)

    def complain(self, line: str) -> None:
        self._write(line, sys.stderr)

    def _write(self, line: str, stream: object) -> None:
        line = "\n".join(map(printable, line.split("\n")))  # what processes wrote may hold anything
        self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}")
        try:
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
        self._log.close()

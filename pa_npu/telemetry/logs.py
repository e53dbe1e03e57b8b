"""Logging of one process: stdout, one format, the process named in every line (the launcher puts it into a file).

The last error goes into memory that the launcher shares too (LAST_ERROR), as the file may be on a
disk that is full.
"""

from __future__ import annotations

import logging
import os
import sys

from pa_npu.errors import printable

_FORMAT = "%(asctime)s.%(msecs)03d %(levelname).1s {process_name} %(name)s: %(message)s"
_CLOCK = "%Y-%m-%d %H:%M:%S"
LAST_ERROR = "PA_NPU_LAST_ERROR"
"""The variable with the number of an open file, which holds the process's last line of level error
and nothing else.
"""


class _Formatter(logging.Formatter):
    """Escapes what a terminal would obey: messages quote what models, engines and users wrote."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(printable, super().format(record).split("\n")))


class _LastError(logging.Handler):
    """Keeps the last error in the file with this number."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(logging.ERROR)
        self._descriptor = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, self.format(record).encode(), 0)
        except OSError:
            self.handleError(record)


def setup_logging(process_name: str, level: int = logging.INFO) -> None:
    """Replaces the root handlers by one on stdout; call it again after a library that installs its
    own (MindSpeed).
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout)]
    if descriptor := os.environ.get(LAST_ERROR):
        handlers.append(_LastError(int(descriptor)))
    for handler in handlers:
        handler.setFormatter(
            _Formatter(_FORMAT.format(process_name=process_name.replace("%", "%%")), _CLOCK)
        )
    logging.basicConfig(level=level, handlers=handlers, force=True)
    logging.captureWarnings(True)

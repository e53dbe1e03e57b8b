"""Logging of one process: stdout, one format, the process named in every line (the launcher puts it into a file)."""

from __future__ import annotations

import logging
import sys

from pa_npu.errors import printable

_FORMAT = "%(asctime)s.%(msecs)03d %(levelname).1s {process_name} %(name)s: %(message)s"
_CLOCK = "%Y-%m-%d %H:%M:%S"


class _Formatter(logging.Formatter):
    """Escapes what a terminal would obey: messages quote what models, engines and users wrote."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(printable, super().format(record).split("\n")))


def setup_logging(process_name: str, level: int = logging.INFO) -> None:
    """Replaces the root handlers by one on stdout; call it again after a library that installs its own (MindSpeed)."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Formatter(_FORMAT.format(process_name=process_name.replace("%", "%%")), _CLOCK))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)

"""Names the machine that a measurement was taken on."""

from __future__ import annotations

import platform
from pathlib import Path


def processor() -> str:
    """Model name of the first core, or the architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

"""Whether a process still runs."""

from __future__ import annotations

from pathlib import Path


def running(pid: int) -> bool:
    """Returns whether the process exists and is no zombie.

    A process that ends while its file is read gives ESRCH (ProcessLookupError), one that has ended
    gives ENOENT: both are OSErrors.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

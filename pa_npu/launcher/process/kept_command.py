"""Looks past a keeper at its command: a keeper that is stopped or stuck does not say that the command has ended.

A keeper that works reaps its command at once, and ends itself a few seconds later at most. One that is stopped (SIGSTOP, a
debugger) leaves the dead command lying, and whoever waits for the keeper waits for ever. Linux only; elsewhere nothing is seen.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from pa_npu.control import keeper

_LOOK_EVERY_S = 1.0
# What a keeper may take from its command's end to its own: 5 s to kill what the command left behind, and as much again.
LEFT_LYING_S = 10.0
_KILLED = -9


class KeptCommand:
    """The command of one keeper, which is a child of this process."""

    def __init__(self, keeper_pid: int) -> None:
        self._keeper_pid = keeper_pid
        self._found: tuple[int, int] | None = None
        self._looked_s = time.monotonic()
        self._ended_s: float | None = None

    def is_left_lying(self) -> bool:
        """Whether the command has ended long ago, and its keeper still has not. Cheap: it looks once a second."""
        now = time.monotonic()
        if now - self._looked_s < _LOOK_EVERY_S:
            return False
        self._looked_s = now
        if self._found is None:
            self._found = _first_child(self._keeper_pid)
            return False
        if _is_alive(*self._found):
            self._ended_s = None
            return False
        self._ended_s = self._ended_s or now
        return now - self._ended_s > LEFT_LYING_S

    def reap(self) -> int:
        """The command's exit code, negative for a signal; the keeper is gone, and this process the reaper of what it leaves.

        A keeper that had reaped it before it was stopped has taken the code with it: that counts as killed.
        """
        assert self._found is not None
        deadline = time.monotonic() + _LOOK_EVERY_S  # it changes parents a moment after its keeper's end
        while time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self._found[0], os.WNOHANG)
                if pid:
                    return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        return _KILLED


def _first_child(keeper_pid: int) -> tuple[int, int] | None:
    """(process id, start time): the keeper starts its command first, and adopts orphans of it later."""
    found = []
    for pid in keeper.descendants(keeper_pid):
        fields = _stat(pid)
        if fields and int(fields[1]) == keeper_pid:
            found.append((int(fields[19]), pid))
    return next(((pid, started) for started, pid in sorted(found)), None)


def _is_alive(pid: int, started: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] != "Z" and int(fields[19]) == started


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on: state, parent, ...; the twentieth is the start time."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []

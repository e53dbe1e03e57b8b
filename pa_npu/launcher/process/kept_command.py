"""Looks past a keeper at its command: a keeper that is stopped or stuck does not say that the command has ended.

A keeper that works reaps its command at once, and ends itself a few seconds later at most. One that is stopped (SIGSTOP, a
debugger) leaves the dead command lying, and whoever waits for the keeper waits for ever.
"""

from __future__ import annotations

import contextlib
import os
import time

import psutil

_LOOK_EVERY_S = 1.0
# What a keeper may take from its command's end to its own: 5 s to kill what the command left behind, and as much again.
LEFT_LYING_S = 10.0
_KILLED = -9


class KeptCommand:
    """The command of one keeper, which is a child of this process."""

    def __init__(self, keeper_pid: int) -> None:
        self._keeper_pid = keeper_pid
        self._found: psutil.Process | None = None
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
        if _is_alive(self._found):
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
                pid, status = os.waitpid(self._found.pid, os.WNOHANG)
                if pid:
                    return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        return _KILLED


def _first_child(keeper_pid: int) -> psutil.Process | None:
    """The keeper starts its command first, and adopts orphans of it later."""
    with contextlib.suppress(psutil.Error):
        return min(psutil.Process(keeper_pid).children(), key=psutil.Process.create_time, default=None)
    return None


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False

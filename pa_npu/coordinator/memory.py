"""Peaks of resident memory around the coordinator: itself, its workers, and on its machine launcher and keepers."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pa_npu.platform.memory_peaks import ResidentPeak, children, parent, session_leader, tree


class PeaksAround:
    """Host memory between two records. Engines and trainers say theirs themselves."""

    def __init__(self) -> None:
        kinds = {"coordinator": _itself, "workers": _workers, "launcher": _launcher, "keepers": _keepers}
        self._peaks = {kind: ResidentPeak(processes) for kind, processes in kinds.items()}
        self.take()

    def take(self) -> dict[str, int]:
        """By name of the record, in bytes, since the last call; kinds that have no process are left out.

        workers: those of reward functions, tools and environments. launcher: with the store, and so with what lies in the rollout
        buffer. keepers: all those of this machine together.
        """
        taken = {f"memory_{kind}_bytes": peak.take() for kind, peak in self._peaks.items()}
        return {name: value for name, value in taken.items() if value}


def _itself() -> Sequence[int]:
    return [os.getpid()]


def _workers() -> Sequence[int]:
    return tree(os.getpid())[1:]


def _launcher() -> Sequence[int]:
    """Finds the process that started this process's keeper."""
    leader = session_leader()
    keeper = None if leader is None else parent(leader)
    launcher = None if keeper is None else parent(keeper)
    return [] if launcher is None else [launcher]


def _keepers() -> Sequence[int]:
    """The launcher's children that lead a session, as every keeper does."""
    return [pid for launcher in _launcher() for pid in children(launcher) if _leads_a_session(pid)]


def _leads_a_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except OSError:
        return False

"""Peaks of memory since the last call: resident memory of processes, and memory on a device.

Needs the standard library and torch only, because engines use it too.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

SESSION = "PA_NPU_SESSION"
"""Set by the keeper (control/keeper.py) to the id of the command that it started, which leads a
session.
"""

_KIB = 1024


@dataclass(frozen=True)
class MemoryPeak:
    """The largest amounts of memory since the last call.

    host_bytes: sum over the processes of each one's largest resident memory; memory that they share
    counts for each of them.
    device_bytes: allocated on the fullest device; None if a device's memory is the host's.
    """

    host_bytes: int
    device_bytes: int | None = None

    @classmethod
    def largest(cls, peaks: Iterable[MemoryPeak]) -> MemoryPeak | None:
        """Returns the largest host peak and the largest device peak; None without any peak."""
        all_peaks = list(peaks)
        if not all_peaks:
            return None
        device = [peak.device_bytes for peak in all_peaks if peak.device_bytes is not None]
        return cls(max(peak.host_bytes for peak in all_peaks), max(device, default=None))


class ResidentPeak:
    """The largest resident memory of some processes since the last take(), in bytes.

    It is the kernel's own high-water mark, which Linux lets the owner of a process reset (proc(5),
    /proc/PID/clear_refs: 5). If that is refused, it is the largest since each process's start.
    Without /proc it is this process's alone.
    """

    def __init__(self, processes: Callable[[], Sequence[int]], proc: str = "/proc") -> None:
        """processes: returns the ids, called at each take. proc: where Linux shows processes."""
        self._processes = processes
        self._proc = proc

    def pop_peak(self) -> int:
        """Returns the peak since the last call and begins a new one."""
        processes = self._processes()
        if not processes:
            return 0
        if not os.path.isdir(f"{self._proc}/self"):
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak * (1 if sys.platform == "darwin" else _KIB)  # bytes there, KiB elsewhere
        total = 0
        for pid in processes:
            total += resident_bytes(pid, "VmHWM", self._proc)
            self._reset(pid)
        return total

    def _reset(self, pid: int) -> None:
        with (
            contextlib.suppress(OSError),
            open(f"{self._proc}/{pid}/clear_refs", "w", encoding="ascii") as file,
        ):
            file.write("5")


def resident_bytes(pid: int, field: str = "VmRSS", proc: str = "/proc") -> int:
    """Returns the bytes of VmRSS (resident now) or VmHWM (largest since the last reset) of a
    process; 0 if the process has ended.
    """
    try:
        with open(f"{proc}/{pid}/status", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith(f"{field}:"):
                    return int(line.split()[1]) * _KIB
    except OSError:
        pass
    return 0


def device_peak_bytes(kind: str) -> int | None:
    """Returns the most bytes that torch's allocator has given out on the current device since the
    last call; None if it keeps no count.
    """
    # not at the top: the coordinator and its workers measure the host's memory without torch
    import torch

    module: Any = getattr(torch, kind, None)
    if not hasattr(module, "max_memory_allocated"):
        return None
    peak = int(module.max_memory_allocated())
    module.reset_peak_memory_stats()
    return peak


def own_processes() -> list[int]:
    """Returns the ids of all processes of the command that this process belongs to, if a keeper
    started that; otherwise this process's id.
    """
    leader = session_leader()
    return [os.getpid()] if leader is None else tree(leader)


def session_leader() -> int | None:
    """Returns the id of the process that a keeper started and this one belongs to; None if no
    keeper started it.
    """
    leader = os.environ.get(SESSION, "")
    if leader.isdigit() and int(leader) == os.getsid(0):
        return int(leader)
    return None


def tree(root: int, proc: str = "/proc") -> list[int]:
    """Returns the ids of a process and of all its descendants. The cost grows with their number
    alone, whatever else runs on the machine.
    """
    processes = [root]
    for pid in processes:
        processes.extend(children(pid, proc))
    return processes


def children(pid: int, proc: str = "/proc") -> Iterator[int]:
    """Yields the ids of the processes that a process has started and that still run."""
    try:
        threads = os.listdir(f"{proc}/{pid}/task")
    except OSError:
        return
    for thread in threads:
        try:
            with open(f"{proc}/{pid}/task/{thread}/children", encoding="ascii") as file:
                yield from map(int, file.read().split())
        except OSError:
            continue

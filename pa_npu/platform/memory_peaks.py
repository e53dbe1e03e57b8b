"""The most memory since the last look: what processes had resident, and what torch's allocator gave out on a device.

The standard library and torch only, because engines look with it too.
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
    """The most since the last look. host_bytes: resident, the sum over the processes of each one's
    most, so that what they share counts for each. device_bytes: allocated on the device that is
    fullest; None where a device's memory is the host's."""

    host_bytes: int
    device_bytes: int | None = None

    @classmethod
    def largest(cls, peaks: Iterable[MemoryPeak]) -> MemoryPeak | None:
        """Host and device each at their most; None of none."""
        found = list(peaks)
        if not found:
            return None
        device = [peak.device_bytes for peak in found if peak.device_bytes is not None]
        return cls(max(peak.host_bytes for peak in found), max(device, default=None))


class ResidentPeak:
    """The most resident memory of some processes since the last take(), in bytes.

    It is the kernel's own high-water mark, which Linux lets the owner of a process reset (proc(5),
    /proc/PID/clear_refs: 5). Where that is refused it is the most since each process's start, and
    without /proc this process's.
    """

    def __init__(self, processes: Callable[[], Sequence[int]], proc: str = "/proc") -> None:
        """processes: the ids, asked for at each take. proc: where Linux shows processes."""
        self._processes = processes
        self._proc = proc

    def take(self) -> int:
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
    """VmRSS (resident now) or VmHWM (at its most since the last reset) of a process; 0 of one that
    has ended.
    """
    try:
        with open(f"{proc}/{pid}/status", encoding="utf-8", errors="replace") as file:
            return next(
                (int(line.split()[1]) * _KIB for line in file if line.startswith(f"{field}:")), 0
            )
    except OSError:
        return 0


def device_peak_bytes(kind: str) -> int | None:
    """The most that torch's allocator gave out on the current device since the last call; None
    where it keeps no count.
    """
    # the coordinator and its workers, which look at the host's memory alone, do without
    import torch

    module: Any = getattr(torch, kind, None)
    if not hasattr(module, "max_memory_allocated"):
        return None
    peak = int(module.max_memory_allocated())
    module.reset_peak_memory_stats()
    return peak


def own_processes() -> list[int]:
    """This process; where a keeper started the command that it belongs to, all processes of that
    command.
    """
    leader = session_leader()
    return [os.getpid()] if leader is None else tree(leader)


def session_leader() -> int | None:
    """The process that a keeper started and this one belongs to; None where no keeper did."""
    leader = os.environ.get(SESSION, "")
    return int(leader) if leader.isdigit() and int(leader) == os.getsid(0) else None


def tree(root: int, proc: str = "/proc") -> list[int]:
    """A process and all below it.

    Costs as much as they are many, whatever else runs on the machine.
    """
    found = [root]
    for pid in found:
        found.extend(children(pid, proc))
    return found


def children(pid: int, proc: str = "/proc") -> Iterator[int]:
    """The processes that a process has started and that are still there."""
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

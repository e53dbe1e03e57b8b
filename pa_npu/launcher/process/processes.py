"""A run's processes, on whichever machine, and their readiness: supervisor and recovery start, watch, stop and wait for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pa_npu.control.bounded_http import bounded_get
from pa_npu.control.channel import StoreChannel
from pa_npu.launcher.process.commands import Startable
from pa_npu.publish.messages import MANIFEST

_PROBE_TIMEOUT_S = 1.0


class Process(Protocol):
    """One process of the run. `name` is also its log's name."""

    @property
    def name(self) -> str: ...

    @property
    def log(self) -> Path: ...

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""

    def describe_end(self) -> str:
        """Returns how the process ended, such as "exit code 1" or "killed by SIGKILL"."""

    def last_lines(self, count: int) -> list[str]:
        """Returns the last `count` lines of its log."""


class Processes(Protocol):
    """All processes of the run."""

    @property
    def processes(self) -> Sequence[Process]:
        """Returns the processes that were started and not forgotten."""

    def can_launch(self, command: Startable) -> bool:
        """Returns whether the node that it is for is there."""

    def launch(self, command: Startable) -> Process:
        """Start it, with its output in LOG_DIR/<name>.log."""

    def ended(self) -> Sequence[Process]:
        """Returns the processes that ended, the likely culprits first."""

    def stop(self, processes: Sequence[Process] | None = None) -> None:
        """Stop them, or all, gracefully at first; returns when they are gone."""

    def kill_one(self, process: Process) -> None:
        """SIGKILL a process, which may hang."""

    def forget(self, processes: Sequence[Process]) -> None:
        """Forgets processes that have ended; others may take their names."""

    def settle(self, seconds: float) -> None:
        """After an end: wait until those that ended at the same time are known too."""


@dataclass(frozen=True)
class Awaited:
    """Something a run waits for at its start. timeout_s: run.startup_timeout_s; process: whose log
    to show.
    """

    name: str
    is_ready: Callable[[], bool]
    timeout_s: float
    process: str


def engine_answers(url: str) -> bool:
    """Returns whether the engine serves requests."""
    try:
        return bounded_get(f"{url}/health", {}, _PROBE_TIMEOUT_S)[0] == 200
    except (OSError, ValueError):
        return False


def trainers_announced(channel: StoreChannel, publishers: Sequence[int]) -> bool:
    """Returns whether every rank that sends weights has loaded them and said what it will send."""
    return all(MANIFEST.exists(channel, rank=rank) for rank in publishers)

"""How the launcher knows that a process is ready: engines answer /health, trainer stages have announced their weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pa_npu.control.bounded_http import bounded_get
from pa_npu.control.channel import StoreChannel
from pa_npu.publish.messages import MANIFEST

_PROBE_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class Awaited:
    """Something a run waits for at its start. timeout_s: run.startup_timeout_s; process: whose log to show."""

    name: str
    is_ready: Callable[[], bool]
    timeout_s: float
    process: str


def engine_answers(url: str) -> bool:
    """Whether the engine serves requests."""
    try:
        return bounded_get(f"{url}/health", {}, _PROBE_TIMEOUT_S)[0] == 200
    except (OSError, ValueError):
        return False


def trainers_announced(channel: StoreChannel, num_stages: int) -> bool:
    """Whether every pipeline stage has loaded its weights and said what it will publish."""
    return all(MANIFEST.exists(channel, stage=stage) for stage in range(num_stages))

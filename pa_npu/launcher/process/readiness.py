"""How the launcher knows that a process is ready: engines answer /health, trainer stages have announced their weights."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pa_npu.control.bounded_http import bounded_get
from pa_npu.control.channel import StoreChannel
from pa_npu.publish.messages import MANIFEST

_PROBE_TIMEOUT_S = 1.0
_STORE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Awaited:
    """Something a run waits for at its start. section: whose startup_timeout_s it is; process: whose log to show."""

    name: str
    is_ready: Callable[[], bool]
    timeout_s: float
    section: str
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


def host_store(host: str, port: int) -> dist.TCPStore:
    """Host the run's c10d store on host:port (0: a free port). Raises OSError when the port is taken.

    The store gets a socket bound to `host`, because by itself it would listen on all addresses of the machine.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
        store = _store_on(listener, host)
        listener.detach()  # the store's now
    return store


def _store_on(listener: socket.socket, host: str) -> dist.TCPStore:
    arguments: dict[str, Any] = {
        "host_name": host,
        "port": listener.getsockname()[1],
        "is_master": True,
        "wait_for_workers": False,
        "timeout": timedelta(seconds=_STORE_TIMEOUT_S),
        "master_listen_fd": listener.fileno(),
    }
    try:
        return dist.TCPStore(**arguments)
    except NotImplementedError:  # torch 2.7: its libuv server takes no socket, and the other one has no size limit
        return dist.TCPStore(**arguments, use_libuv=False)

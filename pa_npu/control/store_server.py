"""host_store: a c10d store in this process, the run's or a shard of its rollout buffer, on one address alone."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

ADDRESS_VARIABLE = "PA_NPU_ADDRESS"
"""Variable of a trainer rank: the address at which its node's processes listen."""
_STORE_TIMEOUT_S = 30.0


def host_store(host: str, port: int) -> dist.TCPStore:
    """Host a c10d store on host:port (0: a free port). Raises OSError when the port is taken. It lives as long as what is returned.

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

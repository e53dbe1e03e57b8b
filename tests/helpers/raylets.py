"""Ray clusters on one machine: two raylets on loopback addresses, without dashboard, ended with all they started.

Ray takes 127.0.0.1 for "whatever address this machine has", so the nodes are 127.0.0.2 and
127.0.0.3.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

HEAD, OTHER = "127.0.0.2", "127.0.0.3"
_OBJECT_STORE_BYTES = 80 * 2**20
# A raylet that is killed is known by its broken connection; one that is stopped by these.
_SYSTEM = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 6,
}


class Raylets:
    """A cluster whose nodes come and go.

    Every raylet's workers have `environment` beside this process's.
    """

    def __init__(self, environment: Mapping[str, str], head_cpus: float) -> None:
        from ray.cluster_utils import Cluster

        self._environment = {
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_enable_infeasible_task_early_exit": "0",
            **environment,
        }
        self._cluster = Cluster()
        self._nodes: dict[str, Any] = {}
        self.add(HEAD, head_cpus, include_dashboard=False, _system_config=_SYSTEM)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, address: str, cpus: float, **others: Any) -> None:
        with _environment(self._environment):
            self._nodes[address] = self._cluster.add_node(
                node_ip_address=address,
                num_cpus=cpus,
                object_store_memory=_OBJECT_STORE_BYTES,
                **others,
            )

    def kill(self, address: str) -> None:
        """SIGKILL its raylet, as a machine that goes."""
        self._cluster.remove_node(self._nodes.pop(address), allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def raylets(
    environment: Mapping[str, str] = {}, head_cpus: float = 2, other_cpus: float = 2
) -> Iterator[Raylets]:
    cluster = Raylets(environment, head_cpus)
    try:
        if other_cpus:
            cluster.add(OTHER, other_cpus)
        yield cluster
    finally:
        cluster.close()


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

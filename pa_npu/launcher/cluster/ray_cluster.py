"""A run on the nodes of a Ray cluster: processes there as if they were children of the launcher.

The coordinator stays beside the launcher. Everything else is a role that a node's host actor
starts; a process is lost with its host, and what is to be started on a lost node waits until there
is another one in its place.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pa_npu.checkpoints.provenance import config_tree
from pa_npu.config.schema import Config
from pa_npu.errors import UserError
from pa_npu.launcher.cluster.cluster import Cluster
from pa_npu.launcher.cluster.host import (
    TOKEN_FILE,
    all_versions,
    forwarded_environment,
    inspect_node,
    leave_token,
)
from pa_npu.launcher.cluster.ray_connection import HostFailed, HostGone, RayConnection
from pa_npu.launcher.cluster.ray_nodes import SILENT_S, Node, NodesMissing, RayNodes
from pa_npu.launcher.placement import Placement, place_extra_engine, place_nodes
from pa_npu.launcher.process.commands import Role, Startable, Store, engine_url
from pa_npu.launcher.process.console import Console
from pa_npu.launcher.process.process_tree import GRACE_S, ProcessTree, describe_end, last_lines
from pa_npu.launcher.process.processes import Process
from pa_npu.launcher.process.recovery import Failure
from pa_npu.launcher.process.supervisor import StopSignals
from pa_npu.platform.base import Platform

_KILLED = -9
# After SIGTERM and the grace, what a host needs to kill, to reap and to answer.
_STOP_S = GRACE_S + 15.0


@dataclass(eq=False)
class RemoteProcess:
    """A process of a node. lost: how, where it went with its node."""

    name: str
    log: Path
    number: int
    node: Node
    cluster: RayProcesses
    code: int | None = None
    lines: list[str] = field(default_factory=list)
    lost: str = ""

    @property
    def exit_code(self) -> int | None:
        self.cluster.nodes.poll()
        return self.code

    def describe_end(self) -> str:
        return self.lost or describe_end(self.code or 0)

    def last_lines(self, count: int) -> list[str]:
        return self.lines[-count:] or last_lines(self.log, count)


class RayProcesses:
    """All processes of a run on a Ray cluster: those of `local`, beside the launcher, and those of
    the nodes.
    """

    nodes: RayNodes

    def __init__(
        self, local: ProcessTree, log_dir: Path, connection: RayConnection, signals: StopSignals
    ) -> None:
        self._local = local
        self._log_dir = log_dir
        self._connection = connection
        self._signals = signals
        self._remote: list[RemoteProcess] = []
        self._running: dict[tuple[int, int], RemoteProcess] = {}  # by node and number
        self._next_number = 0

    @property
    def processes(self) -> list[Process]:
        return [*self._local.processes, *self._remote]

    def can_launch(self, command: Startable) -> bool:
        self.nodes.poll()
        return not isinstance(command, Role) or self._node_of(command).present

    def launch(self, command: Startable) -> Process:
        if not isinstance(command, Role):
            return self._local.launch(command)
        node = self._node_of(command)
        self._next_number += 1
        log = self._log_dir / f"{command.name}.log"
        process = RemoteProcess(command.name, log, self._next_number, node, self)
        self._remote.append(process)
        if not node.present:
            _lose([process], f"{node.name} is lost")
            return process
        self._running[node.number, process.number] = process
        try:
            self._connection.result(
                self._connection.call(node.host, "start", process.number, asdict(command)), SILENT_S
            )
        except (HostGone, HostFailed) as error:
            self.nodes.lose(node, str(error))
        return process

    def ended(self) -> list[Process]:
        """Returns ended processes, likely causes first: ended with their node, killed by a signal,
        then those that lost contact.
        """
        self.nodes.poll()

        def rank(process: Process) -> int:
            if isinstance(process, RemoteProcess) and process.lost:
                return 0
            return 1 if (process.exit_code or 0) < 0 else 2

        return sorted(
            (process for process in self.processes if process.exit_code is not None), key=rank
        )

    def stop(self, processes: Sequence[Process] | None = None) -> None:
        running = [process for process in self._chosen(processes) if process.exit_code is None]
        pending = self._ask_to_stop(running)
        self._local.stop(processes)
        self._finish(pending, running)

    def kill_one(self, process: Process) -> None:
        running = [remote for remote in self._chosen([process]) if remote.exit_code is None]
        self._finish(self._ask_to_stop(running, at_once=True), running)
        self._local.kill_one(process)

    def forget(self, processes: Sequence[Process]) -> None:
        self._local.forget(processes)
        self._remote = [process for process in self._remote if process not in processes]

    def settle(self, seconds: float) -> None:
        """Until every node has answered, or is lost: Ray knows of a dead node some seconds after
        its peers have noticed.
        """
        self._local.settle(seconds)
        began = time.monotonic()
        while any(node.present and node.heard_s < began for node in self.nodes.nodes):
            self.nodes.poll()
            time.sleep(0.02)

    def on_ended(self, node: Node, number: int, code: int, lines: list[str]) -> None:
        if process := self._running.pop((node.number, number), None):
            process.code = code
            process.lines = lines

    def on_lost(self, node: Node, reason: str) -> None:
        keys = [key for key in self._running if key[0] == node.number]
        _lose([self._running.pop(key) for key in keys], f"lost with {node.name}")

    def engine_url(self, engine: Startable) -> str:
        """Returns the URL of an engine, as its node has reported it."""
        assert isinstance(engine, Role)
        node = self._node_of(engine)
        assert node.report is not None
        return engine_url(
            node.report.address, node.report.ports[node.share.engines.index(engine.index)]
        )

    def await_nodes(self) -> None:
        """Until there is a node for each trainer, and one for an engine.

        Raises Failure after placement.join_timeout_s.
        """
        nodes = [node for node in self.nodes.nodes if node.share.ranks]
        hosts = [node for node in self.nodes.nodes if node.share.engines]
        if hosts and not any(node.present for node in hosts):
            nodes += [node for node in hosts if node.extra is None and node not in nodes]
        try:
            self.nodes.await_present(nodes, patient=True)
        except NodesMissing as error:
            raise Failure(str(error)) from None

    def _node_of(self, role: Role) -> Node:
        return self.nodes.nodes[role.node]

    def _chosen(self, processes: Sequence[Process] | None) -> list[RemoteProcess]:
        return [process for process in self._remote if processes is None or process in processes]

    def _ask_to_stop(
        self, processes: Sequence[RemoteProcess], at_once: bool = False
    ) -> list[object]:
        """Begin a call on every node that has some of these."""
        numbers: dict[Node, list[int]] = {}
        for process in processes:
            numbers.setdefault(process.node, []).append(process.number)
        return [
            self._connection.call(node.host, "stop", some, at_once)
            for node, some in numbers.items()
            if node.present
        ]

    def _finish(self, pending: Sequence[object], processes: Sequence[RemoteProcess]) -> None:
        """Until these calls have been answered and the ends are known; what is not by the deadline
        counts as killed.
        """
        deadline = time.monotonic() + _STOP_S
        hurried = False
        while (
            any(process.exit_code is None for process in processes) and time.monotonic() < deadline
        ):
            if self._signals.insisted() and not hurried:
                hurried = True
                for node in {process.node for process in processes}:
                    if node.present:
                        self._connection.call(node.host, "hurry")
            time.sleep(0.02)
        self._connection.done(pending, max(0.0, deadline - time.monotonic()))
        _lose(
            [process for process in processes if process.code is None],
            "its node did not say that it ended",
        )


def wanted_nodes(config: Config, platform: Platform) -> list[Node]:
    """Returns the nodes of a run, and after them those of the engines that come when there are free
    devices.
    """
    shares: list[tuple[Placement, int | None]] = [(share, None) for share in place_nodes(config)]
    more = (config.rollout.max_engines or config.rollout.engines) - config.rollout.engines
    first = config.rollout.engines
    shares += [(place_extra_engine(config, index), index) for index in range(first, first + more)]
    return [
        Node(number, share, {platform.cluster_resource: float(_num_devices(share))}, extra)
        for number, (share, extra) in enumerate(shares)
    ]


def _num_devices(share: Placement) -> int:
    """Devices 0 to the highest that the share uses: Ray numbers what it gives."""
    return max(share.used, default=0) + 1


@contextmanager
def ray_cluster(
    config: Config,
    platform: Platform,
    connection: RayConnection,
    local: ProcessTree,
    store: Store,
    console: Console,
    signals: StopSignals,
) -> Iterator[Cluster | None]:
    """The cluster with its nodes present, all of which are given back in the end; None when a
    signal came first.

    Raises UserError when the cluster does not give what the run needs, or a node cannot take part.
    """
    processes = RayProcesses(local, Path(config.run.dir) / "logs", connection, signals)
    token = leave_token(config)
    try:
        launcher_report = inspect_node(config, platform, Placement((), (), (), ()), -1, token)
        order = {
            "config": config_tree(config),
            "store": [store.host, store.port],
            "directory": os.getcwd(),
            "environment": forwarded_environment(os.environ),
            "versions": all_versions(),
            "token": token,
        }
        nodes = wanted_nodes(config, platform)
        processes.nodes = RayNodes(
            connection,
            config.run.startup_timeout_s,
            launcher_report,
            order,
            nodes,
            console,
            processes.on_ended,
            processes.on_lost,
            lambda: bool(signals.received),
        )
        try:
            fixed = [node for node in nodes if node.extra is None]
            try:
                ready = processes.nodes.reserve() and processes.nodes.await_present(
                    fixed, patient=False
                )
            except NodesMissing as error:
                raise UserError(str(error)) from None
            shares = [node.share for node in nodes]
            cluster = Cluster(
                config, processes, shares, len(fixed), processes.engine_url, processes.await_nodes
            )
            yield cluster if ready else None
            processes.stop()
        finally:
            processes.nodes.close()
    finally:
        (Path(config.run.dir) / TOKEN_FILE).unlink(missing_ok=True)


def _lose(processes: Iterable[RemoteProcess], reason: str) -> None:
    for process in processes:
        if process.code is None:
            process.code = _KILLED
            process.lost = reason

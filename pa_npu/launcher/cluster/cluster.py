"""The machines that engines and trainer ranks run on: which roles of a run there are, by node, and the addresses of engines.

The coordinator is not a cluster's business: it always runs beside the launcher, as the run's store
does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pa_npu.config.schema import Config
from pa_npu.launcher.placement import Placement
from pa_npu.launcher.process.commands import NodeCommands, Role, Startable, Store, engine_url
from pa_npu.launcher.process.process_tree import ProcessTree
from pa_npu.launcher.process.processes import Processes
from pa_npu.platform.base import Platform


@dataclass(frozen=True)
class Cluster:
    """Places for engines and trainer ranks.

    Args:
        config: the run's.
        processes: all processes of the run, wherever they are; every role can be launched there.
        shares: what of the run each node has; from `num_nodes` on those of nodes that come when
        there are free devices.
        num_nodes: how many the run starts with.
        engine_url: of an engine; it changes when a lost node is replaced by another.
        await_nodes: called before coordinator and trainers are started again; returns when there is
        a node for each of
            them, and raises Failure when that takes longer than placement.join_timeout_s.
    """

    config: Config
    processes: Processes
    shares: Sequence[Placement]
    num_nodes: int
    engine_url: Callable[[Startable], str]
    await_nodes: Callable[[], None]

    def engines(self) -> list[Role]:
        """Returns the engines that the run starts with, in order."""
        return [] if self.config.rollout.attach else self._roles("engine", range(self.num_nodes))

    def teachers(self) -> list[Role]:
        """Returns the engines that the run starts for teachers, in order."""
        return [Role(0, "teacher", index) for index in self.shares[0].teachers]

    def extra_engines(self) -> list[Role]:
        """Engines that can be launched once there are free devices for them; until then
        `can_launch` says no.
        """
        return self._roles("engine", range(self.num_nodes, len(self.shares)))

    def trainers(self, attempt: int) -> list[Role]:
        """Returns the ranks of an attempt of the run, in order."""
        return self._roles("trainer", range(self.num_nodes), attempt)

    def _roles(
        self, kind: Literal["engine", "trainer"], nodes: range, attempt: int = 0
    ) -> list[Role]:
        roles = []
        for node in nodes:
            share = self.shares[node]
            indices = share.engines if kind == "engine" else share.ranks
            roles += [Role(node, kind, index, attempt) for index in indices]
        return sorted(roles, key=lambda role: role.index)


def local_cluster(
    config: Config,
    platform: Platform,
    placement: Placement,
    tree: ProcessTree,
    key: str,
    store: Store | None = None,
) -> Cluster:
    """This machine alone: every process is a child of the launcher. key: of the engines. store:
    None for engines alone.
    """
    host = config.placement.address
    commands = NodeCommands(config, platform, placement, store or Store(host, 0), 0, lambda: key)
    tree.build = commands

    def url(engine: Startable) -> str:
        assert isinstance(engine, Role)
        ports = commands.teacher_ports if engine.kind == "teacher" else commands.ports
        return engine_url(host, ports[engine.index])

    return Cluster(config, tree, [placement], 1, url, await_nodes=lambda: None)

"""Protocol of the machines that engines and trainer ranks run on, and the cluster that is this machine alone.

A cluster turns the configuration into things to start, starts them, and knows the address of every engine. The coordinator is not
its business: it always runs beside the launcher, as the run's store does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.launcher.placement import Placement, engine_ports
from pa_npu.launcher.process.commands import Command, Startable, Store, engine_command, engine_url, trainer_command
from pa_npu.launcher.process.process_tree import ProcessTree
from pa_npu.launcher.process.processes import Processes
from pa_npu.platform.base import Platform


class Cluster(Protocol):
    """Places for engines and trainer ranks."""

    @property
    def processes(self) -> Processes:
        """All processes of the run, wherever they are; what this cluster names can be launched there."""

    def engines(self) -> Sequence[Startable]:
        """The engines that the run starts with, in order."""

    def extra_engines(self) -> Sequence[Startable]:
        """Engines that can be launched once there are free devices for them; until then `can_launch` says no."""

    def trainers(self, attempt: int) -> Sequence[Startable]:
        """The ranks of an attempt of the run, in order."""

    def engine_url(self, engine: Startable) -> str:
        """Returns the URL that the engine listens at; it changes when a lost node is replaced by another."""

    def await_nodes(self) -> None:
        """Before coordinator and trainers are started again: until there is a node for each of them.

        Raises Failure when that takes longer than run.startup_timeout_s.
        """


@dataclass
class LocalCluster:
    """This machine alone: every process is a child of the launcher.

    placement: which devices the processes have. store: the run's. key: of the engines.
    """

    config: Config
    spec: ModelSpec
    platform: Platform
    placement: Placement
    processes: ProcessTree
    store: Store
    key: str

    @cached_property
    def _ports(self) -> dict[str, int]:
        """By the engine's name; chosen once, so that an engine that is started again keeps its address."""
        here = self.placement.engines
        names = [f"engine-{index}" for index in here]
        return dict(zip(names, engine_ports(self.config, here), strict=True))

    def engines(self) -> list[Command]:
        return [
            engine_command(
                *(self.config, self.spec, self.platform, self.placement),
                *(index, self._ports[f"engine-{index}"], self.key),
            )
            for index in self.placement.engines
        ]

    def extra_engines(self) -> Sequence[Startable]:
        return ()

    def trainers(self, attempt: int) -> list[Command]:
        store = replace(self.store, attempt=attempt)
        shared = (self.config, self.platform, self.placement, store)
        return [trainer_command(*shared, rank) for rank in self.placement.ranks]

    def engine_url(self, engine: Startable) -> str:
        return engine_url(self.config.placement.address, self._ports[engine.name])

    def await_nodes(self) -> None:
        """The only node is the one that asks."""

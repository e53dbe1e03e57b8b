"""The cluster that is this machine alone: every process is a child of the launcher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.launcher.placement import Placement, engine_ports
from pa_npu.launcher.process.commands import Command, Startable, Store, engine_command, engine_url, trainer_command
from pa_npu.launcher.process.process_tree import ProcessTree
from pa_npu.platform.base import Platform


@dataclass
class LocalCluster:
    """This machine. placement: which devices the processes have. store: the run's. key: of the engines."""

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

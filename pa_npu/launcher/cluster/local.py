"""The cluster that is this machine alone: every process is a child of the launcher."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.launcher.placement import Placement, engine_ports
from pa_npu.launcher.process.commands import Command, Startable, Store, engine_command, engine_url, trainer_command
from pa_npu.launcher.process.process_tree import ProcessTree
from pa_npu.platform.base import Platform


class LocalCluster:
    """This machine. placement: which devices the processes have. store: the run's. key: of the engines."""

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        platform: Platform,
        placement: Placement,
        tree: ProcessTree,
        store: Store,
        key: str,
    ) -> None:
        self.processes = tree
        self._config = config
        self._spec = spec
        self._platform = platform
        self._placement = placement
        self._store = store
        self._key = key

    @cached_property
    def _ports(self) -> dict[str, int]:
        """By the engine's name; chosen once, so that an engine that is started again keeps its address."""
        here = self._placement.engines
        names = [f"engine-{index}" for index in here]
        return dict(zip(names, engine_ports(self._config, here), strict=True))

    def engines(self) -> list[Command]:
        return [
            engine_command(
                self._config,
                self._spec,
                self._platform,
                self._placement,
                index,
                self._ports[f"engine-{index}"],
                self._key,
            )
            for index in self._placement.engines
        ]

    def extra_engines(self) -> Sequence[Startable]:
        return ()

    def trainers(self, attempt: int) -> list[Command]:
        store = Store(self._store.host, self._store.port, attempt)
        return [
            trainer_command(self._config, self._platform, self._placement, store, rank)
            for rank in self._placement.ranks
        ]

    def engine_url(self, engine: Startable) -> str:
        return engine_url(self._config.placement.address, self._ports[engine.name])

    def await_nodes(self) -> None:
        """The only node is the one that asks."""

"""The Cluster protocol: what the launcher asks of the machines that engines and trainer ranks run on.

A cluster turns the configuration into things to start, starts them, and knows the address of every engine. The coordinator is not
its business: it always runs beside the launcher, as the run's store does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pa_npu.launcher.process.commands import Startable
from pa_npu.launcher.process.processes import Processes


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

        Raises Failure when that takes longer than placement.join_timeout_s.
        """

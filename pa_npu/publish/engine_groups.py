"""Which groups each engine of a publish joins, by the way to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pa_npu.config.schema import Config
from pa_npu.engines.membership import Member
from pa_npu.engines.protocol import WeightGroups
from pa_npu.publish.messages import PublishMembers, StageManifest
from pa_npu.weight_transfer import collectives
from pa_npu.weight_transfer.transport import HOST_BACKEND, Way


@dataclass(frozen=True)
class Connection:
    """How engines reach the trainers' groups: the store's address, the backend, and each pipeline stage's manifest, in order.

    stages: for publishes to all engines. late_stages: for deliveries to one engine inside an iteration. device: the trainers' kind.
    """

    store: tuple[str, int]
    backend: str
    stages: Sequence[StageManifest]
    late_stages: Sequence[StageManifest]
    device: str = ""


class EngineGroups:
    def __init__(self, config: Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection
        self._workers = config.rollout.tensor_parallel

    def way(self, member: Member) -> Way:
        """How weights reach an engine from the trainers. One on a trainer's device may not be able to be in a group with that
        trainer. One on devices of another kind is reached through host memory: no other backend connects them for sure."""
        settings = self._config.rollout.settings_of(member.index)
        if settings.device_kind not in (None, self._connection.device):
            return "host"
        shares = collectives.rules(self._connection.backend).shares_device
        return "host" if member.shared and not shares else "group"

    def receivers(self, members: Sequence[Member], epoch: int) -> PublishMembers:
        """How many workers the trainers send to, by the way to them."""
        ways = [self.way(member) for member in members]
        return PublishMembers(epoch, self._workers * ways.count("group"), self._workers * ways.count("host"))

    def of_members(self, members: Sequence[Member], epoch: int) -> list[WeightGroups]:
        """The groups that each member joins, one per stage, in the order of the members.

        Workers are numbered through the engines of a group; rank 0 is the stage's leader.
        """
        ways = [self.way(member) for member in members]
        return [
            self._joined(member, ways[:number].count(way), ways.count(way), epoch)
            for number, (member, way) in enumerate(zip(members, ways, strict=True))
        ]

    def of_late(self, number: int) -> WeightGroups:
        """Those of late delivery `number`, in host memory, in which one engine is alone with the stages' leaders."""
        named = [stage.of_epoch(number).to_json() for stage in self._connection.late_stages]
        timeout_s = self._config.publish.timeout_s
        return WeightGroups(self._connection.store, 1, 1 + self._workers, named, HOST_BACKEND, timeout_s)

    def _joined(self, member: Member, place: int, count: int, epoch: int) -> WeightGroups:
        """The groups that the stages' leaders lead, of `count` engines, of which this one is the place-th."""
        way = self.way(member)
        backend = HOST_BACKEND if way == "host" else self._connection.backend
        named = [stage.by(way).of_epoch(epoch).to_json() for stage in self._connection.stages]
        rank, world_size = 1 + place * self._workers, 1 + count * self._workers
        return WeightGroups(self._connection.store, rank, world_size, named, backend, self._config.publish.timeout_s)

"""The engines of a publish as the coordinator sees them: the groups that each joins, and whether each got what was sent (I5).

    an engine's digests against the trainers' of the same publish   a skipped or partial load, weights changed on the way, a stale
                                                                     copy that calls itself the new
                                                                     version
    a late engine's against those of the version's publish           a copy kept for late engines that is another version's

What a version's digests say of the weights that train is checked where these are, in
pa_npu.publish.trainer_side. No tolerance: a mismatch is a fault, whatever the learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pa_npu.config.sections.rollout import RolloutConfig
from pa_npu.engines.member import Member
from pa_npu.engines.protocol import LoadedWeights, WeightGroups
from pa_npu.errors import InvariantViolation
from pa_npu.publish.messages import PublishMembers, SentWeights, StageManifest
from pa_npu.weight_transfer import collectives
from pa_npu.weight_transfer.computation import Computation
from pa_npu.weight_transfer.digest import first_difference
from pa_npu.weight_transfer.manifest import Manifest, check_covered
from pa_npu.weight_transfer.transport import (
    HOST_BACKEND,
    Abandonment,
    Way,
    WeightSyncError,
    epoch_name,
)


def check_announced(senders: Sequence[StageManifest]) -> None:
    """Checks that what the senders announce is together each weight once (I5). Stand-ins for
    trainers announce nothing.

    Raises InvariantViolation. Engines refuse it too, but no further attempt announces anything
    else.
    """
    announced = [sender.manifest for sender in senders if sender.manifest]
    try:
        check_covered([Manifest.from_json(manifest) for manifest in announced])
    except WeightSyncError as error:
        raise InvariantViolation(
            f"I5: the trainers announce other weights than they have: {error}; look for what "
            "divides the weights among those that send them"
        ) from None


@dataclass(frozen=True)
class Connection:
    """The address and names under which engines reach the trainers' process groups.

    Args:
        store: host and port of the run's store.
        backend: of the groups.
        stages: what each sender of each pipeline stage announced, stage after stage, for publishes
            to all engines.
        late_stages: the same, for deliveries to one engine inside an iteration.
        device: the trainers' kind.
        computation: what the trainers' modules compute with; None if they do not say it.
    """

    store: tuple[str, int]
    backend: str
    stages: Sequence[StageManifest]
    late_stages: Sequence[StageManifest]
    device: str = ""
    computation: Computation | None = None

    @property
    def has_trainers(self) -> bool:
        """Returns whether trainers have said what they will send.

        Stand-ins for trainers say nothing, and send nothing.
        """
        return any(stage.manifest for stage in self.stages)

    def abandon(self, stages: Sequence[StageManifest], epoch: int, reason: str) -> None:
        """Declares the groups of an epoch abandoned, so that nobody waits in them any longer.

        stages: either of the two sequences above. epoch: the number of the groups.
        """
        for stage in stages:
            name = epoch_name(stage.name, epoch)
            Abandonment(*self.store, name).declare(reason)

    @property
    def sends_late_alike(self) -> bool:
        """Returns whether a late engine gets the tensors, in the types, that all engines get in a
        publish.
        """
        return [stage.manifest for stage in self.late_stages] == [
            stage.manifest for stage in self.stages
        ]


class EngineProcessGroups:
    """Names the groups that engines join, by the way to each engine.

    timeout_s: publish.timeout_s.
    """

    def __init__(self, rollout: RolloutConfig, connection: Connection, timeout_s: float) -> None:
        self._rollout = rollout
        self._connection = connection
        self._num_workers = rollout.tensor_parallel
        self._timeout_s = timeout_s

    def way(self, member: Member) -> Way:
        """Returns how weights reach an engine from the trainers.

        An engine on a trainer's device may not be able to be in a group with that trainer. An
        engine on devices of another kind is reached through host memory: no other backend is sure
        to connect them.
        """
        settings = self._rollout.settings_of(member.index)
        if settings.device_kind not in (None, self._connection.device):
            return "host"
        shares = collectives.rules(self._connection.backend).shares_device
        return "host" if member.shared and not shares else "group"

    def receivers(self, members: Sequence[Member], epoch: int) -> PublishMembers:
        """Returns how many workers the trainers send to, by the way to them."""
        ways = [self.way(member) for member in members]
        return PublishMembers(
            epoch,
            self._num_workers * ways.count("group"),
            self._num_workers * ways.count("host"),
        )

    def of_members(self, members: Sequence[Member], epoch: int) -> list[WeightGroups]:
        """Returns the groups that each member joins, one per sender, in the order of the members.

        Workers are numbered through the engines of a group; rank 0 is the sender.
        """
        ways = [self.way(member) for member in members]
        joined = []
        for number, way in enumerate(ways):
            num_before = self._num_workers * ways[:number].count(way)
            num_workers = self._num_workers * ways.count(way)
            backend = HOST_BACKEND if way == "host" else self._connection.backend
            joined.append(
                WeightGroups(
                    self._connection.store,
                    1 + num_before,
                    1 + num_workers,
                    [stage.group(epoch, way) for stage in self._connection.stages],
                    backend,
                    self._timeout_s,
                )
            )
        return joined

    def of_late(self, number: int) -> WeightGroups:
        """Returns the groups of late delivery `number`, which go through host memory.

        One engine is alone in each of them with a sender.
        """
        return WeightGroups(
            self._connection.store,
            1,
            1 + self._num_workers,
            [stage.group(number) for stage in self._connection.late_stages],
            HOST_BACKEND,
            self._timeout_s,
        )


class ArrivalCheck:
    """Compares digests of what was sent and what arrived, bucket by bucket.

    applies: whether there is anything to compare.
    """

    def __init__(self, connection: Connection) -> None:
        self.applies = connection.has_trainers
        self._stages = connection.stages
        self._late_stages = connection.late_stages
        # the last version and its digests, per sender
        self._published: tuple[int, tuple[str, ...]] | None = None

    def check(
        self, version: int, sent: Sequence[SentWeights], loaded: Mapping[str, LoadedWeights]
    ) -> None:
        """Compares after a publish. Raises InvariantViolation.

        sent: per sender. loaded: by the engine's name.
        """
        self._compare(version, self._stages, sent, loaded)
        self._published = (version, tuple(stage.digests for stage in sent))

    def check_late(
        self, version: int, sent: Sequence[SentWeights], loaded: Mapping[str, LoadedWeights]
    ) -> None:
        """Compares after a delivery to one engine inside the iteration of `version`."""
        self._compare(version, self._late_stages, sent, loaded)
        if self._published is None or self._published[0] != version:
            return
        for number, (late, regular) in enumerate(zip(self._late_stages, self._stages, strict=True)):
            # a copy of another type is cut into other buckets, whose digests cannot be equal
            if late.manifest != regular.manifest:
                continue
            difference = first_difference(sent[number].digests, self._published[1][number])
            if difference is not None:
                raise InvariantViolation(
                    f"I5: {_sender(late)} sent a late engine other weights than all others got as "
                    f"weight version {version}, first in {_bucket(late, difference)}; the trainers "
                    "changed or never refreshed what they keep for late engines"
                )

    def _compare(
        self,
        version: int,
        stages: Sequence[StageManifest],
        sent: Sequence[SentWeights],
        loaded: Mapping[str, LoadedWeights],
    ) -> None:
        for engine, weights in loaded.items():
            if not weights.digests:
                raise InvariantViolation(
                    f"I5: engine {engine} does not say what it received as weight version "
                    f"{version}, so that nothing shows that it loaded it; engine and trainers must "
                    "run the same pa_npu"
                )
            for worker, digests in enumerate(weights.digests):
                for number, stage in enumerate(stages):
                    arrived = digests[number] if number < len(digests) else ""
                    difference = first_difference(sent[number].digests, arrived)
                    if difference is None:
                        continue
                    raise InvariantViolation(
                        f"I5: engine {engine}, worker {worker}, did not receive weight version "
                        f"{version} as {_sender(stage)} sent it: {_bucket(stage, difference)} has "
                        "another digest; look for what changes or skips weights between the "
                        "broadcast and the engine's loader"
                    )


def _sender(stage: StageManifest) -> str:
    return Manifest.from_json(stage.manifest).sender


def _bucket(stage: StageManifest, index: int) -> str:
    buckets = Manifest.from_json(stage.manifest).buckets
    if index >= len(buckets):
        return f"bucket {index + 1}, of which the manifest knows {len(buckets)}"
    return f"bucket {index + 1} of {len(buckets)} ({buckets[index].summary})"

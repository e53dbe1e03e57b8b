"""The trainer's end of a weight publish: one Publisher per rank that takes part. publish.senders says who sends.

    every rank that takes part    Publisher(...)             knows its place
    senders                       manifest() -> store        what will be sent, for the coordinator to hand to the engines
    senders                       connect(members)           one group with all engine workers, blocks until they are there
    every rank that takes part    publish(version, members)  connects where members have changed, then makes bucket i+1 while
                                                             bucket i is on the wire

With publish.senders=leader one rank of each stage sends, and `publish` is collective over the ranks
that hold the stage's shards, which gather buckets on it. Otherwise each rank sends its own shards,
and no weights move between trainers.

An engine that dies or joins changes the members, and with them the epoch. After a publish that
raised WeightSyncError, which it does on senders alone, the weights are untouched: publish again to
the members that are left.

What never changes (Manifest.sent_once) is sent with the first version of an epoch only; contents()
and digests go on to speak of it, so that an engine which lost it is found.

The senders publish independently of each other; the engines take their buckets in turn.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from pa_npu.errors import DeadlineExceeded
from pa_npu.publish.messages import PublishMembers, StageManifest
from pa_npu.weight_transfer import transport
from pa_npu.weight_transfer.digest import Digests, KeptDigests
from pa_npu.weight_transfer.manifest import Manifest

_GATHER_MARGIN_S = 10.0
_HOST = torch.device("cpu")


@dataclass(frozen=True)
class PublishStats:
    """Reports one publish as this rank saw it.

    Args:
        seconds: that it took.
        bytes: that this rank sent to each engine worker.
        wire_wait_s: the part of `seconds` for which a sender waited for the engines.
        digests: of this rank's buckets (Digests.read), also of those that were sent before; empty
            if it has none.
        policy: digest of the weights that this rank trains of what it sends. TrainerPublish adds
            it, to see that what is sent follows them.
    """

    seconds: float = 0.0
    bytes: int = 0
    wire_wait_s: float = 0.0
    digests: str = ""
    policy: str = ""


class WeightSource(Protocol):
    """This rank's part in sending a stage's weights, as the training backend hands it out.

    If one rank sends what several hold, all of them read it together.
    """

    @property
    def is_leader(self) -> bool:
        """Returns whether this rank sends weights of its stage: all, or a share of them."""

    @property
    def manifest(self) -> Manifest:
        """Returns the manifest of what this rank sends, or its leader."""

    def contents(self) -> dict[str, str]:
        """Returns the ordered contents of this rank's part of each of the manifest's tensors
        (weight_transfer.contents).

        It reads the model that trains, not what was sent. A tensor's contents are those of all
        ranks together. A rank that sends a share sums up that share. Collective over the ranks
        that hold the weights.
        """

    def buckets(
        self, deadline: transport.Deadline, *, whole: bool = True
    ) -> Iterator[torch.Tensor | None]:
        """Yields the manifest's buckets in order: a flat tensor on a sender, None on ranks that
        give it their parts.

        whole: False leaves out those that are sent once. Collective over the ranks that hold the
        weights. A yielded bucket is read only, and overwritten when the one after the next is asked
        for.
        """


class Publisher:
    """Sends weights of a stage to all engine workers. Close it."""

    def __init__(
        self,
        source: WeightSource | None,
        *,
        store_host: str,
        store_port: int,
        timeout_s: float,
        backend: str,
        device: torch.device,
        scope: str = "",
    ) -> None:
        """`source` is read at each publish; None on a rank that has no part in one.

        The store is any c10d TCPStore that engines reach too. `scope` begins the groups' names;
        with "a/" their publishes are given up with Abandonment(..., "a").
        """
        self._source = source
        self._store = (store_host, store_port)
        self._epoch: int | None = None
        self._begun: int | None = None  # the version that was sent last in this group
        self._whole_epoch: int | None = None  # in which all buckets were sent
        self._kept_digests = KeptDigests([] if source is None else source.manifest.once)
        self._abandonment: transport.Abandonment | None = None
        self._timeout_s = timeout_s
        self._backend = backend
        self._device = device
        self._wires: list[_Wire] = []
        # A group's name serves once, in the store and in every member: a publisher that starts
        # again must not meet its own past.
        self._name = f"{scope}publish-{self._stage}-{uuid.uuid4().hex[:12]}"

    @property
    def is_leader(self) -> bool:
        """Returns whether this rank sends weights, and puts manifest() into the store."""
        return self._source is not None and self._source.is_leader

    @property
    def _stage(self) -> int | None:
        return self._source.manifest.stage if self._source is not None else None

    @property
    def _sender(self) -> str:
        return "no stage" if self._source is None else self._source.manifest.sender

    @property
    def num_bytes(self) -> int:
        """Bytes of the manifest's weights, what the first publish sends; 0 on ranks that take no
        part.
        """
        return self._source.manifest.num_bytes if self._source is not None else 0

    def manifest(self) -> StageManifest:
        """Returns what an engine needs to join this sender and to read its buckets."""
        assert self._source is not None, "this rank takes no part"
        return StageManifest(self._name, self._source.manifest.to_json())

    def connect(self, members: PublishMembers) -> None:
        """Forms the group of this epoch.

        Ranks that do not send return at once, as does a sender that is in it already. Raises
        DeadlineExceeded with the missing workers.
        """
        if not self.is_leader or members.epoch == self._epoch:
            return
        self.close()
        self._abandonment = transport.Abandonment(
            *self._store, transport.epoch_name(self._name, members.epoch)
        )
        ways: dict[transport.Way, int] = {"group": members.workers, "host": members.host_workers}
        for way, workers in ways.items():
            if workers:
                name = transport.group_name(self._name, members.epoch, way)
                self._wires.append(self._join(way, name, workers))
        self._epoch = members.epoch
        self._begun = None

    def _join(self, way: transport.Way, name: str, workers: int) -> _Wire:
        """Joins the group `name` as its rank 0."""
        backend = self._backend
        device = self._device
        if way == "host":
            backend = transport.HOST_BACKEND
            device = _HOST
        group = transport.join_group(
            *self._store,
            name,
            rank=0,
            size=1 + workers,
            backend=backend,
            device=device,
            timeout_s=self._timeout_s,
            describe=f"{self._sender} publishes to {_workers(workers, name)}",
        )
        return _Wire(group, workers, device, name)

    def publish(self, version: int, members: PublishMembers) -> PublishStats:
        """Sends this rank's weights as `version` to these members: all of them if it is the first
        version of their epoch, otherwise all but what is sent once.

        Collective over the ranks whose weights one of them sends; ranks that take no part return at
        once. Raises WeightSyncError on a sender that lost an engine or was told to give up, and
        DeadlineExceeded if that was not noticed in time. The group is dropped then, and the engines
        that are left hold no version.
        """
        if self._source is None:
            return PublishStats()
        start = time.perf_counter()
        # peers that gather come after the leader's join and its wire, whose messages name the
        # engines
        deadline = transport.Deadline(2 * self._timeout_s + _GATHER_MARGIN_S)
        wire_wait_s = 0.0
        digests = Digests()
        whole = members.epoch != self._whole_epoch
        if self.is_leader:
            wire_wait_s = self._send(version, members, digests, deadline, whole)
        else:
            for _ in self._source.buckets(deadline, whole=whole):
                pass
        self._whole_epoch = members.epoch
        if not self.is_leader:
            return PublishStats(time.perf_counter() - start, 0, wire_wait_s, "")
        sent = sum(bucket.num_bytes for bucket in self._source.manifest.sent(whole=whole))
        of_all = self._kept_digests.whole(digests.read())
        return PublishStats(time.perf_counter() - start, sent, wire_wait_s, of_all)

    def contents(self) -> dict[str, str]:
        """Returns this rank's part of the contents of what is trained, by tensor; see WeightSource.

        It is called after `publish`, also after one that raised WeightSyncError.
        """
        return {} if self._source is None else self._source.contents()

    def close(self) -> None:
        """Leaves the group."""
        self._epoch = None
        for wire in self._wires:
            transport.leave_group(wire.group)
        self._wires = []

    def _drop(self) -> None:
        """Forgets groups of which one lost a member."""
        for wire in self._wires:
            transport.drop_group(wire.group, wire.device)
        self._wires = []
        self._epoch = None

    def _send(
        self,
        version: int,
        members: PublishMembers,
        digests: Digests,
        deadline: transport.Deadline,
        whole: bool,
    ) -> float:
        """Joins if members have changed, then broadcasts header and buckets.

        Returns the seconds of waiting for the wire.
        """
        assert self._source is not None
        buckets = self._source.buckets(deadline, whole=whole)
        try:
            self.connect(members)
            assert self._abandonment is not None
            wire = transport.Deadline(self._timeout_s, self._abandonment.reason)
            return self._broadcast(buckets, version, digests, wire, whole)
        except (transport.WeightSyncError, DeadlineExceeded, RuntimeError):
            self._drop()
            # ranks that gather with this one are somewhere in that and must come to its end
            for _ in buckets:
                pass
            raise

    def _broadcast(
        self,
        buckets: Iterator[torch.Tensor | None],
        version: int,
        digests: Digests,
        deadline: transport.Deadline,
        whole: bool,
    ) -> float:
        assert self._source is not None
        manifest = self._source.manifest
        plan = manifest.sent(whole=whole)
        header = torch.tensor(
            [version, manifest.digest, len(plan)], dtype=torch.int64, device=self._device
        )
        for wire in self._wires:
            transport.announce_begin(wire.group, version, self._begun)
        self._begun = version
        on_the_wire = self._start(header)
        sending = "the header"
        waited = 0.0
        for index, buffer in enumerate(buckets):
            assert buffer is not None
            works = self._start(buffer)
            digests.add(buffer)
            # Bucket i-1 must have left before the next step of the loop packs bucket i+1 into its
            # buffer.
            waited += self._wait(on_the_wire, deadline, version, sending)
            on_the_wire = works
            sending = f"bucket {index + 1} of {len(plan)} ({plan[index].summary})"
        return waited + self._wait(on_the_wire, deadline, version, sending)

    def _start(self, tensor: torch.Tensor) -> list[dist.Work]:
        """Starts a broadcast on every wire.

        Those of the tensor's own memory begin first, so that the copy to host memory, which the
        other works keep, is made meanwhile.
        """
        here = tensor.device.type
        direct = [wire for wire in self._wires if wire.device.type == here]
        copied = [wire for wire in self._wires if wire.device.type != here]
        works = [transport.broadcast(wire.group, tensor) for wire in direct]
        if copied:
            host = tensor.to(_HOST)
            works += [transport.broadcast(wire.group, host) for wire in copied]
        return works

    def _wait(
        self, works: Sequence[dist.Work], deadline: transport.Deadline, version: int, sending: str
    ) -> float:
        start = time.perf_counter()
        for work, wire in zip(works, self._wires, strict=True):
            transport.wait(
                work,
                deadline,
                f"publish of version {version}, {self._sender}, {sending}: broadcast to "
                f"{_workers(wire.workers, wire.name)}",
                "check in the engines' logs that each is alive and in pa_receive of this version, "
                "or raise publish.timeout_s",
            )
        return time.perf_counter() - start


@dataclass(frozen=True)
class _Wire:
    """A group that this rank sends in.

    workers: engine workers that receive. device: whose memory its tensors are in.
    """

    group: dist.ProcessGroup
    workers: int
    device: torch.device
    name: str


def _workers(count: int, group: str) -> str:
    return f"engine workers (ranks 1 to {count} of group {group})"

"""ReplicaFeed: brings one rank the groups of its replica in one iteration, while training runs.

One reader of a replica takes each group from the buffer once and passes it to the replica's other
ranks, if there are any, over the device's collectives. Every rank has a feed, a thread that goes
through the iteration's slots in order, ahead of the thread that trains:

    all ranks   wait for the slot's key in the buffer   (our deadline, with no collective open)
    the reader  reads the bytes: first tensor-parallel rank of the first pipeline stage
    all ranks   broadcast: sizes, then the bytes
    all ranks   parse, and prepare the group's pieces, while the groups before it train

Why that cannot deadlock: the process groups belong to the feed and are used by this thread alone,
in slot order, so its collectives match. Once a key is there, every rank enters the broadcast
wherever its training is; the device's work is queued on a stream that does not wait for training.
Training waits for groups. A feed waits for training only in order to stay at most `ahead` groups in
front of it, and a stage's turn for a group depends on earlier groups alone. So a pipeline stage
that takes a microbatch sooner than the next stage does still gets it. Before a key is there nobody
is in a collective, and a long wait trips no watchdog.

A rank that dies ends its peers' broadcast, at the latest by the process group's timeout. An error
in the feed is raised when training asks for that slot, and training's own wait has a deadline too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from pa_npu.config.mesh import LONE_RANK, Mesh
from pa_npu.errors import DeadlineExceeded, PaNpuError
from pa_npu.samples.group import Group
from pa_npu.samples.notice import Notice
from pa_npu.samples.rollout_buffer import RolloutBuffer
from pa_npu.samples.stems import Branch, Stem


@dataclass(frozen=True)
class Traffic:
    """The traffic by which groups came to one replica.

    reads, buffer_bytes: reads from the buffer, and the bytes that came from it.
    head_bytes: bytes from the store on the head, which are the groups or only their sizes.
    collective_bytes: bytes that the replica's ranks got over collectives, counted by receiver.
    """

    reads: int = 0
    buffer_bytes: int = 0
    head_bytes: int = 0
    collective_bytes: int = 0

    def plus(self, added: Traffic) -> Traffic:
        return Traffic(
            reads=self.reads + added.reads,
            buffer_bytes=self.buffer_bytes + added.buffer_bytes,
            head_bytes=self.head_bytes + added.head_bytes,
            collective_bytes=self.collective_bytes + added.collective_bytes,
        )

    def since(self, earlier: Traffic) -> Traffic:
        return Traffic(
            reads=self.reads - earlier.reads,
            buffer_bytes=self.buffer_bytes - earlier.buffer_bytes,
            head_bytes=self.head_bytes - earlier.head_bytes,
            collective_bytes=self.collective_bytes - earlier.collective_bytes,
        )


@dataclass(frozen=True)
class Parsed:
    """A group and the pieces that it is trained in, which remember their layouts; or the notice of
    a group that is trained by rule, with None for each place that a filler takes instead.

    advantages: those of each sample's trained tokens, if they were checked to be the group's
    credit.
    content: digest of the group as it was read; empty for a notice.
    """

    group: Group | Notice
    pieces: Sequence[Group | Stem | Branch | None]
    advantages: list[np.ndarray] | None = None
    content: str = ""


Lost = Callable[[int], None]
"""Raises InvariantViolation if a slot is empty although the coordinator has filled it. Called while
the slot is waited for.
"""

MAX_WAIT_S = 1.0
"""A wait for a slot is cut into waits of this length; in between the feed checks whether the slot
is lost, or no longer wanted.
"""

Parse = Callable[[bytes], Parsed]
"""Parses a group's bytes, while training runs."""


class GroupsNotPassed(PaNpuError):
    """A group could not be passed between the ranks of its replica."""


@dataclass(frozen=True)
class ReplicaLinks:
    """The process groups over which the ranks of one replica pass groups.

    replica: all ranks of the replica, made for this alone; its first member is the reader. None if
    the replica is one rank.
    tensor: the ranks that take microbatches in step; None if a stage is one rank.
    mesh: the trainers' mesh.
    stream: entered by the feed's thread, see Platform.detached_stream.
    """

    replica: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    mesh: Mesh = LONE_RANK
    stream: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def size(self) -> int:
        return 1 if self.replica is None else dist.get_world_size(self.replica)

    @property
    def reads(self) -> bool:
        return self.replica is None or dist.get_rank(self.replica) == 0

    @property
    def ahead(self) -> int:
        """Number of groups that a rank may hold beyond the one it trains: the first pipeline stage
        is this far in front of the last one.
        """
        return self.mesh.pipeline


@dataclass(eq=False, repr=False)
class ReplicaFeed:
    """One rank's feed of one iteration, with a thread of its own; close it.

    groups: how many groups the replica gets in this iteration.
    traffic: traffic of the groups taken so far, equal on all ranks of the replica.
    """

    buffer: RolloutBuffer
    links: ReplicaLinks
    _: KW_ONLY
    replica: int
    iteration: int
    groups: int
    timeout_s: float
    parse: Parse
    lost: Lost
    device: torch.device
    traffic: Traffic = field(default=Traffic(), init=False)

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._arrived: dict[int, tuple[Parsed, Traffic] | Exception] = {}
        self._next = 0  # the slot that training takes next
        self._passing: int | None = None  # the slot that is in the buffer and on its way
        self._closed = False
        # no executor's thread: the end of the program would wait for a feed whose peer is gone
        threading.Thread(
            target=self._run, name=f"groups of iteration {self.iteration}", daemon=True
        ).start()

    def next_group(self, slot: int, wait: bool) -> tuple[Parsed, float] | None:
        """Returns the slot's group, and the seconds that this rank stood still for it. Slots are
        taken in order, by one thread.

        wait: without it, returns None for a group that has not arrived, on all ranks of a
        tensor-parallel group alike.

        Raises DeadlineExceeded (no group in time), GroupFormatError (damaged bytes),
        GroupsNotPassed (a rank is gone).
        """
        if not wait and not self._leader_finds(slot):
            return None
        start_s = time.monotonic()
        self._wait_until_passed(slot)
        with self._changed:
            arrived = self._arrived.pop(slot)
            self._next = slot + 1
            self._changed.notify_all()
        if isinstance(arrived, Exception):
            raise arrived
        parsed, traffic = arrived
        self.traffic = self.traffic.plus(traffic)
        return parsed, time.monotonic() - start_s

    def arrives(self, slot: int, within_s: float) -> bool:
        """Waits for the slot's group, `within_s` at most, and returns whether it has arrived. An
        error of the feed counts as an arrival. Asks the store nothing.
        """
        with self._changed:
            return self._changed.wait_for(lambda: slot in self._arrived, within_s)

    def _wait_until_passed(self, slot: int) -> None:
        deadline_s = time.monotonic() + self.timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            with self._changed:
                has_arrived = self._changed.wait_for(
                    lambda: slot in self._arrived, min(left_s, MAX_WAIT_S)
                )
                if has_arrived:
                    return
                if left_s <= 0:
                    self._closed = True
                    raise self._too_late(slot)
            self.lost(slot)

    def close(self) -> None:
        """Ends the feed's thread; nothing more will be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _leader_finds(self, slot: int) -> bool:
        """Returns whether the tensor-parallel leader finds the slot filled; a collective of the
        thread that trains.
        """
        group = self.links.tensor
        leads = group is None or dist.get_rank(group) == 0
        with self._changed:
            is_filled = slot in self._arrived
        is_filled = leads and (is_filled or self.buffer.ready(self.iteration, self.replica, slot))
        if group is None:
            return is_filled
        answer = torch.tensor([is_filled], dtype=torch.int64, device=self.device)
        dist.broadcast(answer, src=dist.get_global_rank(group, 0), group=group)
        return bool(answer.item())

    def _run(self) -> None:
        slot = 0
        try:
            with self.links.stream():
                for slot in range(self.groups):
                    if not self._wait(slot):
                        return
                    self._hand_over(slot, self._pass(slot))
        except Exception as error:
            self._hand_over(slot, error)

    def _wait(self, slot: int) -> bool:
        """Waits until the slot is filled and not too far ahead; False if nobody wants it anymore."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or slot - self._next <= self.links.ahead)
        while not self._closed:
            try:
                self.buffer.wait(
                    self.iteration, self.replica, slot, min(self.timeout_s, MAX_WAIT_S)
                )
                return True
            except DeadlineExceeded:
                # nobody may be waiting for it yet: the deadline is that of the thread that trains
                continue
        return False

    def _hand_over(self, slot: int, arrived: tuple[Parsed, Traffic] | Exception) -> None:
        with self._changed:
            self._arrived[slot] = arrived
            self._passing = None
            self._changed.notify_all()

    def _pass(self, slot: int) -> tuple[Parsed, Traffic]:
        self._passing = slot
        links = self.links
        data = b""
        from_head = 0
        if links.reads:
            head_bytes_before = self.buffer.head_bytes
            data = self.buffer.read_bytes(self.iteration, self.replica, slot)
            from_head = self.buffer.head_bytes - head_bytes_before
        if links.replica is None:
            return self.parse(data), Traffic(1, len(data), from_head)
        try:
            sizes = torch.tensor([len(data), from_head], dtype=torch.int64, device=self.device)
            dist.broadcast(sizes, src=dist.get_global_rank(links.replica, 0), group=links.replica)
            num_bytes, from_head = sizes.tolist()
            data = self._broadcast(data, num_bytes, links.replica)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise GroupsNotPassed(
                f"the group of slot {slot}, replica {self.replica}, iteration {self.iteration} "
                f"could not be passed between the replica's ranks ({reason}); one of them has "
                "probably ended, see the trainers' logs"
            ) from error
        passed = (sizes.nbytes + num_bytes) * (links.size - 1)
        return self.parse(data), Traffic(1, num_bytes, from_head, passed)

    def _broadcast(self, data: bytes, num_bytes: int, group: dist.ProcessGroup) -> bytes:
        """Returns the reader's data on all members. data: empty on ranks other than the reader."""
        if self.links.reads:
            payload = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8)).to(self.device)
        else:
            payload = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        dist.broadcast(payload, src=dist.get_global_rank(group, 0), group=group)
        return data if self.links.reads else payload.cpu().numpy().tobytes()

    def _too_late(self, slot: int) -> DeadlineExceeded:
        waited_for = f"the group of slot {slot}, replica {self.replica}, iteration {self.iteration}"
        limit = f"deadline of {self.timeout_s:g} s reached"
        if self._passing == slot:
            return DeadlineExceeded(
                f"waited for {waited_for}, which is in the buffer, to be read and passed between "
                f"the replica's ranks: {limit}; one of them has probably ended or hangs, see the "
                "trainers' logs"
            )
        return DeadlineExceeded(f"waited for {waited_for}, from the coordinator: {limit}")

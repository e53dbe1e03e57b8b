"""A publish group without a network: the sender's memory, mapped by receivers of the same machine. Imports torch only.

NCCL and HCCL cannot have two ranks of a group on one device, so an engine on a trainer's device cannot be in a group with it. It
maps two buffers ("slots") of the sender instead, which take turns, and copies each message out before it says so:

    sender (rank 0)                              receivers (ranks 1..)                    keys under the group's prefix
    export both slots                       ->   map them                                 handles, opened/RANK
    wait until taken >= n - 2 by all
    copy message n into slot n % 2, device done
    say n                                   ->   copy it out, device done                 filled
                                            <-   say n                                    taken/RANK

Both copies are over before a number is said, so neither side ever reads what the other writes. Messages are numbered from 1 for the
life of the group. To pa_npu.weight_transfer.transport it is a group like any other: `broadcast` returns a work that completes, and
whoever waits for it brings the deadline and notices that a publish was given up. What a handle is: memory_handles.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from pa_npu.errors import DeadlineExceeded
from pa_npu.weight_transfer import memory_handles
from pa_npu.weight_transfer.transport import Abandonment, Deadline, WeightSyncError, join_failed, wait_for_members

NUM_SLOTS = 2
# Views of a slot as any type begin at a multiple of its size; devices copy whole lines of so many bytes fastest.
_ALIGNMENT = 512
_POLL_S = 0.002
_FILLED, _HANDLES = "filled", "handles"


class ExportsMemory(Protocol):
    """The part of a sender's platform that exports memory (pa_npu.platform.base.Platform)."""

    @property
    def handle_kind(self) -> str:
        """The kind of memory_handles that the platform gives."""

    def exportable_memory(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] on the current device, of which a handle can be made."""


@dataclass(frozen=True)
class Slots:
    """The sender's memory, kept for as long as it sends: each of its groups exports it anew, so that what a receiver that died
    had mapped is not lost."""

    memory: torch.Tensor
    kind: str

    @classmethod
    def of(cls, platform: ExportsMemory, message_bytes: int) -> Slots:
        """For messages of at most so many bytes. Raises WeightSyncError where the device has no room for them."""
        num_bytes = slot_bytes(message_bytes)
        try:
            return cls(platform.exportable_memory(NUM_SLOTS * num_bytes), platform.handle_kind)
        except RuntimeError as error:
            raise WeightSyncError(
                f"{NUM_SLOTS} buffers of {num_bytes} bytes, through which engines on the trainers' devices get weights, could not "
                f"be made ({str(error).splitlines()[0]}); set publish.shared_through=host"
            ) from error

    def view(self, number: int) -> torch.Tensor:
        """The slot of message `number`."""
        return self.memory.view(NUM_SLOTS, -1)[number % NUM_SLOTS]


def slot_bytes(message_bytes: int) -> int:
    return -(-message_bytes // _ALIGNMENT) * _ALIGNMENT


class MemoryGroup:
    """One member of such a group; made by `offer` and `take`. A broadcast is always from rank 0, as everything in a publish is."""

    def __init__(self, store: dist.Store, rank: int, size: int, slots: Slots) -> None:
        self._store = store
        self._rank = rank
        self._slots = slots
        self._receivers = [f"taken/{receiver}" for receiver in range(1, size)]
        self._number = 0  # of the last message that was begun

    @property
    def slots(self) -> Slots:
        return self._slots

    def get_group_store(self) -> dist.Store:
        """As a torch group's: pa_npu.weight_transfer.progress keeps its keys there."""
        return self._store

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Transfer:
        """The sender's begins with the copy, for which the last but one must be over. tensor: contiguous."""
        assert root == 0, "weights come from rank 0"
        self._number += 1
        number, place = self._number, self._place(tensor, self._number)
        if self._rank == 0:
            if self.taken_by_all() < number - NUM_SLOTS:
                raise WeightSyncError(f"message {number} would overwrite one that a receiver has not taken yet")
            place.copy_(tensor)
            _synchronize(tensor.device)
            self._store.set(_FILLED, str(number))
            return Transfer(lambda: self.taken_by_all() >= number)
        return Transfer(lambda: self._take(tensor, place, number))

    def taken_by_all(self) -> int:
        """The last message that every receiver has."""
        return min((int(value) for value in self._store.multi_get(self._receivers)), default=self._number)

    def unmap(self) -> None:
        """The end of it, for transport.leave_group and drop_group. The sender's memory stays, as other groups use it too."""
        self._slots = Slots(torch.empty(0, dtype=torch.uint8), self._slots.kind)

    def _take(self, tensor: torch.Tensor, place: torch.Tensor, number: int) -> bool:
        if int(self._store.get(_FILLED)) < number:
            return False
        tensor.copy_(place)
        _synchronize(tensor.device)
        self._store.set(f"taken/{self._rank}", str(number))
        return True

    def _place(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """The view of a slot in which a message lies, with the tensor's type and shape."""
        slot = self._slots.view(number)
        if tensor.nbytes > len(slot):
            raise WeightSyncError(
                f"a message of {tensor.nbytes} bytes does not fit into the sender's slots of {len(slot)}"
            )
        return slot[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class Transfer:
    """A message on its way, with what transport.wait asks of a torch.distributed.Work."""

    def __init__(self, step: Callable[[], bool]) -> None:
        self._step = step
        self._done = False

    def is_completed(self) -> bool:
        """Does what this side has to do, when it can be done."""
        if not self._done:
            try:
                self._done = self._step()
            except RuntimeError as error:
                raise WeightSyncError(f"weights handed over in memory: {str(error).splitlines()[0]}") from error
        return self._done

    def wait(self) -> bool:
        return self._done


@dataclass(frozen=True)
class Meeting:
    """The place where a group forms, and with whom: a store that all reach, its name there, this member's rank, and until when."""

    store: tuple[str, int]
    name: str
    rank: int
    size: int
    timeout_s: float
    describe: str


def offer(meeting: Meeting, slots: Slots) -> MemoryGroup:
    """The sender's side: returns when every receiver has mapped the slots.

    Raises DeadlineExceeded, with the ranks that are missing, or WeightSyncError.
    """
    store, deadline = _meet(meeting)
    receivers = range(1, meeting.size)
    try:
        offered = {
            "machine": memory_handles.machine(),
            "kind": slots.kind,
            "bytes": len(slots.memory),
            "handle": memory_handles.export(slots.memory, slots.kind),
        }
        store.set(_FILLED, "0")
        store.set(_HANDLES, json.dumps(offered))
        for receiver in receivers:
            _wait_for_key(
                store, f"opened/{receiver}", deadline, f"{meeting.describe}: rank {receiver} maps this process's memory"
            )
            if problem := store.get(f"opened/{receiver}").decode():
                raise WeightSyncError(f"{meeting.describe}: {problem}")
    except RuntimeError as error:
        raise join_failed(*meeting.store, meeting.size, meeting.describe, "sharing memory", error) from error
    return MemoryGroup(store, 0, meeting.size, slots)


def take(meeting: Meeting, device: torch.device) -> MemoryGroup:
    """A receiver's side. device: where it copies messages to, and through which it maps the sender's memory.

    Raises as `offer`; what keeps this process from mapping the memory is told the sender too.
    """
    store, deadline = _meet(meeting)
    try:
        _wait_for_key(store, _HANDLES, deadline, f"{meeting.describe}: the sender offers its memory")
        offered = json.loads(store.get(_HANDLES))
        opened, problem = _open(offered, device)
        store.set(f"taken/{meeting.rank}", "0")
        store.set(f"opened/{meeting.rank}", f"rank {meeting.rank} {problem}" if problem else "")
    except RuntimeError as error:
        raise join_failed(*meeting.store, meeting.size, meeting.describe, "sharing memory", error) from error
    if problem or opened is None:
        raise WeightSyncError(f"{meeting.describe}: it {problem}")
    return MemoryGroup(store, meeting.rank, meeting.size, Slots(opened, offered["kind"]))


def _open(offered: dict[str, object], device: torch.device) -> tuple[torch.Tensor | None, str]:
    """(the sender's memory, why not)."""
    if offered["machine"] != memory_handles.machine():
        return None, "is on another machine than the trainer that sends; set publish.shared_through=host"
    handle, kind, num_bytes = offered["handle"], str(offered["kind"]), offered["bytes"]
    assert isinstance(handle, list) and isinstance(num_bytes, int)
    try:
        return memory_handles.open_memory(handle, kind, num_bytes, device), ""
    except (RuntimeError, ValueError, TypeError, AttributeError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return None, (
            f"cannot map the trainer's memory of kind {kind} ({reason}); both must be in one container and of one user, and two "
            f"devices must reach each other's memory; else set publish.shared_through=host"
        )


def _meet(meeting: Meeting) -> tuple[dist.Store, Deadline]:
    deadline = Deadline(meeting.timeout_s, Abandonment(*meeting.store, meeting.name).reason)
    try:
        client = dist.TCPStore(*meeting.store, is_master=False, wait_for_workers=False)
        store = dist.PrefixStore(meeting.name, client)
        wait_for_members(store, meeting.rank, meeting.size, "", deadline, meeting.describe)
    except RuntimeError as error:
        raise join_failed(*meeting.store, meeting.size, meeting.describe, "sharing memory", error) from error
    return store, deadline


def _wait_for_key(store: dist.Store, key: str, deadline: Deadline, what: str) -> None:
    while not store.check([key]):
        if deadline.remaining_s <= 0:
            raise DeadlineExceeded(
                f"{what}: not done within {deadline.seconds:g} s; look at both logs, or raise publish.timeout_s"
            )
        if reason := deadline.given_up():
            raise WeightSyncError(f"{what}: given up: {reason}")
        time.sleep(_POLL_S)


def _synchronize(device: torch.device) -> None:
    """Until what this thread has queued on the device is done."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()

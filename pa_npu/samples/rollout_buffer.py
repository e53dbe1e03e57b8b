"""RolloutBuffer: where the coordinator puts groups and the trainer's replicas take them, slot by slot.

Life of a slot (iteration, replica, slot):

    coordinator   put ------------.
    every rank              wait -+-> [the replica's reader reads, and passes it to the others] -> done
    last rank                                                                                      done -> key removed

All ranks of a replica wait for the key, so the key may go only when each of them has seen it: `readers` is the number
of ranks of a replica (tensor x pipeline parallel), and every rank calls `done` once per slot, after it has the group.

What is filled, and who is done, is always in the store that the launcher hosts on the head; the groups themselves lie there too,
or elsewhere (`Payloads`), in shards on the nodes.
"""

from __future__ import annotations

from typing import Protocol

from pa_npu.control.channel import StoreChannel
from pa_npu.errors import InvariantViolation, PaNpuError
from pa_npu.samples.columns import NONE, RunColumns
from pa_npu.samples.group import Group
from pa_npu.samples.wire import from_bytes, to_bytes


class RolloutBuffer(Protocol):
    """The interface of a data plane to the coordinator (put) and trainer ranks (all others).

    head_bytes: what this has read from the store on the head so far. columns: those of the run, and which of them are read here.
    """

    readers: int
    head_bytes: int
    columns: RunColumns

    def put(self, group: Group, replica: int, slot: int) -> None:
        """Makes a group available to a replica as its slot-th group of `group.iteration`, with the columns that the coordinator
        makes. Each slot once (I2). Raises GroupFormatError for a column that is missing or unknown."""

    def wait(self, iteration: int, replica: int, slot: int, timeout_s: float) -> float:
        """Waits until the slot is filled; returns the seconds waited.

        Args:
            iteration: from 0.
            replica: that trains the group.
            slot: number of the group among the replica's of this iteration, from 0.
            timeout_s: of this wait.

        Raises:
            DeadlineExceeded: the slot is not filled after timeout_s.
        """

    def ready(self, iteration: int, replica: int, slot: int) -> bool:
        """Whether the slot is filled, without waiting."""

    def read_bytes(self, iteration: int, replica: int, slot: int) -> bytes:
        """The wire format of a filled slot."""

    def read(self, iteration: int, replica: int, slot: int) -> Group:
        """The group of a filled slot."""

    def done(self, iteration: int, replica: int, slot: int) -> None:
        """This rank needs the slot no more; the last of `readers` calls removes it."""

    def written(self, version: int) -> RolloutBuffer:
        """Beside this, in the same place: what has been written before `version`, slot by dispatch index, for one rank to take."""


class Payloads(Protocol):
    """A place for groups that the store knows of. A group put under a key is there for `get` once `put` returns, until `drop`.

    replica: that trains the group. columns: as RolloutBuffer.
    All raise BufferFailed where the place does not answer in time, or has lost the key.
    """

    def put(self, key: str, replica: int, group: Group, columns: RunColumns) -> bytes:
        """Returns what the store is to say of it."""

    def get(self, key: str, replica: int, said: bytes, columns: RunColumns) -> bytes:
        """The wire format, without columns that are not read. said: by the store."""

    def drop(self, key: str, replica: int, columns: RunColumns) -> None: ...


class BufferFailed(PaNpuError):
    """The place where groups lie does not answer, or has lost one."""


class StoreRolloutBuffer:
    """RolloutBuffer on the c10d store, payloads included unless they have a place of their own.

    run_id separates attempts of one run, so that a restarted trainer never sees what a killed one left behind.
    readers: ranks of a replica, i.e. tensor_parallel x pipeline_parallel (the coordinator's value is not used).
    ahead: how many newer iterations may have begun when a group is put. columns: as RolloutBuffer.
    """

    def __init__(
        self,
        channel: StoreChannel,
        run_id: str,
        readers: int,
        ahead: int = 0,
        payloads: Payloads | None = None,
        columns: RunColumns = NONE,
    ) -> None:
        if readers < 1:
            raise ValueError(f"readers: {readers} must be at least 1, the number of ranks of a replica")
        self.readers = readers
        self._channel = channel
        self._run_id = run_id
        self._ahead = ahead
        self._payloads = payloads
        self.columns = columns
        self.head_bytes = 0
        self._filled: dict[int, dict[tuple[int, int], int]] = {}  # by iteration
        self._newest = 0

    def put(self, group: Group, replica: int, slot: int) -> None:
        if group.iteration > self._newest:
            self._newest = group.iteration
            self._filled = {i: filled for i, filled in self._filled.items() if i >= self._newest - self._ahead}
        key = self._key(group.iteration, replica, slot)
        filled = self._filled.setdefault(group.iteration, {})
        too_late = group.iteration < self._newest - self._ahead
        if (replica, slot) in filled or too_late:
            raise InvariantViolation(
                f"I2 exactly once: {group} put into slot {slot} of replica {replica}, but "
                + (
                    f"iteration {self._newest} has begun"
                    if too_late
                    else f"group {filled[replica, slot]} of that iteration is already there"
                )
            )
        group = group.made(self.columns.makers("coordinator"))
        place = self._payloads
        said = to_bytes(group, self.columns) if place is None else place.put(key, replica, group, self.columns)
        self._channel.put_bytes(key, said)  # from here on it may be read
        filled[replica, slot] = group.index

    def wait(self, iteration: int, replica: int, slot: int, timeout_s: float) -> float:
        return self._channel.wait(
            self._key(iteration, replica, slot),
            timeout_s,
            f"the group of slot {slot}, replica {replica}, iteration {iteration}, from the coordinator",
        )

    def ready(self, iteration: int, replica: int, slot: int) -> bool:
        return self._channel.exists(self._key(iteration, replica, slot))

    def read_bytes(self, iteration: int, replica: int, slot: int) -> bytes:
        key = self._key(iteration, replica, slot)
        said = self._channel.get_bytes(key)
        self.head_bytes += len(said)
        return said if self._payloads is None else self._payloads.get(key, replica, said, self.columns)

    def read(self, iteration: int, replica: int, slot: int) -> Group:
        return from_bytes(self.read_bytes(iteration, replica, slot), self.columns)

    def done(self, iteration: int, replica: int, slot: int) -> None:
        key = self._key(iteration, replica, slot)
        if self._channel.add(key + "/done", 1) == self.readers:
            self._channel.delete(key)
            self._channel.delete(key + "/done")
            if self._payloads is not None:
                self._payloads.drop(key, replica, self.columns)

    def written(self, version: int) -> StoreRolloutBuffer:
        return StoreRolloutBuffer(self._channel, f"written-{version}", 1, payloads=self._payloads, columns=self.columns)

    def _key(self, iteration: int, replica: int, slot: int) -> str:
        return f"buffer/{self._run_id}/{iteration}/{replica}/{slot}"

"""Which replica trains a group, and as its how-manieth: the slots of one iteration."""

from __future__ import annotations

from typing import Literal

from pa_npu.errors import InvariantViolation


class Assignment:
    """Slots of one iteration: every replica gets the same number of groups, each group exactly one slot (I2).

    order=completion: the replica with the least work so far among those that are not full; slots in order of arrival.
    order=prompt: replica index % R, slot index // R, whatever the arrival, so that the update is that of a synchronous run.
    """

    def __init__(self, order: Literal["prompt", "completion"], num_replicas: int, groups_per_replica: int) -> None:
        self._order = order
        self._groups_per_replica = groups_per_replica
        self._work = [0] * num_replicas
        self._filled = [0] * num_replicas
        self._indices: set[int] = set()

    def assign(self, index: int, work: int) -> tuple[int, int]:
        """(replica, slot) of group `index`, whose training costs `work` (tokens)."""
        num_replicas, total = len(self._work), len(self._work) * self._groups_per_replica
        if index in self._indices or not 0 <= index < total:
            raise InvariantViolation(f"I2 exactly once: group {index} of {total} was assigned before or does not exist")
        self._indices.add(index)
        if self._order == "prompt":
            replica, slot = index % num_replicas, index // num_replicas
        else:
            free = [replica for replica in range(num_replicas) if self._filled[replica] < self._groups_per_replica]
            replica = min(free, key=self._work.__getitem__)
            slot = self._filled[replica]
        self._filled[replica] += 1
        self._work[replica] += work
        return replica, slot

    def finish(self) -> None:
        """Asserts that every slot is filled (I2)."""
        if any(filled != self._groups_per_replica for filled in self._filled):
            raise InvariantViolation(
                f"I2 exactly once: replicas got {self._filled} groups, each must get {self._groups_per_replica}"
            )

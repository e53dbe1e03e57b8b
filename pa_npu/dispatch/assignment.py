"""Assigns groups, or parts of them, to replicas and their slots, by what training them costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Literal

from pa_npu.config.pieces import MIN_SAVED_ROWS, samples_of_pieces, saved_rows
from pa_npu.config.schema import Config
from pa_npu.errors import InvariantViolation
from pa_npu.families.spec import ModelSpec

GroupCost = Callable[[int, Sequence[int]], float]
"""Returns the cost of training a group, in any unit, from the length of its prompt and those of its
responses; GroupWork is one.
"""

# A replica may be so many groups ahead of another while groups stream in. A larger lead would
# balance no better (by 1% of an iteration) and leave some replicas without work meanwhile.
_LEAD = 2
# The groups still to come count with at least this share of their expected work, however much work
# has come already.
_MIN_LEFT = 0.3
# Halvings of the interval that holds the end of a group's parts: down to a thousandth of the
# group's seconds.
_HALVINGS = 10
# A group is divided where the iteration ends earlier by this share of what the group takes. A part
# computes the prompt once more, and every microbatch costs a little however small it is.
_MIN_SAVED = 0.1


class GroupWork:
    """Counts the operations of a group's microbatches as they are packed: linear layers by token,
    attention by pair, head by prediction.

    A count of tokens would call 8 responses of 1,000 and 1 of 8,000 the same, though their
    attention differs by a factor of 8. Padding, and the passes of frozen models, which have the
    same shape, are left out.
    """

    def __init__(self, spec: ModelSpec, config: Config) -> None:
        self._flops = spec.definition.flops(spec)
        self._responses = config.microbatch_responses
        self._tokens = config.microbatch.tokens
        self._shared_prompt = config.attention.shared_prompt
        self._may_keep_prompt = not config.depth_first_obstacle

    def __call__(self, prompt_length: int, response_lengths: Sequence[int]) -> float:
        """Returns the operations of forward and backward for a group with these lengths, in
        tokens.
        """
        pieces = self.pieces(prompt_length, response_lengths)
        if self.keeps_prompt(prompt_length, len(pieces)):
            return self._flops.group(prompt_length, response_lengths, shared=True)
        total: float = 0
        start = 0
        for count in pieces:
            lengths = response_lengths[start : start + count]
            total += self._flops.group(prompt_length, lengths, shared=self._shared_prompt)
            start += count
        return total

    def keeps_prompt(self, prompt_length: int, num_pieces: int) -> bool:
        """Returns whether the prompt is computed once for so many microbatches (samples.stems)."""
        saved = saved_rows(num_pieces, prompt_length - 1)
        return self._may_keep_prompt and saved >= MIN_SAVED_ROWS

    def pieces(self, prompt_length: int, response_lengths: Sequence[int]) -> list[int]:
        """Returns the responses of each microbatch."""
        shared = prompt_length if self._shared_prompt else 0
        lengths = [prompt_length + length for length in response_lengths]
        return samples_of_pieces(lengths, [shared] * len(lengths), self._responses, self._tokens)


@dataclass(eq=False, repr=False)
class Assignment:
    """The slots of one iteration: every replica gets the same number of groups, and each group, or
    each part of one, gets exactly one slot (I2).

    With order=prompt a group has replica index % R and slot index // R, whatever the arrival, so
    that the update is that of a synchronous run. With order=completion slots are filled in order of
    arrival:
    - one by one (assign): a group of more than average work goes to the replica with the least work
      in sight, a smaller one to the replica with the most. Work in sight is what a replica has,
      plus an average group for each of its free slots.
    - all together (assign_all): by falling work, each to the replica with the least so far, and
      the same number to each.
    Each share of the groups that makes an optimizer step is balanced by itself, since replicas wait
    for each other at a step.

    Args:
        shares: optimizer steps per iteration.
        expected_work: estimated work of all groups together; None where it is not known.
        unequal: whether replicas may get unequal numbers of groups, at least one each. This needs
            shares=1, and each group is assigned to a named replica (assign_to).
    """

    order: Literal["prompt", "completion"]
    num_replicas: InitVar[int]
    groups_per_replica: int
    shares: InitVar[int] = 1
    expected_work: float | None = None
    unequal: bool = field(default=False, kw_only=True)

    def __post_init__(self, num_replicas: int, shares: int) -> None:
        self._equal_share = self.groups_per_replica // shares
        self._per_share = self._equal_share * (num_replicas if self.unequal else 1)
        self._work = [[0.0] * num_replicas for _ in range(shares)]
        self._filled = [0] * num_replicas
        self._indices: set[int] = set()

    def assign(self, index: int, work: float) -> tuple[int, int]:
        """Returns (replica, slot) for group `index`, whose training costs `work`, in any unit."""
        self._register(index)
        replica = self.replica_of(index) if self.by_index else self._by_projection(work)
        return self._fill_slot(index, work, replica)

    def assign_to(self, index: int, work: float, replica: int) -> tuple[int, int]:
        """Returns (replica, slot) for a group that goes to `replica`, which must have room.

        With order=prompt `replica` must be the one that follows from the group's index.
        """
        self._register(index)
        return self._fill_slot(index, work, replica)

    def divide(self, index: int, works: Mapping[int, float]) -> list[tuple[int, int]]:
        """Returns (replica, slot) for each part of a group that several replicas train.

        works: by replica, what its part costs.
        """
        self._register(index)
        return [self._fill_slot(index, work, replica) for replica, work in works.items()]

    @property
    def by_index(self) -> bool:
        """Returns whether a group's replica follows from its index."""
        return self.order == "prompt"

    def replica_of(self, index: int) -> int:
        """Returns the replica of group `index`; defined for order=prompt only."""
        return index % len(self._filled)

    def has_room(self, replica: int) -> bool:
        """Returns whether the replica may get a further group."""
        return self._filled[replica] < self._per_share * len(self._work)

    @property
    def groups(self) -> list[int]:
        """The number of groups of each replica; a part of a group counts as one."""
        return list(self._filled)

    @property
    def untouched(self) -> list[int]:
        """Replicas without a group."""
        return [replica for replica, filled in enumerate(self._filled) if not filled]

    def assign_all(self, indices: Sequence[int], works: Sequence[float]) -> list[tuple[int, int]]:
        """Returns (replica, slot) for all groups of an iteration, given in the order in which they
        shall be trained.
        """
        slots: list[tuple[int, int]] = []
        size = len(self._filled) * self._equal_share
        for start in range(0, len(indices), size):
            share = works[start : start + size]
            replicas = self._by_falling_work(share)
            for index, work, replica in zip(
                indices[start : start + size], share, replicas, strict=True
            ):
                self._register(index)
                slots.append(self._fill_slot(index, work, replica))
        return slots

    def imbalance_of(self, works: Sequence[float]) -> float:
        """Returns what `imbalance` would be if assign_all assigned groups of these works, all of
        one optimizer step.
        """
        loads = [0.0] * len(self._filled)
        for replica, work in zip(self._by_falling_work(works), works, strict=True):
            loads[replica] += work
        mean = sum(loads) / len(loads)
        return max(loads) / mean - 1.0 if mean else 0.0

    def finish(self, num_groups: int | None = None) -> None:
        """Raises InvariantViolation unless every slot is filled (I2).

        num_groups: groups of the iteration, where they turned out to be fewer than its slots.
        """
        each = self.groups_per_replica if num_groups is None else num_groups // len(self._filled)
        if self.unequal and min(self._filled) and len(self._indices) == each * len(self._filled):
            return
        if any(filled != each for filled in self._filled):
            raise InvariantViolation(
                f"I2 exactly once: replicas got {self._filled} groups, each must get {each}"
            )

    @property
    def imbalance(self) -> float:
        """The share of time that replicas wait for the one with the most work: the largest work
        over the mean, both summed over steps, minus 1.
        """
        mean = sum(sum(work) for work in self._work) / len(self._filled)
        if not mean:
            return 0.0
        return sum(max(work) for work in self._work) / mean - 1.0

    def _register(self, index: int) -> None:
        """Raises InvariantViolation if the group was assigned before or does not exist."""
        total = len(self._filled) * self.groups_per_replica
        if index in self._indices or not 0 <= index < total:
            raise InvariantViolation(
                f"I2 exactly once: group {index} of {total} was assigned before or does not exist"
            )
        self._indices.add(index)

    def _fill_slot(self, index: int, work: float, replica: int) -> tuple[int, int]:
        """Returns (replica, slot); with order=prompt both follow from `index`."""
        if self.by_index:
            replica = self.replica_of(index)
            slot = index // len(self._filled)
        else:
            slot = self._filled[replica]
        self._filled[replica] += 1
        self._work[slot // self._per_share][replica] += work
        return replica, slot

    def _by_projection(self, work: float) -> int:
        """Returns the replica for a group that has just been registered."""
        share = (len(self._indices) - 1) // (len(self._filled) * self._per_share)
        end = (share + 1) * self._per_share
        limit = min(end, min(self._filled) + _LEAD)
        typical = self._typical(work)
        in_sight = {
            replica: self._work[share][replica] + (end - filled) * typical
            for replica, filled in enumerate(self._filled)
            if filled < limit
        }
        if work >= typical:
            return min(in_sight, key=in_sight.__getitem__)
        return max(in_sight, key=in_sight.__getitem__)

    def _typical(self, work: float) -> float:
        """Returns the mean work of the groups still to come, or, where the total is not expected,
        of those that came.
        """
        num_assigned = len(self._indices)
        total = len(self._filled) * self.groups_per_replica
        done = sum(sum(step) for step in self._work) + work
        if self.expected_work is None or num_assigned == total:
            return done / num_assigned
        num_left = total - num_assigned
        left = num_left / total * self.expected_work
        return max(self.expected_work - done, _MIN_LEFT * left) / num_left

    def _by_falling_work(self, works: Sequence[float]) -> list[int]:
        """Returns the replica of each group."""
        replicas = [0] * len(works)
        load = [0.0] * len(self._filled)
        count = [0] * len(self._filled)
        for number in sorted(range(len(works)), key=lambda number: -works[number]):
            free = [replica for replica in range(len(load)) if count[replica] < self._equal_share]
            replica = min(free, key=load.__getitem__)
            load[replica] += works[number]
            count[replica] += 1
            replicas[number] = replica
        return replicas


def common_end_s(free_s: Sequence[float], work_s: float) -> float:
    """Returns when replicas that are free at `free_s` have together done `work_s` seconds of work
    that can be divided at will.
    """
    ends = sorted(free_s)
    total = work_s
    for count, at_s in enumerate(ends, start=1):
        total += at_s
        if count == len(ends) or total / count <= ends[count]:
            return total / count
    raise ValueError("free_s: at least one replica must train")


def divide_group(
    size: int, seconds: Callable[[int, int], float], free_s: Mapping[int, float], earliest_s: float
) -> dict[int, tuple[int, int]]:
    """Divides one of the last groups among replicas so that all parts end together.

    Returns by replica the range of its samples, the last one excluded. A group that is trained
    whole would keep one replica busy while the others wait. Its advantages are made before it is
    divided.

    Args:
        size: samples of the group.
        seconds: returns the duration of training the samples from a first to before a last.
        free_s: when each replica is free; among equals the preferred replica comes first.
        earliest_s: an end before which nothing is gained, since other groups keep replicas busy.
    """
    order = sorted(free_s, key=free_s.__getitem__)

    def parts_until(end_s: float) -> dict[int, tuple[int, int]] | None:
        """Returns parts that all end by `end_s`; None where the group is too large for that."""
        parts = {}
        first = 0
        for replica in order:
            last = first
            while last < size and free_s[replica] + seconds(first, last + 1) <= end_s:
                last += 1
            if last > first:
                parts[replica] = (first, last)
                first = last
        return parts if first == size else None

    whole = {order[0]: (0, size)}
    whole_s = seconds(0, size)
    whole_end_s = free_s[order[0]] + whole_s
    if whole_end_s - earliest_s < _MIN_SAVED * whole_s:
        return whole
    best = parts_until(earliest_s)
    if best is not None:
        return best
    best = whole
    low = earliest_s
    high = whole_end_s
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        parts = parts_until(middle)
        if parts is None:
            low = middle
        else:
            best = parts
            high = middle
    return best if whole_end_s - high >= _MIN_SAVED * whole_s else whole

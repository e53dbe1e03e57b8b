"""Which replica trains a group, or which part of it, and in which of the replica's slots of the iteration; by what that costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Literal

from pa_npu.config.schema import Config
from pa_npu.errors import InvariantViolation
from pa_npu.families.spec import ModelSpec

GroupCost = Callable[[int, Sequence[int]], float]
"""Cost of training a group, in any unit, from the length of its prompt and those of its responses;
GroupWork is one.
"""

# How many groups a replica may be ahead of another, while groups stream in: more would balance no
# better (1% of an iteration) and leave some replicas without work meanwhile.
_LEAD = 2
# The groups still to come are taken for at least so much of what was expected of them, however much
# has come already.
_LEAST_LEFT = 0.3
# Halvings of the interval in which the end of a group's parts lies: a thousandth of a group's
# seconds.
_HALVINGS = 10


class GroupWork:
    """Operations of a group's microbatches as they are packed: linear layers by token, attention by
    pair, head by prediction.

    Tokens alone would call 8 responses of 1,000 and 1 of 8,000 the same, whose attention differs by
    a factor of 8. Packed sequences' padding and the passes of frozen models, which have the same
    shape, are left out.
    """

    def __init__(self, spec: ModelSpec, config: Config) -> None:
        self._flops = spec.definition.flops(spec)
        self._responses = config.microbatch_responses
        self._shared_prompt = config.attention.shared_prompt

    def __call__(self, prompt_length: int, response_lengths: Sequence[int]) -> float:
        """Forward and backward of all microbatches of a group with these lengths, in tokens."""
        pieces = [
            response_lengths[start : start + self._responses]
            for start in range(0, len(response_lengths), self._responses)
        ]
        return sum(
            self._flops.group(prompt_length, lengths, shared=self._shared_prompt)
            for lengths in pieces
        )


@dataclass(eq=False, repr=False)
class Assignment:
    """Slots of one iteration: every replica gets the same number of groups, each group, or each
    part, exactly one slot (I2).

    order=prompt: replica index % R, slot index // R, whatever the arrival, so that the update is
    that of a synchronous run. order=completion: slots in order of arrival. One by one (assign), a
    group of more than average work goes where the least work is in sight, one of less to where the
    most is: what a replica has, and an average group for each of its free slots. All together
    (assign_all), by falling work, each to the replica with the least so far. Either way within each
    share of the iteration's groups that makes an optimizer step of its own, since replicas wait for
    each other at a step.

    shares: optimizer steps per iteration. expected_work: of all groups together, as estimated
    beforehand; None: unknown. unequal: a replica may get any number of groups from one on, with one
    share, where each is assigned to a replica that is named (assign_to).
    """

    order: Literal["prompt", "completion"]
    num_replicas: InitVar[int]
    groups_per_replica: int
    shares: InitVar[int] = 1
    expected_work: float | None = None
    unequal: bool = field(default=False, kw_only=True)

    def __post_init__(self, num_replicas: int, shares: int) -> None:
        self._per_share = self.groups_per_replica * (num_replicas if self.unequal else 1) // shares
        self._work = [[0.0] * num_replicas for _ in range(shares)]
        self._filled = [0] * num_replicas
        self._indices: set[int] = set()

    def assign(self, index: int, work: float) -> tuple[int, int]:
        """(replica, slot) of group `index`, whose training costs `work`, in any unit."""
        self._take(index)
        return self._put(index, work, 0 if self.order == "prompt" else self._by_projection(work))

    def assign_to(self, index: int, work: float, replica: int) -> tuple[int, int]:
        """The same for a replica that has room; with order=prompt it has to be the group's own."""
        self._take(index)
        return self._put(index, work, replica)

    def divide(self, index: int, works: Mapping[int, float]) -> list[tuple[int, int]]:
        """The same for replicas of which each trains a part of it, by replica what that costs."""
        self._take(index)
        return [self._put(index, work, replica) for replica, work in works.items()]

    @property
    def by_index(self) -> bool:
        """Whether a group's replica follows from its index."""
        return self.order == "prompt"

    def replica_of(self, index: int) -> int:
        """With order=prompt."""
        return index % len(self._filled)

    def has_room(self, replica: int) -> bool:
        """Whether the replica may get a further group."""
        return self._filled[replica] < self._per_share * len(self._work)

    @property
    def groups(self) -> list[int]:
        """How many each replica has, parts counted."""
        return list(self._filled)

    @property
    def untouched(self) -> list[int]:
        """Replicas without a group."""
        return [replica for replica, filled in enumerate(self._filled) if not filled]

    def assign_all(self, indices: Sequence[int], works: Sequence[float]) -> list[tuple[int, int]]:
        """(replica, slot) of all groups of an iteration, which are given in the order in which they
        are to be trained.
        """
        slots: list[tuple[int, int]] = []
        size = len(self._filled) * self._per_share
        for start in range(0, len(indices), size):
            share = works[start : start + size]
            replicas = self._by_falling_work(share)
            for index, work, replica in zip(
                indices[start : start + size], share, replicas, strict=True
            ):
                self._take(index)
                slots.append(self._put(index, work, replica))
        return slots

    def finish(self, num_groups: int | None = None) -> None:
        """Asserts that every slot is filled (I2). num_groups: of the iteration, where it turned out
        to be fewer than its slots.
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
        """The share of time that replicas wait for the one with the most work: sum over steps of
        the most / sum of the mean, minus 1."""
        mean = sum(map(sum, self._work)) / len(self._filled)
        return sum(map(max, self._work)) / mean - 1.0 if mean else 0.0

    def _take(self, index: int) -> None:
        total = len(self._filled) * self.groups_per_replica
        if index in self._indices or not 0 <= index < total:
            raise InvariantViolation(
                f"I2 exactly once: group {index} of {total} was assigned before or does not exist"
            )
        self._indices.add(index)

    def _put(self, index: int, work: float, replica: int) -> tuple[int, int]:
        """replica: ignored with order=prompt."""
        if self.order == "prompt":
            replica, slot = index % len(self._filled), index // len(self._filled)
        else:
            slot = self._filled[replica]
        self._filled[replica] += 1
        self._work[slot // self._per_share][replica] += work
        return replica, slot

    def _by_projection(self, work: float) -> int:
        """The replica for a group that has just been taken."""
        share = (len(self._indices) - 1) // (len(self._filled) * self._per_share)
        end = (share + 1) * self._per_share
        least = min(self._filled)
        free = [r for r, filled in enumerate(self._filled) if filled < min(end, least + _LEAD)]
        typical = self._typical(work)
        projected = {r: self._work[share][r] + (end - self._filled[r]) * typical for r in free}
        return (
            min(free, key=projected.__getitem__)
            if work >= typical
            else max(free, key=projected.__getitem__)
        )

    def _typical(self, work: float) -> float:
        """Mean work of the groups still to come, or of those that came where nothing is known."""
        num_taken, total = len(self._indices), len(self._filled) * self.groups_per_replica
        done = sum(map(sum, self._work)) + work
        if self.expected_work is None or num_taken == total:
            return done / num_taken
        left = (total - num_taken) / total * self.expected_work
        return max(self.expected_work - done, _LEAST_LEFT * left) / (total - num_taken)

    def _by_falling_work(self, works: Sequence[float]) -> list[int]:
        replicas = [0] * len(works)
        load, count = [0.0] * len(self._filled), [0] * len(self._filled)
        for number in sorted(range(len(works)), key=lambda number: -works[number]):
            free = [r for r in range(len(load)) if count[r] < self._per_share]
            replica = min(free, key=load.__getitem__)
            load[replica] += works[number]
            count[replica] += 1
            replicas[number] = replica
        return replicas


def common_end_s(free_s: Sequence[float], work_s: float) -> float:
    """When replicas that are free at these times have all done work that can be divided at will."""
    total, ends = work_s, sorted(free_s)
    for count, at_s in enumerate(ends, start=1):
        total += at_s
        if count == len(ends) or total / count <= ends[count]:
            return total / count
    raise ValueError("free_s: at least one replica must train")


def parts_of(
    size: int, seconds: Callable[[int, int], float], free_s: Mapping[int, float], earliest_s: float
) -> dict[int, tuple[int, int]]:
    """By replica, the samples of one of the last groups that it trains, from one number to before
    another: all end together.

    A group that is trained whole keeps one replica busy while the others wait. Its advantages are
    made before it is divided.

    size: samples of the group. seconds: what training samples from one number to before another
    takes. free_s: when each replica is, of equal ones the preferred first. earliest_s: an end
    before which nothing is gained, since other groups keep replicas busy.
    """
    order = sorted(free_s, key=free_s.__getitem__)

    def ending(end_s: float) -> dict[int, tuple[int, int]] | None:
        parts, first = {}, 0
        for replica in order:
            last = first
            while last < size and free_s[replica] + seconds(first, last + 1) <= end_s:
                last += 1
            if last > first:
                parts[replica], first = (first, last), last
        return parts if first == size else None

    whole = {order[0]: (0, size)}
    low, high = earliest_s, free_s[order[0]] + seconds(0, size)
    best = ending(low)
    for _ in range(_HALVINGS if best is None else 0):
        middle = (low + high) / 2
        found = ending(middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best or whole

"""Delivery of groups where roles follow the work: each goes out when its replica's devices train.

With order=prompt a group goes to its replica as ever, so that weights do not depend on when roles
changed. With order=completion it goes to the replica that will be free first, and replicas get
unequal numbers where the trainers can take these.

Where no replica trains yet when the last response is there, groups go out as in turns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pa_npu.control.tasks import cancel
from pa_npu.coordinator.delivery import Delivery
from pa_npu.coordinator.episode import ScoredGroup
from pa_npu.coordinator.roles import Roles
from pa_npu.dispatch.assignment import common_end_s, divide_group
from pa_npu.dispatch.roles import Owned, Owners, RoleUnit

# A replica is given its next group this many groups before it will have trained what it has:
# earlier, a replica that is free sooner could not have it; later, it would wait.
_AHEAD = 0.5
_LEAST_WAIT_S = 0.001
# Where no device has trained yet when the last response is there, groups go out as in turns unless
# that leaves replicas waiting for more than this share of the training. Smaller parts of groups, and
# unequal numbers of them, cost more than they save then.
_MAX_IMBALANCE = 0.05


@dataclass(eq=False, repr=False)
class RolesDelivery(Delivery):
    """One iteration's groups, each when its replica's devices are free. roles: of the run."""

    roles: Roles
    seconds_per_work: float = field(default=0.0, init=False)
    """A replica's speed; before it was learned, what makes shares of work equal."""
    _given_s: dict[int, float] = field(
        default_factory=dict, init=False
    )  # by replica that trains: until when it has work
    _worked: list[tuple[float, int]] = field(default_factory=list, init=False)
    _pump: asyncio.Task[None] | None = field(default=None, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _ended: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.roles.begin(self)

    @property
    def held_work(self) -> list[float]:
        """Work of the groups that no replica has."""
        return [self._cost(number, scored) for number, scored in self._held]

    @property
    def work_per_token(self) -> float:
        """Work of training, over tokens of responses, of the groups so far; 0 before the first."""
        return sum(work for work, _ in self._worked) / max(
            1, sum(tokens for _, tokens in self._worked)
        )

    def free_in(self) -> list[float]:
        """Seconds until each replica that trains has nothing more to do."""
        at_s = time.perf_counter()
        return [max(0.0, until_s - at_s) for until_s in self._given_s.values()]

    def owners(self, living: Sequence[int], changing: Sequence[RoleUnit]) -> Owners:
        """Returns who trains what is left, where a group's index decides it.

        living: dispatch indices of the groups in flight. changing: the units that decode.
        """

        def owned(number: int) -> Owned:
            return Owned(self.assignment.replica_of(number), number)

        first = self.production.num_demonstrations
        return Owners(
            living=[owned(first + index) for index in living],
            ready=[owned(number) for number, _ in self._held],
            free=list(self._given_s),
            changing=[unit.replicas for unit in changing],
        )

    def free(self, replicas: Sequence[int]) -> None:
        """Marks these replicas free to train."""
        at_s = time.perf_counter()
        self._given_s |= {replica: at_s for replica in replicas if replica not in self._given_s}
        self._changed.set()

    async def _deliver(self, number: int, scored: ScoredGroup) -> None:
        self._worked.append((self._cost(number, scored), scored.tokens))
        self._held.append((number, scored))
        self._changed.set()
        if self._pump is None:
            self._pump = asyncio.create_task(
                self._give_in_time(), name="groups to replicas that train"
            )

    @property
    def numbers(self) -> dict[str, Any]:
        unequal = {"replica_groups": self.assignment.groups} if self.assignment.unequal else {}
        return {"role_changes": self.roles.num_changes, **unequal}

    async def finish(self, num_groups: int) -> float:
        await self.roles.end()
        self._ended = True
        self._changed.set()
        if self._pump is not None:
            await self._pump
        if self._is_in_turns:
            await self._give_as_in_turns()
        while (due := self._due(at_end=True)) is not None:
            if self.roles.divides_groups:
                await self._give_parts(due[0])
            else:
                await self._give(*due[:2])
        return await super().finish(num_groups)

    @property
    def _is_in_turns(self) -> bool:
        """Returns whether groups that may go to any replica go out as in turns: none has gone yet,
        and equal numbers of them are about equal work.
        """
        if self.assignment.by_index or any(self.assignment.groups):
            return False
        return self.assignment.imbalance_of(self.held_work) <= _MAX_IMBALANCE

    async def _give_as_in_turns(self) -> None:
        held, self._held = self._held, []
        slots = self.assignment.assign_all(
            [number for number, _ in held],
            [self._cost(number, scored) for number, scored in held],
        )
        for (number, scored), slot in zip(held, slots, strict=True):
            await self._deliver_to(number, scored, slot)

    async def close(self) -> None:
        await cancel([task for task in (self._pump, self.roles.changing) if task is not None])

    async def _give_in_time(self) -> None:
        while not self._ended:
            self._changed.clear()
            due = self._due(at_end=False)
            if due is not None and due[2] <= 0.0:
                await self._give(*due[:2])
                continue
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(
                    self._changed.wait(), None if due is None else max(_LEAST_WAIT_S, due[2])
                )

    def _due(self, *, at_end: bool) -> tuple[int, int, float] | None:
        """(place in what is held, replica, in how many seconds) of the next group to give; None
        until something changes.
        """
        if (
            not self._held
            or not self._given_s
            or (self.roles.divides_groups and self.roles.all_scored and not at_end)
        ):
            return None
        if self.assignment.by_index:
            for place, (number, _) in enumerate(self._held):
                replica = self.assignment.replica_of(number)
                if replica in self._given_s:
                    return place, replica, 0.0
            return None
        free = [replica for replica in self._given_s if self.assignment.has_room(replica)]
        if not free:
            return None
        untouched = self.assignment.untouched
        if not at_end and len(self._held) <= len(set(untouched) - set(self._given_s)):
            return None  # every replica trains something, so that its first tokens are compared
        starved = [replica for replica in free if replica in untouched]
        replica = min(starved or free, key=self._given_s.__getitem__)
        works = self.held_work
        ahead_s = 0.0 if self.roles.all_written else _AHEAD * self._mean_s()
        in_s = self._given_s[replica] - time.perf_counter() - ahead_s
        return max(range(len(works)), key=works.__getitem__), replica, in_s

    async def _give(self, place: int, replica: int) -> None:
        number, scored = self._held.pop(place)
        work = self._cost(number, scored)
        self._given_s[replica] = (
            max(self._given_s[replica], time.perf_counter()) + work * self.seconds_per_work
        )
        slot = self.assignment.assign_to(number, work, replica)
        await self._deliver_to(number, scored, slot)

    async def _give_parts(self, place: int) -> None:
        """A group of the last ones, divided among the replicas so that all of them end together."""
        held_s = sum(self.held_work) * self.seconds_per_work
        number, scored = self._held.pop(place)
        prompt, lengths = scored.trained_as

        def seconds(first: int, last: int) -> float:
            if number in self._by_rule:
                return 0.0
            return self.work(prompt, lengths[first:last]) * self.seconds_per_work

        at_s = time.perf_counter()
        untouched = self.assignment.untouched  # first among equals: every replica trains something
        replicas = sorted(self._given_s, key=lambda replica: replica not in untouched)
        free_s = {replica: max(at_s, self._given_s[replica]) for replica in replicas}
        parts = divide_group(
            len(lengths), seconds, free_s, common_end_s(list(free_s.values()), held_s)
        )
        takes_s = {replica: seconds(*part) for replica, part in parts.items()}
        self._given_s |= {replica: free_s[replica] + takes_s[replica] for replica in parts}
        works = {replica: took_s / self.seconds_per_work for replica, took_s in takes_s.items()}
        slots = self.assignment.divide(number, works)
        # a replica that trains all of it knows so without being told
        messages = [
            None if last - first == len(lengths) else (first, last)
            for first, last in parts.values()
        ]
        await self._put(
            number,
            scored,
            self.algorithm.credit,
            dict(zip(slots, messages, strict=True)),
        )

    def _mean_s(self) -> float:
        return (
            sum(work for work, _ in self._worked)
            / max(1, len(self._worked))
            * self.seconds_per_work
        )

"""Roles that follow the work (placement.colocate with schedule.stream): every device decodes, then trains, inside one iteration.

    all units decode ──a group ends, and the rest fits on fewer──> a unit hands its sequences on, sleeps, trains finished groups
                                                                   the last units train when the
                                                                   last response is there

A unit is a replica with the engines on its devices, or several where devices, shards or experts
join them: nobody of a unit trains while an engine of it decodes. Trainers need not be told: a
replica trains what is in the buffer for it, and gets nothing there before its engines are empty,
and asleep where they can be. dispatch/roles.py decides, by what earlier iterations have taught; the
first one is in turns.

With order=prompt a group goes to its replica as ever, so that weights do not depend on when roles
changed. With order=completion it goes to the replica that will be free first, and replicas get
unequal numbers where the trainers can take these.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pa_npu.algorithm.registry import build_algorithm
from pa_npu.algorithm.rules import divides_groups
from pa_npu.config.schema import Config
from pa_npu.control.tasks import cancel
from pa_npu.coordinator.delivery import Delivery
from pa_npu.coordinator.episode import ScoredGroup
from pa_npu.coordinator.features import Feature
from pa_npu.dispatch.assignment import common_end_s, divide_group
from pa_npu.dispatch.decoding_left import DecodingErrors, expected_rest
from pa_npu.dispatch.roles import (
    Decision,
    Owned,
    Owners,
    Rest,
    RoleUnit,
    decoding_units,
    role_units,
)
from pa_npu.dispatch.schedule import EngineSpeed
from pa_npu.engines.pool import EnginePool, Lease
from pa_npu.telemetry.timeline import Timeline, now

logger = logging.getLogger(__name__)

# Decisions take no more of a core's processor time than this.
_SHARE_OF_CORE = 0.01
# A replica is given its next group this many groups before it will have trained what it has:
# earlier, a replica that is free sooner could not have it; later, it would wait.
_AHEAD = 0.5
_LEAST_WAIT_S = 0.001
# Iterations whose lengths are expected of what is in flight.
_ITERATIONS_SEEN = 4
# Where no device has trained yet when the last response is there, groups go out as in turns unless
# that leaves replicas waiting for more than this share of the training. Smaller parts of groups, and
# unequal numbers of them, cost more than they save then.
_MAX_IMBALANCE = 0.05


@dataclass
class _Flight:
    """A group on an engine.

    index: its dispatch index. tokens: expected, prompts included. steps: of decoding when it began.
    """

    index: int
    tokens: int
    steps: float


@dataclass(eq=False, repr=False)
class Roles(Feature):
    """Decides, for a whole run, when units change from decoding to training.

    speed: returns the speed of an engine, and the seconds that a replica takes for a unit of work;
    None before anything was learned.
    """

    config: Config
    pool: EnginePool
    timeline: Timeline
    speed: Callable[[], tuple[EngineSpeed, float] | None]

    def __post_init__(self) -> None:
        self.units = role_units(self.config)
        self.divides_groups = divides_groups(self.config, build_algorithm(self.config))
        """Whether several replicas may train a part each of a group."""
        # what the run has taught: an engine's speed, seconds of training a unit of work, lengths of
        # the last responses
        self._engine: EngineSpeed | None = None
        self._seconds_per_work = self._change_s = 0.0
        self._seen: deque[np.ndarray] = deque(maxlen=_ITERATIONS_SEEN)
        self._errors = DecodingErrors()
        self.num_changes = 0
        """Units with engines that trained before the last response was there, of the last
        iteration.
        """
        self._reset(None)

    def _reset(self, delivery: RolesDelivery | None) -> None:
        self._flights: dict[Lease, _Flight] = {}
        self._since: dict[RoleUnit, float] = {}  # when its training began, on the timeline's clock
        self._lengths: list[int] = []
        self._lengths_seen: np.ndarray | None = None  # of earlier iterations, rising
        self._dispatched = False
        self._unscored = 0
        self._delivery = delivery
        self.changing: asyncio.Task[None] | None = None
        """A change of roles that goes on, or the last one."""
        self._steps = 0.0
        self._next_s = 0.0
        self._at_s = self._written_s = time.perf_counter()
        self._begin_s = now()

    # the iteration

    def begin(self, delivery: RolesDelivery) -> None:
        """All devices decode, for a delivery of this iteration."""
        self.close()
        self._reset(delivery)
        speeds = self.speed()
        if speeds is not None:
            self._engine, self._seconds_per_work = speeds
        delivery.seconds_per_work = self._seconds_per_work or 1.0
        self.pool.devices.decode_all()
        for unit in self.units:
            if not unit.engines:  # it never decodes
                delivery.free(unit.replicas)

    def admitted(self, lease: Lease, index: int) -> None:
        self._step()
        self._flights[lease.first] = _Flight(index, lease.tokens, self._steps)
        self._unscored += 1

    def all_dispatched(self) -> None:
        self._dispatched = True

    def generated(self, lease: Lease) -> None:
        self._step()
        self._written_s = self._at_s
        self._flights.pop(lease.first, None)

    def scored(self, index: int, group: ScoredGroup) -> None:
        self._lengths += group.lengths
        self._unscored -= 1
        if not self._may_decide:
            return
        decoding = [unit for unit in self.units if not self._trains(unit)]
        if len(decoding) < 2:
            return
        self._raise_failure()
        # its processor time, since on a busy core the wall may show many times as much
        begin_s = time.thread_time()
        by_emptiness = self._emptiest(decoding)
        decision = self._decide(by_emptiness)
        took_s = time.thread_time() - begin_s
        self._next_s = time.perf_counter() + took_s / _SHARE_OF_CORE
        self._errors.predicted(
            time.perf_counter(), decision.decoded_s, changes=decision.units < len(decoding)
        )
        if decision.units < len(decoding):
            change = self._change(by_emptiness[: len(decoding) - decision.units])
            self.changing = asyncio.create_task(change, name="change of roles")

    @property
    def _may_decide(self) -> bool:
        """Returns whether something is known to decide by, and left to decide about."""
        if self._engine is None or not self._seen or self._delivery is None:
            return False
        if not self._dispatched or not self._flights:
            return False
        is_changing = self.changing is not None and not self.changing.done()
        return not is_changing and time.perf_counter() >= self._next_s

    async def end(self) -> None:
        """All responses are there: whoever still decodes trains from here on."""
        if self.changing is not None:
            await self.changing
        self._errors.decoded(self._written_s)
        self.num_changes = len(self._since)
        for unit in self.units:
            if not self._trains(unit):
                self._train(unit)
        self._seen.append(np.asarray(self._lengths, float))
        self._delivery = None
        self.pool.devices.all_written()

    def close(self) -> None:
        """Ends the last iteration on the timeline: its devices train no more."""
        for unit, since_s in self._since.items():
            self._show(unit, "trains", since_s, now())

    @property
    def all_written(self) -> bool:
        """Returns whether nothing is in flight any more, so that whoever still decodes is about to
        train.
        """
        return self._dispatched and not self._flights

    @property
    def all_scored(self) -> bool:
        """Returns whether no group is to come any more."""
        return self._dispatched and not self._unscored

    # deciding

    def _decide(self, decoding: Sequence[RoleUnit]) -> Decision:
        """Predicts the rest of the iteration. decoding: in the order in which they would change."""
        assert self._engine is not None and self._delivery is not None
        flights = self._flights.values()
        size = self.config.rollout.responses_per_prompt
        if self._lengths_seen is None:
            self._lengths_seen = np.sort(np.concatenate(list(self._seen)))
        seen = self._lengths_seen
        ages = self._steps - np.asarray([flight.steps for flight in flights])
        remaining, groups, tokens = expected_rest(
            seen, ages, size, self.config.rollout.max_response_tokens
        )
        expected = np.asarray([flight.tokens for flight in flights]) / size
        prompts = np.maximum(0.0, expected - seen.mean())
        costs = tokens * self._delivery.work_per_token * self._seconds_per_work
        owners = None
        if self._delivery.assignment.by_index:
            owners = self._delivery.owners([flight.index for flight in flights], decoding)
        rest = Rest(
            remaining=remaining,
            group=groups,
            written=(ages + prompts)[groups],
            decoding=len(decoding),
            engines=sum(len(unit.engines) for unit in self.units) / len(self.units),
            replicas=sum(len(unit.replicas) for unit in self.units) / len(self.units),
            trains_s=costs,
            ready_s=[work * self._seconds_per_work for work in self._delivery.held_work],
            free_s=self._delivery.free_in(),
            max_sequences=self.config.rollout.max_num_seqs,
            parts=size if self.divides_groups else 1,
            change_s=self._change_s,
            slower=self._errors.slower,
            spread=self._errors.spread,
            owners=owners,
        )
        decision = decoding_units(rest, self._engine)
        if decision.units < len(decoding):
            logger.info(
                "%d of %d units decode from here on: the iteration should end in %.2f s, in turns "
                "in %.2f s",
                decision.units,
                len(self.units),
                decision.end_s,
                decision.turns_s,
            )
        return decision

    def _emptiest(self, decoding: Sequence[RoleUnit]) -> list[RoleUnit]:
        """Returns these units in the order in which they would change, the emptiest first."""
        in_flight = {engine: use.in_flight_sequences for engine, use in self.pool.by_seat().items()}

        def load(unit: RoleUnit) -> tuple[bool, int]:
            # where engines sleep, one that is being started has to come up before its device trains
            starts = self.config.devices.engines_sleep and not in_flight.keys() >= set(unit.engines)
            return starts, sum(in_flight.get(engine, 0) for engine in unit.engines)

        return sorted(decoding, key=load)

    async def _change(self, units: Sequence[RoleUnit]) -> None:
        """Lets these units hand on what they decode, and train."""
        begin_s = time.perf_counter()
        engine_indices = {engine_index for unit in units for engine_index in unit.engines}
        self.pool.devices.move(engine_indices)
        await self.pool.vacate(engine_indices, self.config.rollout.probe_timeout_s)
        await self.pool.sleep(engine_indices)
        for unit in units:
            self._train(unit)
        self._change_s = 0.5 * (self._change_s + time.perf_counter() - begin_s)

    def _trains(self, unit: RoleUnit) -> bool:
        """Returns whether no engine of the unit decodes."""
        return self.pool.devices.trains(unit.engines)

    def _train(self, unit: RoleUnit) -> None:
        """The unit's engines are empty, and asleep where they can be: its replicas train."""
        self.pool.devices.train(unit.engines)
        self._since[unit] = now()
        self._show(unit, "decodes", self._begin_s, self._since[unit])
        if self._delivery is not None:
            self._delivery.free(unit.replicas)

    def _show(self, unit: RoleUnit, role: str, start_s: float, end_s: float) -> None:
        """Draws a role of the unit on the timeline."""
        lanes = ", ".join(f"engine {engine_index}" for engine_index in unit.engines)
        ranks = [rank for replica in unit.replicas for rank in self.config.mesh.replica(replica)]
        self.timeline.complete(role, start_s, end_s, f"role of {lanes}", ranks=ranks)

    def _raise_failure(self) -> None:
        if self.changing is not None and self.changing.done():
            self.changing.result()

    def _step(self) -> None:
        """Decode steps so far, as fast as they should have been with what was in flight."""
        at_s = time.perf_counter()
        if self._engine is not None:
            engines = sum(len(unit.engines) for unit in self.units if not self._trains(unit))
            sequences = (
                len(self._flights) * self.config.rollout.responses_per_prompt / max(1, engines)
            )
            self._steps += (at_s - self._at_s) / (
                self._engine.step_s + self._engine.sequence_s * sequences
            )
        self._at_s = at_s


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

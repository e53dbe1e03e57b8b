"""Roles that follow the work (placement.colocate with schedule.stream): every device decodes, then trains, inside one iteration.

    all units decode ──a group ends, and the rest fits on fewer──> a unit hands its sequences on, sleeps, trains finished groups
                                                                   the last units train when the
                                                                   last response is there

A unit is a replica with the engines on its devices, or several where devices, shards or experts
join them: nobody of a unit trains while an engine of it decodes. Trainers need not be told: a
replica trains what is in the buffer for it, and gets nothing there before its engines are empty,
and asleep where they can be. dispatch/roles.py decides, by what earlier iterations have taught; the
first one is in turns.

RolesDelivery (roles_delivery.py) gives the groups to replicas that train.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pa_npu.algorithm.registry import build_algorithm
from pa_npu.algorithm.rules import divides_groups
from pa_npu.config.schema import Config
from pa_npu.coordinator.episode import ScoredGroup
from pa_npu.coordinator.features import Feature
from pa_npu.dispatch.decoding_left import DecodingErrors, expected_rest
from pa_npu.dispatch.roles import (
    Decision,
    Rest,
    RoleUnit,
    decoding_units,
    role_units,
)
from pa_npu.dispatch.schedule import EngineSpeed
from pa_npu.engines.pool import EnginePool, Lease
from pa_npu.telemetry.timeline import Timeline, now

if TYPE_CHECKING:
    from pa_npu.coordinator.roles_delivery import RolesDelivery

logger = logging.getLogger(__name__)

# Decisions take no more of a core's processor time than this.
_SHARE_OF_CORE = 0.01
# Iterations whose lengths are expected of what is in flight.
_ITERATIONS_SEEN = 4


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

"""The coordinator's end of the protocol by which engines get the trainers' weights.

Engines join the trainers' groups, load a version, and answer a probe if one is due. They are asked
to load as soon as nothing is in flight, while the trainers still train and step: what they do
before the first byte comes is over then. The coordinator waits for the trainers in two cases only:
before groups are formed anew, as forming them has a deadline, and if engines sleep, since the
trainers use their memory until then.

The trainers' end is pa_npu.publish.trainer_side (and, between two publishes,
pa_npu.publish.late_engines); what runs inside the engines is pa_npu.weight_transfer.receiver. When
an engine dies meanwhile, the attempt is given up on both sides and made again with those that are
left: nothing is in flight at a border, so an attempt that fails costs time only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pa_npu.config.sections.rollout import RolloutConfig
from pa_npu.config.words import counted
from pa_npu.control.channel import StoreChannel
from pa_npu.control.freshness import Freshness
from pa_npu.control.tasks import cancel, gather, guarded
from pa_npu.data.prompts import Prompt
from pa_npu.engines.member import Member
from pa_npu.engines.membership import Fleet
from pa_npu.engines.pool import CHANGING, EnginePool
from pa_npu.engines.protocol import (
    EngineError,
    LoadedWeights,
    RolloutEngine,
    Sampling,
    WeightGroups,
)
from pa_npu.errors import DeadlineExceeded
from pa_npu.platform.memory_peaks import MemoryPeak
from pa_npu.publish.engines import ArrivalCheck, Connection, EngineGroups
from pa_npu.publish.live_memory import LiveMemoryCheck
from pa_npu.publish.messages import (
    BROKEN,
    ENGINES_SWAPPED,
    LATE_ANSWER,
    LATE_BROKEN,
    LATE_DECISION,
    LATE_REQUEST,
    LATE_SENT,
    MEMBERS,
    READY,
    SENT,
    VERDICT,
    EnginesSwapped,
    LateAnswer,
    LateRequest,
    Probe,
    PublishVerdict,
    StageManifest,
)
from pa_npu.publish.probe_samples import sample_probe
from pa_npu.publish.probes import ProbePlan
from pa_npu.publish.trainer_reports import GRACE_S, TrainerReports, TrainersBroke
from pa_npu.publish.while_healthy import while_healthy
from pa_npu.weight_transfer.transport import Abandonment, epoch_name

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ATTEMPTS = 4
# Engines that keep the version before until all its groups are complete: one that may die, and one
# that takes its groups then.
_KEEP_BEFORE = 2


@dataclass(frozen=True)
class EnginesHold:
    """Reports that the engines hold a version, and how it came there.

    Times are those of time.perf_counter.

    probe: the engines' answers; None if no probe was due.
    ready_s: when the trainers were ready to send.
    loaded_s: when all engines had loaded the version.
    compared_s: when what they got had been compared with what was sent.
    done_s: when the publish was over.
    memory: the largest peak of an engine since the previous publish; None if no engine reports it.
    still_s: the longest time for which an engine stood still, counted from when it had nothing to
        generate and the trainers were ready.
    """

    probe: Probe | None
    ready_s: float
    loaded_s: float
    compared_s: float
    done_s: float
    memory: MemoryPeak | None = None
    still_s: float = 0.0


class CoordinatorPublish:
    """Loads weight versions into the engines of a fleet."""

    def __init__(
        self,
        *,
        rollout: RolloutConfig,
        timeout_s: float,
        seed: int,
        senders: Sequence[int],
        fleet: Fleet,
        pool: EnginePool,
        channel: StoreChannel,
        connection: Connection,
        sampling: Sampling,
        probes: ProbePlan,
    ) -> None:
        """timeout_s: publish.timeout_s. seed: of the run. senders: the trainer ranks that send."""
        self._rollout = rollout
        self._seed = seed
        self._senders = senders
        self._fleet = fleet
        self._pool = pool
        self._channel = channel
        self._connection = connection
        self._sampling = sampling
        self._probes = probes
        self._workers = rollout.tensor_parallel
        self._deadline_s = timeout_s
        self._limit_s = self._deadline_s + GRACE_S  # of what an engine is asked for
        self._trainers = TrainerReports(
            channel=channel,
            senders=senders,
            num_stages=len(connection.stages),
            deadline_s=timeout_s,
        )
        self._epoch = -1
        # the members of the groups of this epoch, while these are whole
        self._connected: list[Member] | None = None
        self._late_number = 0
        self._groups = EngineGroups(rollout, connection, timeout_s)
        self._arrival = ArrivalCheck(connection)
        self._live_memory = LiveMemoryCheck(connection.computation)
        # The version whose first attempt, while engines generated, failed.
        self._failed_ahead: int | None = None

    async def publish(
        self, version: int, prompt: Prompt | None, trainers_within_s: float
    ) -> EnginesHold:
        """Loads `version` into all engines, when the trainers send it.

        Nothing may be in flight, since a response has one version (I1). Raises DeadlineExceeded if
        the trainers are not ready in time, EngineError if all attempts fail, and InvariantViolation
        if an engine received something else than was sent (I5).

        Args:
            version: of the weights.
            prompt: for a probe; None if no probe is due.
            trainers_within_s: how long the trainers may take until they are ready to send.
        """
        Freshness.check_arrival(version, self._pool.num_in_flight)
        ready = asyncio.create_task(
            self._trainers.ready(version, trainers_within_s),
            name=f"trainers ready with version {version}",
        )
        reason = ""
        try:
            async with self._fleet.border():
                # trainers that are ready have given back what memory they could
                if self._fleet.has_lent_devices:
                    await ready
                    self._fleet.reclaim_devices()
                for attempt in range(int(self._failed_ahead == version), _ATTEMPTS):
                    place = {"version": version, "attempt": attempt}
                    members = await self._fleet.members()
                    try:
                        held = await self._attempt(
                            version, attempt, members, prompt, ready, trainers_within_s
                        )
                    except (EngineError, DeadlineExceeded) as error:
                        if _failed(ready):  # nobody is left to try again with
                            raise
                        reason = str(error)
                        logger.warning("publish of weight version %d failed: %s", version, reason)
                        await self._give_up(members, reason, place)
                        continue
                    logger.info(
                        "weight version %d on %s after %.2f s",
                        version,
                        counted(len(members), "engine"),
                        held.done_s - held.ready_s,
                    )
                    self._fleet.serve(members, version, self.deliver_late)
                    VERDICT.put(self._channel, PublishVerdict(True, probe=held.probe), **place)
                    return held
        finally:
            await cancel([ready])
        raise EngineError(
            f"weight version {version} could not be published in {_ATTEMPTS} attempts: {reason}"
        )

    async def prepare(self, version: int, trainers_within_s: float) -> list[Member] | None:
        """Sends `version` into the engines' second buffers while they generate.

        Returns the engines that have it. Returns None if it has to be published at the border,
        because members have changed and groups are formed anew, or because sending failed. Raises
        DeadlineExceeded if trainers are not ready in time, and InvariantViolation if an engine
        received something else than was sent.
        """
        await self._trainers.ready(version, trainers_within_s)
        members = self._fleet.serving()
        if not members or self._connected != members:
            return None
        place = {"version": version, "attempt": 0}
        receivers = self._groups.receivers(members, self._epoch)
        MEMBERS.put(self._channel, replace(receivers, delayed=True), **place)

        async def prepare(engine: RolloutEngine) -> LoadedWeights:
            received = await engine.prepare_weights(version, deadline_s=self._limit_s)
            return self._checked(engine, received, version)

        work = [self._while_healthy(member.engine, prepare(member.engine)) for member in members]
        try:
            received = await guarded(gather(work), self._trainers.broken(BROKEN, place))
        except (EngineError, DeadlineExceeded) as error:
            logger.warning(
                "weight version %d could not be sent beside generation: %s", version, error
            )
            self._failed_ahead = version
            await self._give_up(members, str(error), place)
            return None
        by_engine = {
            member.name: weights for member, weights in zip(members, received, strict=True)
        }
        if self._arrival.applies:
            self._arrival.check(version, await self._trainers.sent(SENT, place), by_engine)
            self._live_memory.expect(version, await self._trainers.trained(place))
        VERDICT.put(self._channel, PublishVerdict(True), **place)
        return members

    async def swap(
        self, version: int, prepared: Sequence[Member], begins: Callable[[], None]
    ) -> EnginesHold:
        """Lets engines load what they have prepared, each when it has nothing in flight.

        An engine that fails to do so is replaced, or gets the version late. As long as the previous
        version still has groups to write, engines swap as they become free, except for the last
        _KEEP_BEFORE: if an engine dies, another one writes its groups by the same weights.

        begins: called whenever engines have swapped and write by `version`.
        """
        start_s = time.perf_counter()
        in_turn = self._pool.writes_before(version)
        seconds: list[float] = []
        swapped: list[Member] = []

        async def swap(member: Member) -> LoadedWeights | None:
            Freshness.check_arrival(version, self._pool.in_flight(member.engine))
            self._pool.set_version(member.engine, CHANGING)
            swap_s = time.perf_counter()
            try:
                loaded = await member.engine.swap_weights(version, deadline_s=self._limit_s)
                self._checked(member.engine, loaded, version)
                self._check_live(version, {member.name: loaded})
            except (EngineError, DeadlineExceeded) as error:
                await self._fleet.report_lost(member.engine, str(error))
                return None
            seconds.append(time.perf_counter() - swap_s)
            swapped.append(member)
            self._pool.set_version(member.engine, version)
            return loaded

        loaded: list[LoadedWeights | None] = []
        async with self._fleet.border():
            present = await self._fleet.members()
            left = [member for member in present if member in prepared]
            while left:
                free = await self._free(left, version)
                loaded += await gather([swap(member) for member in free if member.state != "gone"])
                left = [member for member in left if member not in free]
                begins()
            # where all of them were lost, those that came in their place may be writing
            await self._pool.wait_until(lambda: not self._pool.in_flight_before(version))
            self._fleet.serve(swapped, version, self.deliver_late)
            ENGINES_SWAPPED.put(self._channel, EnginesSwapped(version), version=version)
        self._fleet.catch_up([member for member in present if member not in swapped])
        end_s = time.perf_counter()
        still_s = max(seconds, default=0.0)
        engines = counted(len(swapped), "engine")
        logger.info(
            "weight version %d on %s, which stood still for %.3f s", version, engines, still_s
        )
        memory = MemoryPeak.largest(
            weights.memory
            for weights in loaded
            if weights is not None and weights.memory is not None
        )
        # While engines generate, no time passes that the border has to account for.
        begin_s = end_s - still_s if in_turn else start_s
        return EnginesHold(
            probe=None,
            ready_s=begin_s,
            loaded_s=end_s,
            compared_s=end_s,
            done_s=end_s,
            memory=memory,
            still_s=still_s,
        )

    async def _free(self, left: Sequence[Member], version: int) -> list[Member]:
        """Returns the engines that may swap now, and those that are gone.

        It waits until there are some; the deadlines of groups in flight see to that.
        """

        def free_or_gone() -> list[Member]:
            if not self._pool.writes_before(version):
                return list(left)
            gone = [member for member in left if member.state == "gone"]
            present = [member for member in left if member.state != "gone"]
            free = [member for member in present if not self._pool.in_flight(member.engine)]
            num_swapping = max(0, len(present) - _KEEP_BEFORE)
            return gone + free[:num_swapping]

        await self._pool.wait_until(lambda: bool(free_or_gone()))
        return free_or_gone()

    async def deliver_late(self, member: Member, version: int) -> bool:
        """Loads the running iteration's version into one engine.

        Returns False if the trainers have begun to change it, or could not send it. Raises
        EngineError or DeadlineExceeded if the engine is to blame.
        """
        number = self._late_number
        self._late_number += 1
        engine = member.engine
        LATE_REQUEST.put(self._channel, LateRequest(version, self._workers), number=number)
        answers = [
            await LATE_ANSWER.wait_async(self._channel, self._deadline_s, number=number, rank=rank)
            for rank in self._senders
        ]
        held = all(answer.held for answer in answers)
        LATE_DECISION.put(self._channel, LateAnswer(held), number=number)
        if not held:
            return False
        place = {"number": number}
        load = self._load(engine, version, self._groups.of_late(number))
        try:
            loaded = await guarded(
                self._while_healthy(engine, load), self._trainers.broken(LATE_BROKEN, place)
            )
        except (EngineError, DeadlineExceeded) as error:
            self._abandon(self._connection.late_stages, number, str(error))
            if isinstance(error, TrainersBroke):
                logger.warning(
                    "engine %s gets its weights with the next publish: %s", engine.name, error
                )
                return False
            raise
        if self._arrival.applies:
            self._arrival.check_late(
                version, await self._trainers.sent(LATE_SENT, place), {engine.name: loaded}
            )
            self._check_live(
                version, {engine.name: loaded}, as_published=self._connection.sends_late_alike
            )
        return True

    async def _attempt(
        self,
        version: int,
        attempt: int,
        members: Sequence[Member],
        prompt: Prompt | None,
        ready: asyncio.Task[float],
        trainers_within_s: float,
    ) -> EnginesHold:
        place = {"version": version, "attempt": attempt}
        joins = self._connected != list(members)
        asked_s = time.perf_counter()
        self._epoch += joins
        self._connected = list(members)
        MEMBERS.put(self._channel, self._groups.receivers(members, self._epoch), **place)
        if joins:
            await ready
        begins_within_s = None if ready.done() else trainers_within_s + GRACE_S

        groups = self._groups.of_members(members, self._epoch)

        async def load(member: Member, groups: WeightGroups) -> LoadedWeights:
            await self._fleet.wake(member)
            return await self._load(
                member.engine, version, groups if joins else None, begins_within_s
            )

        sending = ready if begins_within_s is not None else None
        loads = [
            self._while_healthy(member.engine, load(member, joined), sending)
            for member, joined in zip(members, groups, strict=True)
        ]
        broken = self._trainers.broken(BROKEN, place, begins_within_s or 0.0)
        loaded = await guarded(gather(loads), broken, asyncio.shield(ready))
        loaded_s = time.perf_counter()
        if not ready.done() and READY.exists(self._channel, version=version):
            ready_s = loaded_s  # the trainers are quicker than the looks at that key
        else:
            ready_s = await ready
        by_engine = {member.name: weights for member, weights in zip(members, loaded, strict=True)}
        if self._arrival.applies:
            self._arrival.check(version, await self._trainers.sent(SENT, place), by_engine)
            self._live_memory.expect(version, await self._trainers.trained(place))
            self._check_live(version, by_engine)
        compared_s = time.perf_counter()
        probe = None
        if prompt is not None and self._probes.num_tokens:
            probe = await sample_probe(
                version=version,
                engines=[member.engine for member in members],
                prompt=prompt,
                plan=self._probes,
                sampling=self._sampling,
                run_seed=self._seed,
                deadline_s=self._rollout.request_timeout_s,
            )
        memory = MemoryPeak.largest(
            weights.memory for weights in loaded if weights.memory is not None
        )
        still_s = max(0.0, loaded_s - max(ready_s, asked_s))
        return EnginesHold(
            probe=probe,
            ready_s=ready_s,
            loaded_s=max(loaded_s, ready_s),
            compared_s=compared_s,
            done_s=time.perf_counter(),
            memory=memory,
            still_s=still_s,
        )

    def _check_live(
        self, version: int, loaded: Mapping[str, LoadedWeights], *, as_published: bool = True
    ) -> None:
        """Compares what engines hold after a load, if trainers send anything.

        Raises InvariantViolation (I5).
        """
        if self._arrival.applies:
            self._live_memory.check(version, loaded, as_published=as_published)

    async def _while_healthy(
        self,
        engine: RolloutEngine,
        work: Coroutine[Any, Any, T],
        sending: asyncio.Task[float] | None = None,
    ) -> T:
        return await while_healthy(
            engine,
            work,
            health_timeout_s=self._rollout.probe_timeout_s,
            sending=sending,
            limit_s=self._limit_s,
        )

    async def _give_up(self, members: Sequence[Member], reason: str, place: dict[str, int]) -> None:
        """Ends an attempt on both sides, and finds out which engines are left."""
        self._abandon(self._connection.stages, self._epoch, reason)
        self._connected = None
        await self._fleet.check(members)
        VERDICT.put(self._channel, PublishVerdict(False, reason), **place)

    def _abandon(self, stages: Sequence[StageManifest], epoch: int, reason: str) -> None:
        for stage in stages:
            Abandonment(*self._connection.store, epoch_name(stage.name, epoch)).declare(reason)

    async def _load(
        self,
        engine: RolloutEngine,
        version: int,
        joins: WeightGroups | None,
        begins_within_s: float | None = None,
    ) -> LoadedWeights:
        """Loads `version` into an engine.

        joins: the groups that the engine joins first; None if it is in them.
        """
        if joins is not None:
            await engine.join_weight_groups(joins, deadline_s=self._limit_s)
        deadline_s = self._limit_s + (begins_within_s or 0.0)
        loaded = await engine.load_weights(
            version, deadline_s=deadline_s, begins_within_s=begins_within_s
        )
        return self._checked(engine, loaded, version)

    def _checked(self, engine: RolloutEngine, loaded: LoadedWeights, version: int) -> LoadedWeights:
        if loaded.versions != (version,) * self._workers:
            raise EngineError(
                f"engine {engine.name}: workers hold weight versions {list(loaded.versions)} after "
                f"the publish of {version}"
            )
        return loaded


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None

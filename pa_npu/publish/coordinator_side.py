"""The coordinator's end of the protocol: engines join the trainers' groups, load a version, and answer a probe where one is due.

Engines are asked to load as soon as nothing is in flight, while the trainers still train and step:
what they do before the first byte comes is over then. The trainers are waited for only where groups
have to be formed anew, as forming them has a deadline, and where engines sleep, whose memory the
trainers use until then.

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
from pa_npu.control.typed import Topic
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
    TRAINED,
    VERDICT,
    EnginesSwapped,
    LateAnswer,
    LateRequest,
    Probe,
    ProbeResponse,
    PublishBroken,
    PublishVerdict,
    SentWeights,
    StageManifest,
)
from pa_npu.publish.probes import ProbePlan
from pa_npu.samples.seeds import group_seed
from pa_npu.weight_transfer.contents import added
from pa_npu.weight_transfer.transport import Abandonment, epoch_name

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Workers have the same deadline and a better message (which bucket, which stage); the client's only
# catches workers that hang.
_GRACE_S = 15.0
# Keeps the seeds of probes apart from those of groups, whose index is far below.
_PROBE_INDEX = 2**32
_ATTEMPTS = 4
_HEALTH_EVERY_S = 2.0
# Engines that keep the version before until all its groups are complete: one that may die, and one
# that takes its groups then.
_KEEP_BEFORE = 2


@dataclass(frozen=True)
class EnginesHold:
    """A version that the engines hold, and when (time.perf_counter): trainers were ready to send,
    engines had loaded it, what they got had been compared with what was sent, and all of it was
    over. probe: their answers, where one was due. memory: the most of any engine since the publish
    before; None where no engine says it. still_s: how long the longest of them stood still for it,
    from when it had nothing to generate and the trainers were ready."""

    probe: Probe | None
    ready_s: float
    loaded_s: float
    compared_s: float
    done_s: float
    memory: MemoryPeak | None = None
    still_s: float = 0.0


class TrainersBroke(EngineError):
    """The trainers could not do their part of a publish; the engines are not to blame."""


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
        self._limit_s = self._deadline_s + _GRACE_S  # of what an engine is asked for
        self._epoch = -1
        # the members of the groups of this epoch, while these are whole
        self._connected: list[Member] | None = None
        self._late_number = 0
        self._groups = EngineGroups(rollout, connection, timeout_s)
        self._arrival = ArrivalCheck(connection)
        self._live_memory = LiveMemoryCheck(connection.computation)
        # the version whose first attempt, beside generation, failed
        self._failed_ahead: int | None = None

    async def publish(
        self, version: int, prompt: Prompt | None, trainers_within_s: float
    ) -> EnginesHold:
        """All engines load `version` when the trainers send it. prompt: for a probe; None where no
        probe is due.

        Nothing may be in flight: a response has one version (I1). trainers_within_s: how long the
        trainers may take until they are ready to send. Raises DeadlineExceeded where they are not,
        EngineError when attempt after attempt fails, and InvariantViolation where an engine
        received something else than was sent (I5).
        """
        Freshness.check_arrival(version, self._pool.num_in_flight)
        ready = asyncio.create_task(
            self._ready(version, trainers_within_s), name=f"trainers ready with version {version}"
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
        """Beside generation: engines receive `version` into their second buffers when the trainers
        send it, and these go on.

        Returns the engines that have it; None where it has to be published at the border: members
        have changed, so that groups are formed anew, or it failed.
        Raises DeadlineExceeded where trainers are not ready in time, InvariantViolation where an
        engine received something else.
        """
        await self._ready(version, trainers_within_s)
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
            received = await guarded(gather(work), self._broken(BROKEN, place))
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
            self._arrival.check(version, await self._sent(SENT, place), by_engine)
            self._live_memory.expect(version, await self._trained(place))
        VERDICT.put(self._channel, PublishVerdict(True), **place)
        return members

    async def swap(
        self, version: int, prepared: Sequence[Member], begins: Callable[[], None]
    ) -> EnginesHold:
        """Engines load what they have prepared, each when it has nothing in flight. One that does
        not is replaced, or gets it late.

        Where the version before still has groups to write, engines swap as they become free, but
        the last _KEEP_BEFORE of them only when it has none left: should an engine die, another one
        writes its groups by the same weights. begins: called whenever engines have swapped, and
        write by `version`.
        """
        start_s, in_turn = time.perf_counter(), self._pool.writes_before(version)
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
        end_s, still_s = time.perf_counter(), max(seconds, default=0.0)
        engines = counted(len(swapped), "engine")
        logger.info(
            "weight version %d on %s, which stood still for %.3f s", version, engines, still_s
        )
        memory = MemoryPeak.largest(
            one.memory for one in loaded if one is not None and one.memory is not None
        )
        # beside generation no time passes that is the border's
        begin_s = end_s - still_s if in_turn else start_s
        return EnginesHold(None, begin_s, end_s, end_s, end_s, memory, still_s)

    async def _free(self, left: Sequence[Member], version: int) -> list[Member]:
        """Find those engines that may swap now, and those that are gone, whose groups go elsewhere;
        waits until there are some, which the deadlines of groups in flight bring about."""

        def found() -> list[Member]:
            if not self._pool.writes_before(version):
                return list(left)
            present = [member for member in left if member.state != "gone"]
            free = [member for member in present if not self._pool.in_flight(member.engine)]
            return [m for m in left if m not in present] + free[
                : max(0, len(present) - _KEEP_BEFORE)
            ]

        await self._pool.wait_until(lambda: bool(found()))
        return found()

    async def _ready(self, version: int, within_s: float) -> float:
        """When the trainers were seen to be ready."""
        await READY.wait_async(self._channel, within_s, version=version)
        return time.perf_counter()

    async def deliver_late(self, member: Member, version: int) -> bool:
        """One engine loads the running iteration's version; false where the trainers have begun to
        change it, or could not send it.

        Raises EngineError or DeadlineExceeded where the engine is to blame.
        """
        number, self._late_number = self._late_number, self._late_number + 1
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
                self._while_healthy(engine, load), self._broken(LATE_BROKEN, place)
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
                version, await self._sent(LATE_SENT, place), {engine.name: loaded}
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
        begins_within_s = None if ready.done() else trainers_within_s + _GRACE_S

        groups = self._groups.of_members(members, self._epoch)

        async def load(member: Member, groups: WeightGroups) -> LoadedWeights:
            await self._fleet.wake(member)
            return await self._load(
                member.engine, version, groups if joins else None, begins_within_s
            )

        begin = ready if begins_within_s is not None else None
        loads = [
            self._while_healthy(member.engine, load(member, joined), begin)
            for member, joined in zip(members, groups, strict=True)
        ]
        broken = self._broken(BROKEN, place, begins_within_s or 0.0)
        loaded = await guarded(gather(loads), broken, asyncio.shield(ready))
        loaded_s = time.perf_counter()
        if not ready.done() and READY.exists(self._channel, version=version):
            ready_s = loaded_s  # the trainers are quicker than the looks at that key
        else:
            ready_s = await ready
        by_engine = {member.name: weights for member, weights in zip(members, loaded, strict=True)}
        if self._arrival.applies:
            self._arrival.check(version, await self._sent(SENT, place), by_engine)
            self._live_memory.expect(version, await self._trained(place))
            self._check_live(version, by_engine)
        compared_s = time.perf_counter()
        probe = await self._probe(version, members, prompt) if prompt is not None else None
        memory = MemoryPeak.largest(
            weights.memory for weights in loaded if weights.memory is not None
        )
        still_s = max(0.0, loaded_s - max(ready_s, asked_s))
        return EnginesHold(
            probe, ready_s, max(loaded_s, ready_s), compared_s, time.perf_counter(), memory, still_s
        )

    def _check_live(
        self, version: int, loaded: Mapping[str, LoadedWeights], *, as_published: bool = True
    ) -> None:
        """After a load, where trainers send anything. Raises InvariantViolation (I5)."""
        if self._arrival.applies:
            self._live_memory.check(version, loaded, as_published=as_published)

    async def _sent(self, topic: Topic[SentWeights], place: dict[str, int]) -> list[SentWeights]:
        """Wait for what each stage's leader says that it sent: it does so when the last engine has
        the last bucket.
        """
        return [
            await topic.wait_async(self._channel, self._deadline_s, stage=stage, **place)
            for stage in range(len(self._connection.stages))
        ]

    async def _trained(self, place: dict[str, int]) -> dict[str, str]:
        """Wait for what the trainers hold of each tensor that they train: its contents, summed up
        while engines load.
        """
        of_ranks = []
        for rank in self._senders:
            trained = await TRAINED.wait_async(self._channel, self._deadline_s, rank=rank, **place)
            self._channel.delete(TRAINED.at(rank=rank, **place))  # a mixture has many tensors
            of_ranks.append(trained.contents)
        return added(of_ranks)

    async def _broken(
        self, topic: Topic[PublishBroken], place: dict[str, int], longer_s: float = 0.0
    ) -> None:
        """A guard of work that may never end where the trainers cannot do their part: raises
        TrainersBroke then.

        longer_s: what the work may wait for the trainers beside a publish.
        """
        limit_s = 2 * self._deadline_s + _GRACE_S + longer_s
        broken = await topic.wait_async(self._channel, limit_s, **place)
        raise TrainersBroke(f"the trainers could not send: {broken.reason}")

    async def _while_healthy(
        self,
        engine: RolloutEngine,
        work: Coroutine[Any, Any, T],
        begin: asyncio.Task[float] | None = None,
    ) -> T:
        """`work` on an engine, which may never answer when its worker dies meanwhile. Raises
        EngineError then.

        begin: when the trainers send, for work that was asked for before. A worker that hangs
        leaves the engine healthy, so from then on it has the time that a publish has, whatever it
        may have waited. Raises DeadlineExceeded beyond it.
        """

        async def is_healthy() -> None:
            while True:
                await asyncio.sleep(_HEALTH_EVERY_S)
                await engine.check_health(deadline_s=self._rollout.probe_timeout_s)
                # a failure of the trainers ends the attempt elsewhere
                if (
                    begin is None
                    or not begin.done()
                    or begin.cancelled()
                    or begin.exception() is not None
                ):
                    continue
                if time.perf_counter() - begin.result() > self._limit_s:
                    raise DeadlineExceeded(
                        f"engine {engine.name}: it has not loaded the weights {self._limit_s:g} s "
                        "after the trainers began to send them; it may hang"
                    )

        return await guarded(work, is_healthy())

    async def _give_up(self, members: Sequence[Member], reason: str, place: dict[str, int]) -> None:
        """End an attempt on both sides, and find out which engines are left."""
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
        """joins: the groups that the engine joins first, where it is not in them."""
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

    async def _probe(self, version: int, members: Sequence[Member], prompt: Prompt) -> Probe | None:
        """At least one sampled response per engine, all to the same prompt, with log-probs for the
        trainers to compare (I5).
        """
        num_tokens = self._probes.num_tokens
        if not num_tokens:
            return None
        sampling = Sampling(
            # as many as asked for, whatever ends a response
            max_tokens=min(num_tokens, self._sampling.max_tokens),
            temperature=self._sampling.temperature,
            ignore_eos=True,
        )
        seed = group_seed(self._seed, version, _PROBE_INDEX)
        # where the probe decides about publishes, what it has must not depend on which engines
        # serve
        count = max(len(members), self._probes.num_responses)

        async def sample(number: int, engine: RolloutEngine) -> ProbeResponse:
            deadline_s = self._rollout.request_timeout_s
            completions = await engine.generate(
                prompt.tokens, 1, seed + number, sampling, deadline_s=deadline_s
            )
            return ProbeResponse(completions[0].tokens.tolist(), completions[0].logprobs.tolist())

        asked = [members[number % len(members)].engine for number in range(count)]
        responses = await gather([sample(number, engine) for number, engine in enumerate(asked)])
        return Probe([int(token) for token in prompt.tokens], responses)


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None

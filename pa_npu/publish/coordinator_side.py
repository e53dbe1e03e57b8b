"""The coordinator's end of the protocol by which engines get the trainers' weights.

Engines join the trainers' groups, load a version, and answer a probe if one is due. They are asked
to load as soon as nothing is in flight, while the trainers still train and step: what they do
before the first byte comes is over then. The coordinator waits for the trainers in two cases only:
before groups are formed anew, as forming them has a deadline, and if engines sleep, since the
trainers use their memory until then.

The trainers' end is pa_npu.publish.trainer_side; what runs inside the engines is
pa_npu.weight_transfer.receiver. Between two publishes single engines get the version from
late_delivery, and engines that have prepared a version swap to it in engine_swaps. When
an engine dies meanwhile, the attempt is given up on both sides and made again with those that are
left: nothing is in flight at a border, so an attempt that fails costs time only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pa_npu.config.sections.rollout import RolloutConfig
from pa_npu.config.words import counted
from pa_npu.control.channel import StoreChannel
from pa_npu.control.freshness import Freshness
from pa_npu.control.tasks import cancel, gather, guarded
from pa_npu.data.prompts import Prompt
from pa_npu.engines.member import Member
from pa_npu.engines.membership import EngineMembership
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import EngineError, LoadedWeights, Sampling, WeightGroups
from pa_npu.errors import DeadlineExceeded
from pa_npu.publish.engine_loads import EngineLoads
from pa_npu.publish.engine_swaps import EngineSwaps, largest_peak
from pa_npu.publish.engines import Connection, EngineProcessGroups
from pa_npu.publish.engines_hold import EnginesHold
from pa_npu.publish.late_delivery import LateDelivery
from pa_npu.publish.messages import BROKEN, MEMBERS, READY, VERDICT, PublishVerdict
from pa_npu.publish.probe_samples import sample_probe
from pa_npu.publish.probes import ProbePlan
from pa_npu.publish.trainer_reports import GRACE_S, TrainerReports
from pa_npu.publish.weight_checks import WeightChecks

logger = logging.getLogger(__name__)

_ATTEMPTS = 4


class CoordinatorPublish:
    """Loads weight versions into the engines of a membership."""

    def __init__(
        self,
        *,
        rollout: RolloutConfig,
        timeout_s: float,
        seed: int,
        senders: Sequence[int],
        publishers: Sequence[int],
        membership: EngineMembership,
        pool: EnginePool,
        channel: StoreChannel,
        connection: Connection,
        sampling: Sampling,
        probes: ProbePlan,
    ) -> None:
        """timeout_s: publish.timeout_s. seed: of the run. senders: the trainer ranks whose weights
        together are sent. publishers: those that send them.
        """
        self._rollout = rollout
        self._seed = seed
        self._senders = senders
        self._membership = membership
        self._pool = pool
        self._channel = channel
        self._connection = connection
        self._sampling = sampling
        self._probes = probes
        self._trainers = TrainerReports(
            channel=channel,
            senders=senders,
            publishers=publishers,
            deadline_s=timeout_s,
        )
        self._epoch = -1
        # the members of the groups of this epoch, while these are whole
        self._connected: list[Member] | None = None
        self._groups = EngineProcessGroups(rollout, connection, timeout_s)
        self._loads = EngineLoads(
            num_workers=rollout.tensor_parallel,
            limit_s=timeout_s + GRACE_S,
            health_timeout_s=rollout.probe_timeout_s,
        )
        self._checks = WeightChecks(connection, self._trainers)
        self._late_delivery = LateDelivery(
            channel=channel,
            senders=senders,
            num_workers=rollout.tensor_parallel,
            timeout_s=timeout_s,
            connection=connection,
            groups=self._groups,
            loads=self._loads,
            trainers=self._trainers,
            checks=self._checks,
        )
        self._swaps = EngineSwaps(
            membership=membership,
            pool=pool,
            channel=channel,
            loads=self._loads,
            checks=self._checks,
            deliver_late=self.deliver_late,
        )
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
        # an attempt that was made while engines generated, and failed, counts
        first_attempt = 1 if self._failed_ahead == version else 0
        reason = ""
        try:
            async with self._membership.border():
                # trainers that are ready have given back what memory they could
                if self._membership.has_lent_devices:
                    await ready
                    self._membership.reclaim_devices()
                for attempt in range(first_attempt, _ATTEMPTS):
                    place = {"version": version, "attempt": attempt}
                    members = await self._membership.members()
                    try:
                        held = await self._attempt(
                            version, attempt, members, prompt, ready, trainers_within_s
                        )
                    except (EngineError, DeadlineExceeded) as error:
                        if _failed(ready):  # nobody is left to try again with
                            raise
                        reason = await self._give_up(members, error, place, ready.done())
                        logger.warning("publish of weight version %d failed: %s", version, reason)
                        continue
                    logger.info(
                        "weight version %d on %s after %.2f s",
                        version,
                        counted(len(members), "engine"),
                        held.done_s - held.ready_s,
                    )
                    self._membership.serve(members, version, self.deliver_late)
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
        members = self._membership.serving()
        if not members or self._connected != members:
            return None
        place = {"version": version, "attempt": 0}
        receivers = self._groups.receivers(members, self._epoch)
        MEMBERS.put(self._channel, replace(receivers, delayed=True), **place)

        work = []
        for member in members:
            prepare = self._loads.prepare(member.engine, version)
            work.append(self._loads.while_healthy(member.engine, prepare))
        try:
            received = await guarded(gather(work), self._trainers.broken(BROKEN, place))
        except (EngineError, DeadlineExceeded) as error:
            self._failed_ahead = version
            reason = await self._give_up(members, error, place, True)
            logger.warning(
                "weight version %d could not be sent while engines generate: %s", version, reason
            )
            return None
        by_engine = {
            member.name: weights for member, weights in zip(members, received, strict=True)
        }
        await self._checks.check_arrival(version, place, by_engine)
        VERDICT.put(self._channel, PublishVerdict(True), **place)
        return members

    async def swap(
        self, version: int, prepared: Sequence[Member], begins: Callable[[], None]
    ) -> EnginesHold:
        """Lets engines load what they have prepared; see EngineSwaps.swap."""
        return await self._swaps.swap(version, prepared, begins)

    async def deliver_late(self, member: Member, version: int) -> bool:
        """Loads the running iteration's version into one engine; see LateDelivery.deliver."""
        return await self._late_delivery.deliver(member, version)

    async def _attempt(
        self,
        version: int,
        attempt: int,
        members: Sequence[Member],
        prompt: Prompt | None,
        ready: asyncio.Task[float],
        trainers_within_s: float,
    ) -> EnginesHold:
        """Makes one attempt to load `version` into `members`; see publish."""
        place = {"version": version, "attempt": attempt}
        asked_s = time.perf_counter()
        loaded = await self._load_all(members, place, ready, trainers_within_s)
        loaded_s = time.perf_counter()
        if not ready.done() and READY.exists(self._channel, version=version):
            ready_s = loaded_s  # the trainers are quicker than the looks at that key
        else:
            ready_s = await ready
        by_engine = {member.name: weights for member, weights in zip(members, loaded, strict=True)}
        await self._checks.check_arrival(version, place, by_engine)
        self._checks.check_live(version, by_engine)
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
        return EnginesHold(
            probe=probe,
            ready_s=ready_s,
            loaded_s=max(loaded_s, ready_s),
            compared_s=compared_s,
            done_s=time.perf_counter(),
            memory=largest_peak(loaded),
            still_s=max(0.0, loaded_s - max(ready_s, asked_s)),
        )

    async def _load_all(
        self,
        members: Sequence[Member],
        place: dict[str, int],
        ready: asyncio.Task[float],
        trainers_within_s: float,
    ) -> list[LoadedWeights]:
        """Asks all members to load a version; returns their answers, in the order of the members.

        They are asked before the trainers are ready, unless groups have to be formed anew.
        """
        version = place["version"]
        forms_groups = self._connected != list(members)
        if forms_groups:
            self._epoch += 1
        self._connected = list(members)
        MEMBERS.put(self._channel, self._groups.receivers(members, self._epoch), **place)
        if forms_groups:
            await ready
        begins_within_s = None
        sending = None
        if not ready.done():
            begins_within_s = trainers_within_s + GRACE_S
            sending = ready

        async def load(member: Member, joins: WeightGroups | None) -> LoadedWeights:
            await self._membership.wake(member)
            return await self._loads.load(member.engine, version, joins, begins_within_s)

        loads = []
        groups = self._groups.of_members(members, self._epoch)
        for member, joined in zip(members, groups, strict=True):
            work = load(member, joined if forms_groups else None)
            loads.append(self._loads.while_healthy(member.engine, work, sending))
        broken = self._trainers.broken(BROKEN, place, begins_within_s or 0.0)
        return await guarded(gather(loads), broken, asyncio.shield(ready))

    async def _give_up(
        self, members: Sequence[Member], error: Exception, place: dict[str, int], were_ready: bool
    ) -> str:
        """Ends an attempt on both sides, and finds out who is left. Returns why it failed.

        were_ready: whether the trainers had begun with it.
        """
        reason = str(error)
        self._connection.abandon(self._connection.stages, self._epoch, reason)
        self._connected = None
        if were_ready and self._connection.has_trainers:
            silent = await self._trainers.silent(place)
            if silent:
                ranks = ", ".join(map(str, silent))
                reason += (
                    f"; nothing is heard of these trainer ranks: {ranks}; look at the log of the "
                    "first one for where it hangs"
                )
        await self._membership.check(members)
        VERDICT.put(self._channel, PublishVerdict(False, reason), **place)
        return reason


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None

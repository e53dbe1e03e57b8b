"""LateDelivery: gives the running iteration's version to an engine that was started again.

The trainers' end is pa_npu.publish.late_engines, which draws the protocol.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from pa_npu.control.channel import StoreChannel
from pa_npu.control.tasks import guarded
from pa_npu.engines.member import Member
from pa_npu.engines.protocol import EngineError
from pa_npu.errors import DeadlineExceeded
from pa_npu.publish.engine_loads import EngineLoads
from pa_npu.publish.engines import Connection, EngineProcessGroups
from pa_npu.publish.messages import (
    LATE_ANSWER,
    LATE_BROKEN,
    LATE_DECISION,
    LATE_REQUEST,
    LateDecision,
    LateRequest,
)
from pa_npu.publish.trainer_reports import TrainerReports, TrainersBroke
from pa_npu.publish.weight_checks import WeightChecks

logger = logging.getLogger(__name__)


class LateDelivery:
    """Delivers a version to one engine while the trainers train.

    Args:
        channel: to the trainers.
        senders: the trainer ranks whose weights together are sent.
        num_workers: of the engine.
        timeout_s: publish.timeout_s.
        connection: how engines reach the trainers' groups.
        groups: names the groups that the engine joins.
        loads: requests to the engine.
        trainers: waits for the trainers' messages.
        checks: compares what arrived with what was sent.
    """

    def __init__(
        self,
        *,
        channel: StoreChannel,
        senders: Sequence[int],
        num_workers: int,
        timeout_s: float,
        connection: Connection,
        groups: EngineProcessGroups,
        loads: EngineLoads,
        trainers: TrainerReports,
        checks: WeightChecks,
    ) -> None:
        self._channel = channel
        self._senders = senders
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._connection = connection
        self._groups = groups
        self._loads = loads
        self._trainers = trainers
        self._checks = checks
        self._next_number = 0

    async def deliver(self, member: Member, version: int) -> bool:
        """Loads the running iteration's version into one engine.

        Returns False if the trainers have begun to change it, or could not send it. Raises
        EngineError or DeadlineExceeded if the engine is to blame.
        """
        number = self._next_number
        self._next_number += 1
        if not await self._trainers_hold(version, number):
            return False
        engine = member.engine
        load = self._loads.load(engine, version, self._groups.of_late(number))
        try:
            loaded = await guarded(
                self._loads.while_healthy(engine, load),
                self._trainers.broken(LATE_BROKEN, {"number": number}),
            )
        except (EngineError, DeadlineExceeded) as error:
            self._connection.abandon(self._connection.late_stages, number, str(error))
            if isinstance(error, TrainersBroke):
                logger.warning(
                    "engine %s gets its weights with the next publish: %s", engine.name, error
                )
                return False
            raise
        await self._checks.check_late(version, number, {engine.name: loaded})
        return True

    async def _trainers_hold(self, version: int, number: int) -> bool:
        """Asks all senders to hold `version`, and tells them whether all of them do.

        A sender that does not answer in time holds nothing; the engine is not to blame.
        """
        request = LateRequest(version, self._num_workers)
        LATE_REQUEST.put(self._channel, request, number=number)
        held = True
        for rank in self._senders:
            try:
                answer = await LATE_ANSWER.wait_async(
                    self._channel, self._timeout_s, number=number, rank=rank
                )
            except DeadlineExceeded as error:
                logger.warning("late delivery %d: %s", number, error)
                held = False
                break
            held = held and answer.held
        LATE_DECISION.put(self._channel, LateDecision(held), number=number)
        return held

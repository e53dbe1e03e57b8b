"""EngineSwaps: engines begin to write by the version that they have prepared.

A version comes into engines' second buffers while they generate (CoordinatorPublish.prepare).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from pa_npu.config.words import counted
from pa_npu.control.channel import StoreChannel
from pa_npu.control.freshness import Freshness
from pa_npu.control.tasks import gather
from pa_npu.engines.member import Member
from pa_npu.engines.membership import EngineMembership
from pa_npu.engines.pool import CHANGING, EnginePool
from pa_npu.engines.protocol import EngineError, LoadedWeights
from pa_npu.errors import DeadlineExceeded
from pa_npu.platform.memory_peaks import MemoryPeak
from pa_npu.publish.engine_loads import EngineLoads
from pa_npu.publish.engines_hold import EnginesHold
from pa_npu.publish.messages import ENGINES_SWAPPED, EnginesSwapped
from pa_npu.publish.weight_checks import WeightChecks

logger = logging.getLogger(__name__)

# Engines that keep the version before until all its groups are complete: one that may die, and one
# that takes its groups then.
_KEEP_BEFORE = 2

DeliverLate = Callable[[Member, int], Awaitable[bool]]
"""Gives a version to an engine inside an iteration (LateDelivery.deliver)."""


class EngineSwaps:
    """Swaps the engines of a membership to a version that they have prepared."""

    def __init__(
        self,
        *,
        membership: EngineMembership,
        pool: EnginePool,
        channel: StoreChannel,
        loads: EngineLoads,
        checks: WeightChecks,
        deliver_late: DeliverLate,
    ) -> None:
        self._membership = membership
        self._pool = pool
        self._channel = channel
        self._loads = loads
        self._checks = checks
        self._deliver_late = deliver_late

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
        swaps = _Swaps()
        async with self._membership.border():
            present = await self._membership.members()
            waiting = [member for member in present if member in prepared]
            while waiting:
                free_or_gone = await self._next(waiting, version)
                await gather(
                    [
                        self._swap(member, version, swaps)
                        for member in free_or_gone
                        if member.state != "gone"
                    ]
                )
                waiting = [member for member in waiting if member not in free_or_gone]
                begins()
            # where all of them were lost, those that came in their place may be writing
            await self._pool.wait_until(lambda: not self._pool.in_flight_before(version))
            self._membership.serve(swaps.members, version, self._deliver_late)
            ENGINES_SWAPPED.put(self._channel, EnginesSwapped(version), version=version)
        self._membership.catch_up([member for member in present if member not in swaps.members])
        end_s = time.perf_counter()
        still_s = max(swaps.seconds, default=0.0)
        logger.info(
            "weight version %d on %s, which stood still for %.3f s",
            version,
            counted(len(swaps.members), "engine"),
            still_s,
        )
        # While engines generate, no time passes that the border has to account for.
        begin_s = end_s - still_s if in_turn else start_s
        return EnginesHold(
            probe=None,
            ready_s=begin_s,
            loaded_s=end_s,
            compared_s=end_s,
            done_s=end_s,
            memory=largest_peak(swaps.loaded),
            still_s=still_s,
        )

    async def _swap(self, member: Member, version: int, swaps: _Swaps) -> None:
        """Swaps one engine and adds it to `swaps`; reports it lost if it fails."""
        Freshness.check_arrival(version, self._pool.in_flight(member.engine))
        self._pool.set_version(member.engine, CHANGING)
        start_s = time.perf_counter()
        try:
            loaded = await self._loads.swap(member.engine, version)
            self._checks.check_live(version, {member.name: loaded})
        except (EngineError, DeadlineExceeded) as error:
            await self._membership.report_lost(member.engine, str(error))
            return
        swaps.seconds.append(time.perf_counter() - start_s)
        swaps.members.append(member)
        swaps.loaded.append(loaded)
        self._pool.set_version(member.engine, version)

    async def _next(self, waiting: Sequence[Member], version: int) -> list[Member]:
        """Returns the engines that may swap now, and those that are gone.

        It waits until there are some; the deadlines of groups in flight see to that.
        """

        def free_or_gone() -> list[Member]:
            if not self._pool.writes_before(version):
                return list(waiting)
            gone = [member for member in waiting if member.state == "gone"]
            present = [member for member in waiting if member.state != "gone"]
            free = [member for member in present if not self._pool.in_flight(member.engine)]
            num_swapping = max(0, len(present) - _KEEP_BEFORE)
            return gone + free[:num_swapping]

        await self._pool.wait_until(lambda: bool(free_or_gone()))
        return free_or_gone()


class _Swaps:
    """The engines that have swapped in one border, in the order in which they did."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.loaded: list[LoadedWeights] = []
        self.seconds: list[float] = []
        """How long each stood still."""


def largest_peak(loaded: Sequence[LoadedWeights]) -> MemoryPeak | None:
    """Returns the largest memory peak that an engine reported; None if no engine reported one."""
    return MemoryPeak.largest(weights.memory for weights in loaded if weights.memory is not None)

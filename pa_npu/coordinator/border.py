"""Crossing an iteration border: a weight version goes from the trainers to all engines, at once or to one engine after another.

    together   trainers send, engines load, everybody waits                               publish.mode=blocking
               engines load beside generation, and swap when all of an iteration is written   delayed
    rolling    an engine that is through with its groups swaps, and the first to have swapped end
               the wait; the border is crossed when all have                                        publish.mode=rolling

Before it, engines are made free: an evaluation beside training ends, samples for other programs do,
and so does what older versions write.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.tasks import cancel
from pa_npu.coordinator.evaluate import RunEvaluations
from pa_npu.coordinator.record import Border
from pa_npu.coordinator.served_run import ServedRun
from pa_npu.data.prompts import Prompt
from pa_npu.engines.member import Member
from pa_npu.engines.membership import Fleet
from pa_npu.engines.pool import EnginePool
from pa_npu.publish.coordinator_side import CoordinatorPublish, EnginesHold
from pa_npu.publish.messages import READY
from pa_npu.telemetry.timeline import Timeline, now, on_clock


@dataclass(eq=False, repr=False)
class BorderCrossing:
    """Takes a run from one weight version to the next.

    written: waits until all groups of earlier versions are written.
    published: the version that is given new groups; None before the first.
    """

    config: Config
    channel: StoreChannel
    fleet: Fleet
    pool: EnginePool
    publish: CoordinatorPublish
    timeline: Timeline
    evaluations: RunEvaluations
    service: ServedRun | None
    written: Callable[[int], Awaitable[None]]
    published: int | None = field(default=None, init=False)
    # the next version, beside generation
    _arriving: asyncio.Task[list[Member] | None] | None = field(default=None, init=False)
    # engines, one after another
    _swapping: asyncio.Task[EnginesHold] | None = field(default=None, init=False)

    async def cross(self, version: int, prompt: Prompt | None, *, is_first: bool) -> Border | None:
        """A version from trainers to engines. prompt: for a probe.

        None: some engines have it, and `rest` waits for the others.
        """
        config = self.config
        within_s = config.run.startup_timeout_s if is_first else config.wait_timeout_s
        await self._free_engines(version, within_s)
        if self.config.publish.divergence is not None and not is_first:
            ready = await READY.wait_async(self.channel, within_s, version=version)
            if not ready.publishes:
                return self._left_out()
        prepared = None
        if self._arriving is not None:
            prepared, self._arriving = await self._arriving, None
        if prepared is None:
            await self.written(version)
            probed = prompt if is_first or not self.config.delays(version) else None
            return self._crossed(version, await self.publish.publish(version, probed, within_s))
        some = asyncio.Event()
        swapping = self.publish.swap(version, prepared, some.set)
        self._swapping = asyncio.create_task(swapping, name=f"swap to weight version {version}")
        if not self.config.swaps_in_turn(version):
            return await self.rest(version)
        await _first_of(self._swapping, some)
        self.published = version
        return None

    async def rest(self, version: int) -> Border:
        """All engines have swapped to `version`, and what the version before wrote is in the
        buffer.
        """
        assert self._swapping is not None
        held, self._swapping = await self._swapping, None
        await self.written(version)
        return self._crossed(version, held)

    def expect(self, version: int, crossed: asyncio.Future[Border]) -> None:
        """The next version, where it is delayed, may come into engines' second buffers, once these
        are free of the one before.
        """
        if self.config.delays(version):
            self._arriving = asyncio.create_task(
                self._arrive(version, crossed), name=f"weight version {version}"
            )

    async def close(self) -> None:
        """Give up what is under way."""
        await cancel([task for task in (self._arriving, self._swapping) if task is not None])

    async def _free_engines(self, version: int, within_s: float) -> None:
        """Engines that wait inside a load answer nothing: with others' work on them they are asked
        when the trainers are ready.
        """
        if self.evaluations.is_running:
            await READY.wait_async(self.channel, within_s, version=version)
            await self.evaluations.cut_short(version - 1)
        if self.service is not None:
            await READY.wait_async(self.channel, within_s, version=version)
            await self.service.quiet()

    async def _arrive(self, version: int, crossed: asyncio.Future[Border]) -> list[Member] | None:
        await asyncio.wait({crossed})
        # what is produced meanwhile, and then what is trained
        within_s = self.config.border_timeout_s + self.config.wait_timeout_s
        return await self.publish.prepare(version, within_s)

    def _left_out(self) -> Border:
        """Engines keep what they have."""
        if self.service is not None and self.published is not None:
            self.service.published(self.published)
        now_s = time.perf_counter()
        return Border(
            EnginesHold(None, now_s, now_s, now_s, now_s), self.pool.use(), self.fleet.size
        )

    def _crossed(self, version: int, held: EnginesHold) -> Border:
        # engines were asked before: that ran beside training
        self.timeline.complete("publish", on_clock(held.ready_s), now(), version=version)
        self.published = version
        if self.service is not None:
            self.service.published(version)
        return Border(held, self.pool.use(), self.fleet.size)


async def _first_of(task: asyncio.Task[Any], event: asyncio.Event) -> None:
    """Until the event is set, or the task has ended. Raises what the task raised."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel([waiting])
    if task.done():
        task.result()

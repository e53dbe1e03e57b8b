"""The iterations of a run as the coordinator makes them: publish a weight version, produce by it, and record what was trained.

For version v, while the trainers train iteration v:

    engines come to hold version v                                    publication.py
    iteration v - 1 ends: the schedule learns from it                 IterationEnd (planning/iteration_model)
    version v is evaluated, if that is due                            evaluate.py
    all iterations that are due are produced into the buffer          iterations_ahead.py, producer.py
    meanwhile iteration v - 1 is recorded                             IterationEnd, record.py, chain.py

With schedule.max_staleness = 0 what is due is iteration v, which the trainers consume as it is
produced; with max_staleness = k iteration v + k. Trainers and coordinator meet in the store of the
launcher only (control/messages.py, publish/). The last version is published and evaluated, and
produces nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.messages import BORDER, REPORT
from pa_npu.control.tasks import TaskScope, cancel
from pa_npu.coordinator.chain import RunChain
from pa_npu.coordinator.delivery import Produced
from pa_npu.coordinator.evaluate import Evaluations
from pa_npu.coordinator.iterations_ahead import IterationsAhead
from pa_npu.coordinator.publication import OnCrossed, Publication
from pa_npu.coordinator.record import BorderOutcome, Interval, RunRecords, iteration_record
from pa_npu.planning.iteration_model.subjects import IterationTimes, Prediction


@dataclass(eq=False, repr=False, kw_only=True)
class Coordinator:
    """Leads a run over parts that are already running. first, last: weight versions."""

    first: int
    last: int
    publication: Publication
    ahead: IterationsAhead
    evaluations: Evaluations
    iteration_end: IterationEnd

    async def run(self) -> None:
        """Runs from the publish of the first version to the evaluation of the last one."""
        try:
            async with TaskScope() as scope:
                await self._iterate(scope)
        finally:
            await self.publication.close()
            await self.iteration_end.close()

    async def _iterate(self, scope: TaskScope) -> None:
        ahead = self.ahead
        evaluations = self.evaluations
        recorded = self.iteration_end.recorded
        ahead.begin()
        crossed = await self._cross(self.first, self._begin, scope)
        for version in range(self.first, self.last):
            evaluation = await evaluations.before_producing(version, recorded)
            self.publication.expect(version + 1, crossed)
            await ahead.prepared()
            produced = await ahead.produce_due(version, self.publication, self.last, scope)
            border = await crossed
            ahead.updates.save(version + 1)  # all that is due at this version is produced
            evaluations.after_producing(version)
            interval = Interval(evaluation, border, produced)
            crossed = await self._cross(version + 1, partial(self._end, version, interval), scope)
        await evaluations.before_producing(self.last, recorded)
        await recorded()

    async def _cross(
        self, version: int, on_crossed: OnCrossed, scope: TaskScope
    ) -> asyncio.Future[BorderOutcome]:
        """Brings the engines to `version`; the next schedule is chosen while trainers still train."""
        prompt = self.ahead.draw(self.last)
        self.ahead.prepare(self.last)
        return await self.publication.cross(version, prompt, on_crossed, scope)

    async def _begin(self, border: BorderOutcome) -> None:
        """Crosses the first border, which ends no iteration."""
        await self.ahead.prepared()

    async def _end(self, iteration: int, interval: Interval, border: BorderOutcome) -> None:
        """Ends `iteration`, which was trained in `interval`, once nothing asks the controller about
        it any more.
        """

        async def end() -> None:
            await self.iteration_end.recorded()
            await self.ahead.prepared()
            self.iteration_end.end(self.ahead.trained(iteration), interval, border)

        await even_if_cancelled(end())


# How long the record of a finished iteration may still take when the run fails, or is ended, after
# it.
_LAST_RECORD_S = 2.0


class Learns(Protocol):
    """Learns from iterations for the schedules of later ones: a ScheduleController."""

    def end_iteration(self, times: IterationTimes, iteration: int) -> Prediction:
        """Learns from an iteration that has ended; returns what had been predicted of it."""


@dataclass(eq=False, repr=False)
class IterationEnd:
    """Ends a trained iteration while the next one runs: the schedule learns from it, and its record
    is written, one at a time.
    """

    config: Config
    channel: StoreChannel
    controller: Learns
    records: RunRecords
    chain: RunChain
    _recording: asyncio.Task[None] | None = field(default=None, init=False)

    def end(self, produced: Produced, start: Interval, end: BorderOutcome) -> None:
        """Lets the schedule learn from the iteration, and begins its record.

        start: the interval in which it was trained. end: the border after it.
        """
        report = REPORT.get(self.channel, iteration=produced.iteration)
        iteration_s = end.held.done_s - start.border.held.done_s
        prediction = Prediction("", None, None)
        if len(start.produced) == 1:
            evaluation_s = start.evaluation["seconds"] if start.evaluation else 0.0
            times = IterationTimes(
                iteration_s=iteration_s - evaluation_s,
                border_s=end.publish_s,
                train_s=report.training.train_s,
                step_s=report.training.step_s,
            )
            prediction = self.controller.end_iteration(times, start.produced[0])

        async def record() -> None:
            # the trainers' account of the border comes when they have crossed it
            border = await BORDER.wait_async(
                self.channel, self.config.deadlines.wait_timeout_s, version=produced.iteration + 1
            )
            numbers = iteration_record(
                self.config, produced, report, border, prediction, start, end
            )
            digests = self.records.write_iteration(numbers, produced.samples, produced.kept)
            await self.chain.write(produced, report, border, digests)

        self._recording = asyncio.create_task(
            record(), name=f"record of iteration {produced.iteration}"
        )

    async def recorded(self) -> None:
        """Waits for the record of the iteration that ended last. Raises what went wrong with it."""
        if self._recording is not None:
            await self._recording
            self._recording = None

    async def close(self) -> None:
        """Ends a record that is under way, after a moment more."""
        if self._recording is not None:
            await asyncio.wait({self._recording}, timeout=_LAST_RECORD_S)
            await cancel([self._recording])


async def even_if_cancelled(work: Coroutine[Any, Any, None]) -> None:
    """Does the work; a cancellation lets it go on for a moment before it is raised."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=_LAST_RECORD_S)
        await cancel([task])
        if not task.cancelled():
            task.exception()  # nobody else looks at it
        raise

"""The iteration protocol of the coordinator: publish a weight version, evaluate it, produce its iteration, record the last one.

Per weight version v, with keys in the store that the launcher hosts, where the roster of engines is
too:

    engines are asked to load v; trainers send their report of iteration v - 1, and v   border.py (control/messages.py, publish/)
    the schedule learns from iteration v - 1 and chooses for v                          IterationEnd (planning/iteration_model)
    evaluation of version v, where due; or beside training (evaluate.overlap)           evaluate.py
    iteration v is produced into the rollout buffer while the trainers consume it       iterations_ahead.py, producer.py
    meanwhile iteration v - 1 goes into metrics.jsonl, the chain and onto the console   IterationEnd, record.py, chain.py

With schedule.max_staleness = k it is iteration v + k, while the trainers consume iteration v. With
publish.divergence trainers may say that engines keep the version that they have; then that version
produces what is due. With publish.mode=rolling the border of version v + 1 begins when engines have
all groups of iteration v + k: those that are through with theirs swap to the version, and begin
with iteration v + k + 1. The last version is only published and evaluated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.messages import BORDER, REPORT
from pa_npu.control.tasks import TaskScope, cancel
from pa_npu.coordinator.border import BorderCrossing
from pa_npu.coordinator.chain import RunChain
from pa_npu.coordinator.delivery import Produced
from pa_npu.coordinator.evaluate import RunEvaluations
from pa_npu.coordinator.held_out_loss import HeldOutLosses
from pa_npu.coordinator.iterations_ahead import IterationsAhead
from pa_npu.coordinator.no_publication import NoPublication
from pa_npu.coordinator.record import Border, RunRecords, Window, iteration_record
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.iteration_model.subjects import IterationTimes, Prediction


@dataclass(eq=False, repr=False)
class Coordinator:
    """The iteration protocol over parts that are already running."""

    config: Config
    border: BorderCrossing | NoPublication
    ahead: IterationsAhead
    evaluations: RunEvaluations | HeldOutLosses
    iteration_end: IterationEnd

    async def run(self, first: int) -> None:
        """From weight version `first` to the evaluation of the last one."""
        try:
            async with TaskScope() as scope:
                await self._run(first, scope)
        finally:
            await self.border.close()
            await self.iteration_end.close()

    async def _run(self, first: int, scope: TaskScope) -> None:
        config, ahead, evaluations = self.config, self.ahead, self.evaluations
        last = config.schedule.iterations
        ahead.begin()
        before: Window | None = None
        for version in range(first, last + 1):
            prompt = ahead.draw(last)
            preparing = ahead.prepare(last)
            # between the first version and the last the first groups are the probe
            probes = version in (first, last) or not config.probe_rides
            border = await self.border.cross(
                version, prompt if probes else None, is_first=version == first
            )
            if border is not None:
                await even_if_cancelled(self._conclude(preparing, before, border, version))

            evaluation = None
            due, overlapped = evaluations.is_due(version), evaluations.is_overlapped(version)
            if due and not overlapped:
                await self.iteration_end.recorded()
                evaluation = await evaluations.evaluate(version)
            if version == last:
                await self.iteration_end.recorded()
                return

            crossed: asyncio.Future[Border] = asyncio.get_running_loop().create_future()
            if border is not None:
                crossed.set_result(border)
            else:
                scope.start(
                    self._end_crossing(version, preparing, before, crossed),
                    f"border of version {version}",
                )
            self.border.expect(version + 1, crossed)
            if preparing is not None:
                await preparing
            iteration = ahead.next
            count = await ahead.produce_due(version, self.border.published, last, scope)
            border = await crossed
            ahead.updates.save(version + 1)  # all that is due at this version is produced
            if due and overlapped:
                evaluations.start(version)
            before = Window(evaluation, border, iteration if count == 1 else None)

    async def _end_crossing(
        self,
        version: int,
        preparing: asyncio.Task[None] | None,
        before: Window | None,
        crossed: asyncio.Future[Border],
    ) -> None:
        """Ends a border beside the next iteration, for which the first engines produce already."""
        border = await self.border.rest(version)
        await even_if_cancelled(self._conclude(preparing, before, border, version))
        crossed.set_result(border)

    async def _conclude(
        self,
        preparing: asyncio.Task[None] | None,
        before: Window | None,
        border: Border,
        version: int,
    ) -> None:
        """Ends the iteration that was trained before `version`, once nothing asks the controller
        about it any more.
        """
        await self.iteration_end.recorded()
        if preparing is not None:
            await preparing
        if before is not None:
            self.iteration_end.end(self.ahead.trained(version - 1), before, border, version)


# How long the record of a finished iteration may still take when the run fails, or is ended, after
# it.
_LAST_RECORD_S = 2.0


@dataclass(eq=False, repr=False)
class IterationEnd:
    """Ends a trained iteration beside the next one: the schedule learns from it, and its record is
    written, one at a time. controller: None where nothing is generated, and so nothing scheduled.
    """

    config: Config
    channel: StoreChannel
    controller: ScheduleController | None
    records: RunRecords
    chain: RunChain
    _recording: asyncio.Task[None] | None = field(default=None, init=False)

    def end(self, produced: Produced, start: Window, end: Border, version: int) -> None:
        """Begins the record of the iteration between two publishes, the second of `version`; the
        schedule learns from it.
        """
        report = REPORT.get(self.channel, iteration=version - 1)
        iteration_s = end.held.done_s - start.border.held.done_s
        prediction = Prediction("", None, None)
        if start.produced is not None and self.controller is not None:
            evaluation_s = start.evaluation["seconds"] if start.evaluation else 0.0
            prediction = self.controller.end_iteration(
                IterationTimes(
                    iteration_s=iteration_s - evaluation_s,
                    border_s=end.publish_s,
                    train_s=report.training.train_s,
                    step_s=report.training.step_s,
                ),
                start.produced,
            )

        async def record() -> None:
            # the trainers' account of the border comes when they have crossed it
            border = await BORDER.wait_async(
                self.channel, self.config.wait_timeout_s, version=version
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
        """The last iteration that was ended has its record. Raises what went wrong with that."""
        if self._recording is not None:
            await self._recording
            self._recording = None

    async def close(self) -> None:
        """A record that is under way may take a moment more."""
        if self._recording is not None:
            await asyncio.wait({self._recording}, timeout=_LAST_RECORD_S)
            await cancel([self._recording])


async def even_if_cancelled(work: Coroutine[Any, Any, None]) -> None:
    """The work, which a cancellation lets go on for a moment."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=_LAST_RECORD_S)
        await cancel([task])
        if not task.cancelled():
            task.exception()  # nobody else looks at it
        raise

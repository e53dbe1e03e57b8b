"""Ends a trained iteration beside the next one: the schedule learns from it, and its record is written."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.messages import BORDER, REPORT, IterationReport
from pa_npu.control.tasks import cancel
from pa_npu.coordinator.border import Border
from pa_npu.coordinator.production import Produced
from pa_npu.coordinator.record import RunRecords, iteration_record
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.iteration_model.messages import IterationTimes, Prediction

# How long the record of a finished iteration may still take when the run fails, or is ended, after it.
_LAST_RECORD_S = 2.0


@dataclass(frozen=True)
class Window:
    """From one publish to the next. border: the publish that began it. produced: the iteration, where it was one."""

    evaluation: dict[str, Any] | None
    border: Border
    produced: int | None


class IterationEnd:
    """Ends the iterations of a run. One record at a time is written."""

    def __init__(
        self, config: Config, channel: StoreChannel, controller: ScheduleController, records: RunRecords
    ) -> None:
        self._config = config
        self._channel = channel
        self._controller = controller
        self._records = records
        self._recording: asyncio.Task[None] | None = None

    def end(self, produced: Produced, start: Window, end: Border, version: int) -> None:
        """Begins the record of the iteration between two publishes, the second of `version`; the schedule learns from it."""
        report = REPORT.get(self._channel, iteration=version - 1)
        iteration_s = end.held.done_s - start.border.held.done_s
        prediction = Prediction("", None, None)
        if start.produced is not None:
            evaluation_s = start.evaluation["seconds"] if start.evaluation else 0.0
            prediction = self._controller.end_iteration(
                IterationTimes(
                    iteration_s=iteration_s - evaluation_s,
                    border_s=end.publish_s,
                    train_s=report.training.train_s,
                    step_s=report.training.step_s,
                ),
                start.produced,
            )
        recording = self._record(produced, report, prediction, iteration_s, start, end, version)
        self._recording = asyncio.create_task(recording, name=f"record of iteration {produced.iteration}")

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

    async def _record(
        self,
        produced: Produced,
        report: IterationReport,
        prediction: Prediction,
        iteration_s: float,
        start: Window,
        end: Border,
        version: int,
    ) -> None:
        """The iteration's record; the trainers' account of the border comes when they have crossed it."""
        border = await BORDER.wait_async(self._channel, self._config.wait_timeout_s, version=version)
        record = iteration_record(
            self._config,
            produced,
            report,
            border,
            prediction,
            iteration_s=iteration_s,
            publish=end.held,
            evaluation=start.evaluation,
            use_before=start.border.use,
            use_after=end.use,
            devices=self._config.trainer.devices + start.border.engines * self._config.rollout.tensor_parallel,
        )
        self._records.write_iteration(record, produced.samples, produced.kept)


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

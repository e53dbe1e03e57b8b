"""A run's evaluations: which versions are evaluated and when, and where the results go."""

from __future__ import annotations

import time
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.coordinator.evaluate import Evaluation, Evaluator
from pa_npu.coordinator.record import RunRecords
from pa_npu.telemetry.timeline import Timeline, now


class RunEvaluations:
    """evaluator: None where there is nothing to evaluate on."""

    def __init__(self, config: Config, evaluator: Evaluator | None, records: RunRecords, timeline: Timeline) -> None:
        self._config = config
        self._evaluator = evaluator
        self._records = records
        self._timeline = timeline

    def is_due(self, version: int) -> bool:
        """Whether the version is evaluated: the first and the last always are."""
        always = version in (0, self._config.schedule.iterations)
        return self._evaluator is not None and (always or self._config.evaluates(version))

    def is_overlapped(self, version: int) -> bool:
        """Whether one of this version goes on beside training, with engines that have nothing else to do."""
        return self._config.evaluate.overlap and version != self._config.schedule.iterations

    async def evaluate(self, version: int) -> dict[str, Any]:
        """On the version that engines hold, which have nothing else to do; returns its record."""
        assert self._evaluator is not None
        with self._timeline.span("evaluate", version=version):
            return self._record(await self._evaluator.evaluate(version))

    def start(self, version: int) -> None:
        """One beside training."""
        assert self._evaluator is not None
        self._evaluator.start(version, self._record)

    @property
    def is_running(self) -> bool:
        """Whether one beside training may be under way."""
        return self._evaluator is not None and self._evaluator.is_running

    async def cut_short(self, version: int) -> None:
        """Engines are needed for the next weights: what has been answered of an evaluation beside training is what counts."""
        if self._evaluator is not None and (found := await self._evaluator.finish(version)) is not None:
            self._record(found)

    def _record(self, found: Evaluation) -> dict[str, Any]:
        record = {**found.record(self._config.evaluate.metric), "time": time.time()}
        if self._config.evaluate.overlap:
            self._timeline.complete("evaluate", now() - found.seconds, now(), "evaluation", version=found.version)
        self._records.write_evaluation(record, found.responses)
        return record

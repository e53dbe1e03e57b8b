"""A run's evaluations: which versions are evaluated and when, where the results go, and whether they end the run."""

from __future__ import annotations

import time
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.messages import RUN_END, RunEnd
from pa_npu.coordinator.evaluate import Evaluation, Evaluator
from pa_npu.coordinator.record import RunRecords
from pa_npu.evaluation.early_stop import EarlyStop
from pa_npu.telemetry.metrics import read_evaluations
from pa_npu.telemetry.timeline import Timeline, now


class RunEvaluations:
    """evaluator: None where there is nothing to evaluate on."""

    def __init__(
        self,
        config: Config,
        channel: StoreChannel,
        evaluator: Evaluator | None,
        records: RunRecords,
        timeline: Timeline,
    ) -> None:
        self._config = config
        self._channel = channel
        self._evaluator = evaluator
        self._records = records
        self._timeline = timeline
        self._early_stop = EarlyStop(config.evaluate) if config.ends_early else None

    def read_earlier(self, first: int) -> None:
        """Evaluations of earlier attempts, of versions before `first`, count too."""
        if self._early_stop is not None:
            for record in read_evaluations(self._config.run.dir):
                if record["version"] < first:
                    self._early_stop.observe(record)

    def is_due(self, version: int, last: int) -> bool:
        """last: of the run, as far as is known."""
        always = version in (0, last, self._config.schedule.iterations)
        return self._evaluator is not None and (always or self._config.evaluates(version))

    def is_overlapped(self, version: int, last: int) -> bool:
        """Whether one of this version goes on beside training, with engines that have nothing else to do."""
        return self._config.evaluate.overlap and version != last

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

    def end_run(self, version: int) -> bool:
        """Whether the run ends with this version, for what evaluations said, which the trainers are told."""
        why = self._early_stop.why if self._early_stop is not None else None
        RUN_END.put(self._channel, RunEnd(why), version=version)
        if why is not None:
            self._records.say_end(version, why)
        return why is not None

    def _record(self, found: Evaluation) -> dict[str, Any]:
        record = {**found.record(self._config.evaluate.metric), "time": time.time()}
        if self._early_stop is not None:
            self._early_stop.observe(record)
            record["ends_run"] = self._early_stop.why
        if self._config.evaluate.overlap:
            self._timeline.complete("evaluate", now() - found.seconds, now(), "evaluation", version=found.version)
        self._records.write_evaluation(record, found.responses)
        return record

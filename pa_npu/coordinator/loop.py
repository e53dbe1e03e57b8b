"""The iteration protocol of the coordinator: publish a weight version, evaluate it, produce its iteration, record the last one.

Per weight version v, with keys in the store that the launcher hosts, where the roster of engines is too:

    engines are asked to load v; trainers send their report of iteration v - 1, and v   border.py (control/messages.py, publish/)
    the schedule learns from iteration v - 1 and chooses for v                          iteration_end.py (planning/iteration_model)
    evaluation of version v, where due; or beside training (evaluate.overlap)           run_evaluations.py, evaluate.py
    iteration v is produced into the rollout buffer while the trainers consume it       iterations_ahead.py, producer.py
    meanwhile iteration v - 1 goes into metrics.jsonl and onto the console              iteration_end.py, record.py

With schedule.max_staleness = k it is iteration v + k, while the trainers consume iteration v. With publish.divergence trainers
may say that engines keep the version that they have; then that version produces what is due. With publish.mode=rolling the border
of version v + 1 begins when engines have all groups of iteration v + k: those that are through with theirs swap to the version, and
begin with iteration v + k + 1. The last version is only published and evaluated.
"""

from __future__ import annotations

import asyncio

from pa_npu.config.schema import Config
from pa_npu.control.tasks import TaskScope
from pa_npu.coordinator.border import Border, BorderCrossing
from pa_npu.coordinator.iteration_end import IterationEnd, Window, even_if_cancelled
from pa_npu.coordinator.iterations_ahead import IterationsAhead
from pa_npu.coordinator.run_evaluations import RunEvaluations


class Coordinator:
    """The iteration protocol over parts that are already running."""

    def __init__(
        self,
        config: Config,
        border: BorderCrossing,
        ahead: IterationsAhead,
        evaluations: RunEvaluations,
        iteration_end: IterationEnd,
    ) -> None:
        self._config = config
        self._border = border
        self._ahead = ahead
        self._evaluations = evaluations
        self._iteration_end = iteration_end

    async def run(self, first: int) -> None:
        """From weight version `first` to the evaluation of the last one."""
        try:
            async with TaskScope() as scope:
                await self._run(first, scope)
        finally:
            await self._border.close()
            await self._iteration_end.close()

    async def _run(self, first: int, scope: TaskScope) -> None:
        config, ahead, evaluations = self._config, self._ahead, self._evaluations
        last = config.schedule.iterations
        evaluations.read_earlier(first)
        ahead.begin()
        before: Window | None = None
        for version in range(first, last + 1):
            prompt = ahead.draw(last)
            preparing = ahead.prepare(last)
            # between the first version and one that may be the last the first groups are the probe
            may_end = config.may_end_at(version)
            probes = version in (first, last) or may_end or not config.probe_rides
            border = await self._border.cross(version, prompt if probes else None, is_first=version == first)
            if border is not None:
                await even_if_cancelled(self._conclude(preparing, before, border, version))

            evaluation = None
            if may_end and config.evaluations_are_known_later and evaluations.end_run(version):
                last = version
            due, overlapped = evaluations.is_due(version, last), evaluations.is_overlapped(version, last)
            if due and not overlapped:
                await self._iteration_end.recorded()
                evaluation = await evaluations.evaluate(version)
            if may_end and not config.evaluations_are_known_later and evaluations.end_run(version):
                last = version
            if version == last:
                await self._iteration_end.recorded()
                return

            crossed: asyncio.Future[Border] = asyncio.get_running_loop().create_future()
            if border is not None:
                crossed.set_result(border)
            else:
                scope.start(self._end_crossing(version, preparing, before, crossed), f"border of version {version}")
            self._border.expect(version + 1, crossed)
            if preparing is not None:
                await preparing
            iteration = ahead.next
            count = await ahead.produce_due(version, self._border.published, last, scope)
            border = await crossed
            ahead.end_version(version)
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
        border = await self._border.rest(version)
        await even_if_cancelled(self._conclude(preparing, before, border, version))
        crossed.set_result(border)

    async def _conclude(
        self, preparing: asyncio.Task[None] | None, before: Window | None, border: Border, version: int
    ) -> None:
        """Ends the iteration that was trained before `version`, once nothing asks the controller about it any more."""
        await self._iteration_end.recorded()
        if preparing is not None:
            await preparing
        if before is not None:
            self._iteration_end.end(self._ahead.trained(version - 1), before, border, version)

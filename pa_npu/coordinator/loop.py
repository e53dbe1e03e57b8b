"""The iteration protocol of the coordinator: publish a weight version, evaluate it, produce its iteration, record the last one.

Per weight version v, with keys in the store that the launcher hosts, where the roster of engines is too:

    engines are asked to load v; trainers send their report of iteration v - 1, and v   (control/messages.py, pa_npu.publish)
    the schedule learns from iteration v - 1 and chooses for v                          (planning/iteration_model)
    evaluation of version v, where due; or beside training (evaluate.overlap)            (evaluate.py)
    iteration v is produced into the rollout buffer while the trainers consume it       (producer.py)
    meanwhile iteration v - 1 goes into metrics.jsonl and onto the console              (record.py)

With schedule.max_staleness = k it is iteration v + k, while the trainers consume iteration v. With publish.when=divergence trainers
may say that engines keep the version that they have; then that version produces what is due. With publish.swap=rolling the border
of version v + 1 begins when engines have all groups of iteration v + k: those that are through with theirs swap to the version, and
begin with iteration v + k + 1. The last version is only published and evaluated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.freshness import Freshness
from pa_npu.control.messages import (
    BORDER,
    CARRIED,
    DATA_POSITION,
    DISPATCHED,
    PRODUCED_AHEAD,
    REPORT,
    RUN_END,
    UPDATE_SIZE,
    WRITTEN_AHEAD,
    CarriedGroups,
    DataPosition,
    IterationReport,
    ProducedAhead,
    RunEnd,
    UpdateSize,
    WrittenAhead,
)
from pa_npu.control.tasks import TaskScope, cancel
from pa_npu.coordinator.carried import Carried, Share
from pa_npu.coordinator.evaluate import Evaluation, Evaluator
from pa_npu.coordinator.interruption import Interruptions
from pa_npu.coordinator.producer import Producer
from pa_npu.coordinator.production import Produced
from pa_npu.coordinator.record import RunRecords, iteration_record
from pa_npu.coordinator.service.rollouts import RolloutService
from pa_npu.data.prompts import Prompt
from pa_npu.data.stream import TrainingStream
from pa_npu.dispatch.token_budget import TokenBudget, Update
from pa_npu.engines.membership import Fleet
from pa_npu.engines.pool import EnginePool, EngineUse
from pa_npu.errors import InvariantViolation, UserError
from pa_npu.evaluation.early_stop import EarlyStop
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.iteration_model.messages import IterationTimes, Prediction
from pa_npu.publish.coordinator_side import CoordinatorPublish, EnginesHold, Prepared
from pa_npu.publish.messages import READY
from pa_npu.samples.rollout_buffer import RolloutBuffer
from pa_npu.telemetry.metrics import read_evaluations
from pa_npu.telemetry.timeline import Timeline, now, on_clock

# How long the record of a finished iteration may still take when the run fails, or is ended, after it.
_LAST_RECORD_S = 2.0
# Trainers that cross the border of version v ask for positions from v on, when that of v + max_staleness + 1 may be there already.
_POSITIONS_KEPT = 3


class Coordinator:
    """The iteration protocol over parts that are already running."""

    def __init__(
        self,
        config: Config,
        channel: StoreChannel,
        fleet: Fleet,
        pool: EnginePool,
        producer: Producer,
        buffer: RolloutBuffer,
        controller: ScheduleController,
        publish: CoordinatorPublish,
        records: RunRecords,
        timeline: Timeline,
        evaluator: Evaluator | None,
        interruptions: Interruptions | None = None,
        service: RolloutService | None = None,
    ) -> None:
        self._service = service
        self._interruptions = interruptions
        self._config = config
        self._channel = channel
        self._fleet = fleet
        self._pool = pool
        self._producer = producer
        self._buffer = buffer
        self._controller = controller
        self._publish = publish
        self._records = records
        self._timeline = timeline
        self._evaluator = evaluator
        self._early_stop = EarlyStop(config.evaluate) if config.ends_early else None
        self._freshness = Freshness(config.schedule.max_staleness, config.iterations_ahead)
        self._published: int | None = None
        self._produced: dict[int, Produced] = {}  # not trained yet, by iteration
        self._complete: dict[int, asyncio.Event] = {}  # of iterations that are produced beside others
        self._swapping: asyncio.Task[EnginesHold] | None = None  # engines, one after another
        self._recording: asyncio.Task[None] | None = None  # of the iteration before the one that runs
        self._arriving: asyncio.Task[Prepared | None] | None = None  # the next version, beside generation
        schedule = config.schedule
        self._budget: TokenBudget | None = None
        if schedule.tokens_per_update is not None:
            self._budget = TokenBudget(schedule.tokens_per_update, schedule.prompts_per_iteration, config.data_parallel)
        self._carried: Sequence[Carried] = ()  # to the iteration that is produced next

    def resume(self, produced: Produced, state: dict[str, Any], train: TrainingStream) -> None:
        """Take an iteration that was produced before the run was interrupted, and is in the buffer again. In order."""
        self._put_position(produced.iteration, train)
        train.restore(state)
        if self._budget is not None:
            self._tell_size(produced.iteration, len(produced.dispatched.groups))
        self._take(produced)
        self._put_position(produced.iteration + 1, train)

    def carry_on(self, groups: Sequence[Carried], group_tokens: float | None) -> None:
        """Take what had been carried when the run was interrupted. group_tokens: TokenBudget's."""
        assert self._budget is not None
        if len(groups) % self._budget.replicas:
            raise UserError(
                f"checkpoint.load: it carries {len(groups)} groups to a later update, which {self._budget.replicas} replicas "
                f"cannot share; continue with as many trainer.devices as before"
            )
        self._carried, self._budget.group_tokens = groups, group_tokens

    async def run(self, train: TrainingStream, first: int) -> None:
        """From weight version `first` to the evaluation of the last one."""
        try:
            async with TaskScope() as scope:
                await self._run(train, first, scope)
        finally:
            await cancel([task for task in (self._arriving, self._swapping) if task is not None])
            if self._recording is not None:
                await asyncio.wait({self._recording}, timeout=_LAST_RECORD_S)
                await cancel([self._recording])

    async def _run(self, train: TrainingStream, first: int, scope: TaskScope) -> None:
        last = self._config.schedule.iterations
        if self._early_stop is not None:  # evaluations of earlier attempts count too
            for record in read_evaluations(self._config.run.dir):
                if record["version"] < first:
                    self._early_stop.observe(record)
        ahead = first + len(self._produced)  # the iteration that is produced next
        prompts: Sequence[Prompt] = ()
        self._put_position(ahead, train)
        before: _Window | None = None
        for version in range(first, last + 1):
            if ahead < last or not prompts:
                prompts = self._prompts(ahead, train)
            # between the first version and one that may be the last the first groups are the probe
            may_end = self._config.may_end_at(version)
            probes = version in (first, last) or may_end or not self._config.probe_rides
            preparing = self._prepare(ahead, prompts) if ahead < last else None
            border = await self._cross(version, prompts[0] if probes else None, is_first=version == first)
            if border is not None:
                await _even_if_cancelled(self._conclude(preparing, before, border, version))
            evaluation = None
            known_later = self._config.evaluations_are_known_later
            if may_end and known_later and self._ends(version):
                last = version
            always = version in (0, last, self._config.schedule.iterations)
            due = self._evaluator is not None and (always or self._config.evaluates(version))
            overlapped = self._config.evaluate.overlap and version != last
            if due and not overlapped:
                await self._recorded()
                evaluation = await self._evaluate(version)
            if may_end and not known_later and self._ends(version):
                last = version
            if version == last:
                await self._recorded()
                return
            if self._interruptions is not None:
                self._interruptions.publish(version)
            crossed: asyncio.Future[_Border] = asyncio.get_running_loop().create_future()
            if border is not None:
                crossed.set_result(border)
            else:
                scope.start(self._end_crossing(version, preparing, before, crossed), f"border of version {version}")
            if self._config.delays(version + 1):
                arriving = self._arrive(version + 1, crossed)
                self._arriving = asyncio.create_task(arriving, name=f"weight version {version + 1}")
            if preparing is not None:
                await preparing
            until = ahead
            while until < last and self._freshness.is_due(until, version):
                prompts = prompts if until == ahead else self._prompts(until, train)
                is_last_due = until + 1 < last and not self._freshness.is_due(until + 1, version)
                if self._interruptions is not None:
                    self._begin(until, prompts, train, scope)
                elif is_last_due and self._config.swaps_in_turn(version + 1):
                    await self._dispatch(until, prompts, train, scope)
                else:
                    await self._produce(until, prompts, train)
                until += 1
            border = await crossed
            self._put_carried(version + 1)
            if self._interruptions is not None:
                await self._interrupt(version, self._interruptions)
            if due and overlapped and self._evaluator is not None:
                self._evaluator.start(version, self._record_evaluation)
            before = _Window(evaluation, border, ahead if until == ahead + 1 else None)
            ahead = until

    async def _conclude(
        self, preparing: asyncio.Task[None] | None, before: _Window | None, border: _Border, version: int
    ) -> None:
        """What was trained until `version` was published is over; nothing of it may still be asked of the controller meanwhile."""
        await self._recorded()
        if preparing is not None:
            await preparing
        if before is not None:
            self._end(self._produced.pop(version - 1), before, border, version)

    def _prepare(self, iteration: int, prompts: Sequence[Prompt]) -> asyncio.Task[None] | None:
        """The schedule of the next iteration is chosen while trainers still train; not beside responses that go on."""
        if self._interruptions is not None:
            return None
        return asyncio.create_task(self._producer.prepare(iteration, prompts), name=f"schedule of {iteration}")

    def _prompts(self, iteration: int, train: TrainingStream) -> Sequence[Prompt]:
        schedule = self._config.schedule
        if self._budget is None:
            return train.take(schedule.prompts_per_iteration)
        tokens = [group.tokens for group in self._carried]
        return train.take(self._budget.num_new(tokens, is_last=iteration == schedule.iterations - 1))

    async def _produce(self, iteration: int, prompts: Sequence[Prompt], train: TrainingStream) -> None:
        """An iteration, whole, by the version that engines hold."""
        self._freshness.check_production(iteration, self._published)
        with self._timeline.span("produce", iteration=iteration):
            share = self._share(iteration, len(prompts))
            produced = await self._producer.produce(
                *(iteration, prompts, lambda: train.take(1)[0], share), version=self._published
            )
        if self._budget is not None and share is not None:
            self._carried = produced.carried
            self._budget.observe(share.update.new_tokens)
        if self._carried and iteration == self._config.schedule.iterations - 1:
            raise InvariantViolation(f"I2 exactly once: {len(self._carried)} groups are left after the last iteration")
        self._take(_observed(produced, train))
        self._put_position(iteration + 1, train)

    def _share(self, iteration: int, num_new: int) -> Share | None:
        """What iteration `iteration` takes of the carried groups and of its own; None where it takes its own."""
        if self._budget is None:
            return None
        is_last = iteration == self._config.schedule.iterations - 1
        due = sum(not self._freshness.holds(iteration + 1, group.version) for group in self._carried)
        tokens = [group.tokens for group in self._carried]
        update = Update(self._budget, tokens, num_new, len(tokens) + num_new if is_last else due)
        return Share(self._carried, update, partial(self._tell_size, iteration))

    def _tell_size(self, iteration: int, groups: int) -> None:
        size = UpdateSize(groups // self._config.data_parallel)
        UPDATE_SIZE.put(self._channel, size, iteration=iteration)

    def _put_carried(self, version: int) -> None:
        """Before `version` is saved: what no update until then trains, and no iteration that is produced until then."""
        if self._budget is None or not self._config.saves(version) or version >= self._config.schedule.iterations:
            return
        iteration = min(version + self._config.iterations_ahead, self._config.schedule.iterations)
        buffer = self._buffer.written(version)
        for index, group in enumerate(self._carried):
            buffer.put(group.group(iteration, index), 0, index)
        told = [group.told() for group in self._carried]
        CARRIED.put(self._channel, CarriedGroups(iteration, told, self._budget.group_tokens), version=version)

    def _begin(self, iteration: int, prompts: Sequence[Prompt], train: TrainingStream, scope: TaskScope) -> None:
        """An iteration from this version on, its responses in parts."""
        assert self._interruptions is not None
        self._interruptions.admits()
        self._start(iteration, prompts, train, scope, None, self._interruptions.admitted)

    async def _dispatch(
        self, iteration: int, prompts: Sequence[Prompt], train: TrainingStream, scope: TaskScope
    ) -> None:
        """An iteration by the version that engines hold, until they have all its groups; they finish beside the next border."""
        dispatched = asyncio.Event()
        self._start(iteration, prompts, train, scope, self._published, dispatched.set)
        await dispatched.wait()  # each wait for room on an engine has a deadline, and its failure ends this one too

    def _start(
        self,
        iteration: int,
        prompts: Sequence[Prompt],
        train: TrainingStream,
        scope: TaskScope,
        version: int | None,
        all_dispatched: Callable[[], None],
    ) -> None:
        """Produce an iteration beside whatever comes. version: that writes all of it, if it is one."""
        self._freshness.check_production(iteration, self._published)
        self._put_position(iteration + 1, train)
        done = self._complete[iteration] = asyncio.Event()

        async def produce() -> None:
            produced = await self._producer.produce(iteration, prompts, version=version, all_dispatched=all_dispatched)
            self._take(_observed(produced, train))
            done.set()

        scope.start(produce(), f"iteration {iteration}")

    async def _interrupt(self, version: int, interruptions: Interruptions) -> None:
        """All that this version may write is written, and the iteration that it trains is complete."""
        await interruptions.quiet()
        await self._complete.pop(version).wait()
        following, schedule = version + 1, self._config.schedule
        if not self._config.saves(following) or following >= schedule.iterations:
            return
        iterations = list(range(following, min(following + schedule.max_staleness, schedule.iterations)))
        buffer = self._buffer.written(following)
        for iteration in iterations:
            for group in interruptions.so_far(iteration):
                buffer.put(group, 0, group.index)
        message = WrittenAhead(iterations, schedule.prompts_per_iteration)
        WRITTEN_AHEAD.put(self._channel, message, version=following)

    def _take(self, produced: Produced) -> None:
        """All of an iteration's groups are in the buffer: for the trainers to check (I2), and to put into checkpoints."""
        iteration = produced.iteration
        self._produced[iteration] = produced
        DISPATCHED.put(self._channel, produced.dispatched, iteration=iteration)
        if self._config.schedule.max_staleness:
            message = ProducedAhead(produced.numbers, produced.samples)
            PRODUCED_AHEAD.put(self._channel, message, iteration=iteration)

    def _put_position(self, iteration: int, train: TrainingStream) -> None:
        """Which prompts were taken before an iteration, for checkpoints."""
        DATA_POSITION.put(self._channel, DataPosition(train.state()), iteration=iteration)
        past = iteration - self._config.schedule.max_staleness - _POSITIONS_KEPT
        if self._config.data.skip != "none" and past >= 0:  # else they are a few bytes each
            DATA_POSITION.delete(self._channel, iteration=past)

    async def _cross(self, version: int, prompt: Prompt | None, *, is_first: bool) -> _Border | None:
        """Weight version `version` from trainers to engines. prompt: for a probe. None: some engines have it, and `_swapped` waits
        for the others."""
        trainer = self._config.trainer
        within_s = trainer.startup_timeout_s if is_first else trainer.wait_timeout_s
        if self._evaluator is not None and self._evaluator.is_running:
            # engines that wait inside a load answer nothing: with an evaluation they are asked when the trainers are ready
            await READY.wait_async(self._channel, within_s, version=version)
            await self._end_overlapped_evaluation(version - 1)
        if self._service is not None:  # likewise: they write for clients until then
            await READY.wait_async(self._channel, within_s, version=version)
            await self._service.quiet()
        if self._config.publish.when == "divergence" and not is_first:
            ready = await READY.wait_async(self._channel, within_s, version=version)
            if not ready.publishes:
                if self._service is not None and self._published is not None:
                    self._service.published(self._published)
                now_s = time.perf_counter()
                return _Border(EnginesHold(None, now_s, now_s, now_s, now_s), self._pool.use(), self._fleet.size)
        prepared = None
        if self._arriving is not None:
            prepared, self._arriving = await self._arriving, None
        if prepared is not None:
            some = asyncio.Event()
            swapping = self._publish.swap(version, prepared, some.set)
            self._swapping = asyncio.create_task(swapping, name=f"swap to weight version {version}")
            if self._config.swaps_in_turn(version):
                await _first_of(self._swapping, some)
                self._published = version
                return None
            return await self._swapped(version)
        await self._finish_production(version)
        probed = prompt if is_first or not self._config.delays(version) else None
        held = await self._publish.publish(version, probed, within_s)
        return self._crossed(version, held)

    async def _swapped(self, version: int) -> _Border:
        """All engines have swapped to `version`, and what the version before wrote is in the buffer."""
        assert self._swapping is not None
        held, self._swapping = await self._swapping, None
        await self._finish_production(version)
        return self._crossed(version, held)

    async def _end_crossing(
        self,
        version: int,
        preparing: asyncio.Task[None] | None,
        before: _Window | None,
        crossed: asyncio.Future[_Border],
    ) -> None:
        """What a border ends with, where the first engines produce for the next iteration already."""
        border = await self._swapped(version)
        await _even_if_cancelled(self._conclude(preparing, before, border, version))
        crossed.set_result(border)

    async def _arrive(self, version: int, crossed: asyncio.Future[_Border]) -> Prepared | None:
        """A version in the engines' second buffers, once these are free of the one before."""
        await asyncio.wait({crossed})
        # what is produced meanwhile, and then what is trained
        within_s = self._config.border_timeout_s + self._config.trainer.wait_timeout_s
        return await self._publish.prepare(version, within_s)

    async def _finish_production(self, version: int) -> None:
        """Of iterations that older versions write, whose last groups were not complete when engines had all of them."""
        if self._interruptions is None:
            for iteration in [i for i in self._complete if i < version + self._config.iterations_ahead]:
                await self._complete.pop(iteration).wait()

    def _crossed(self, version: int, held: EnginesHold) -> _Border:
        # engines were asked before: that ran beside training
        self._timeline.complete("publish", on_clock(held.ready_s), now(), version=version)
        self._published = version
        if self._service is not None:
            self._service.published(version)
        return _Border(held, self._pool.use(), self._fleet.size)

    def _ends(self, version: int) -> bool:
        """Whether the run ends with this version, for what evaluations said, which the trainers are told."""
        why = self._early_stop.why if self._early_stop is not None else None
        RUN_END.put(self._channel, RunEnd(why), version=version)
        if why is not None:
            self._records.say_end(version, why)
        return why is not None

    async def _evaluate(self, version: int) -> dict[str, Any]:
        assert self._evaluator is not None
        with self._timeline.span("evaluate", version=version):
            return self._record_evaluation(await self._evaluator.evaluate(version))

    async def _end_overlapped_evaluation(self, version: int) -> None:
        """Engines are needed for the next weights: what has been answered of an evaluation beside training is what counts."""
        if self._evaluator is not None and (found := await self._evaluator.finish(version)) is not None:
            self._record_evaluation(found)

    def _record_evaluation(self, found: Evaluation) -> dict[str, Any]:
        record = {**found.record(self._config.evaluate.metric), "time": time.time()}
        if self._early_stop is not None:
            self._early_stop.observe(record)
            record["ends_run"] = self._early_stop.why
        if self._config.evaluate.overlap:
            self._timeline.complete("evaluate", now() - found.seconds, now(), "evaluation", version=found.version)
        self._records.write_evaluation(record, found.responses)
        return record

    def _end(self, produced: Produced, start: _Window, end: _Border, version: int) -> None:
        """What was trained between two publishes, of which the second is `version`, gets its record, which is begun here; what was
        produced there is learned from."""
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

    async def _recorded(self) -> None:
        """The last iteration that was ended has its record. Raises what went wrong with that."""
        if self._recording is not None:
            await self._recording
            self._recording = None

    async def _record(
        self,
        produced: Produced,
        report: IterationReport,
        prediction: Prediction,
        iteration_s: float,
        start: _Window,
        end: _Border,
        version: int,
    ) -> None:
        """The iteration's record; the trainers' account of the border comes when they have crossed it."""
        border = await BORDER.wait_async(self._channel, self._config.trainer.wait_timeout_s, version=version)
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


async def _first_of(task: asyncio.Task[Any], event: asyncio.Event) -> None:
    """Until the event is set, or the task has ended. Raises what the task raised."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel([waiting])
    if task.done():
        task.result()


async def _even_if_cancelled(work: Coroutine[Any, Any, None]) -> None:
    """The work, which a cancellation lets go on for _LAST_RECORD_S."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=_LAST_RECORD_S)
        await cancel([task])
        if not task.cancelled():
            task.exception()  # nobody else looks at it
        raise


def _observed(produced: Produced, train: TrainingStream) -> Produced:
    """With what the stream of prompts learns from it and says of it."""
    return replace(produced, numbers=produced.numbers | train.observe(produced.outcomes))


@dataclass(frozen=True)
class _Border:
    """The publish between two iterations, and the engines' counters and number after it."""

    held: EnginesHold
    use: dict[str, EngineUse]
    engines: int

    @property
    def publish_s(self) -> float:
        """From the trainers' readiness to the end."""
        return self.held.done_s - self.held.ready_s


@dataclass(frozen=True)
class _Window:
    """From one publish to the next. border: the publish that began it. produced: the iteration, where it was one."""

    evaluation: dict[str, Any] | None
    border: _Border
    produced: int | None

"""Entry and main loop of the coordinator: publish every weight version, probe it, evaluate it, and produce its iteration.

    python -m pa_npu.coordinator.main --config RUN/config.yaml

Per weight version v, with keys in the store that the launcher hosts (PA_NPU_STORE=host:port), where the roster of engines is too:

    engines are asked to load v; trainers send their report of iteration v - 1, and v   (control/messages.py, pa_npu.publish)
    the schedule learns from iteration v - 1 and chooses for v                          (planning/iteration_model)
    evaluation of version v, where due; or beside training (evaluate.overlap)            (evaluate.py)
    iteration v is produced into the rollout buffer while the trainers consume it       (producer.py)
    meanwhile iteration v - 1 goes into metrics.jsonl and onto the console              (record.py)

With schedule.max_staleness = k it is iteration v + k, while the trainers consume iteration v. The last version is only published
and evaluated. Engines may die, hang, leave and join meanwhile (engines/membership.py). Any other failure ends the process with one
line; the launcher starts coordinator and trainers again from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pa_npu import platform
from pa_npu.checkpoints.directories import read_meta
from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel, attempt_prefix, connect
from pa_npu.control.freshness import Freshness
from pa_npu.control.messages import (
    BORDER,
    DATA_POSITION,
    DISPATCHED,
    PRODUCED_AHEAD,
    REPORT,
    WRITTEN_AHEAD,
    DataPosition,
    IterationReport,
    ProducedAhead,
    WrittenAhead,
)
from pa_npu.control.roster import PREFIX as ROSTER_PREFIX
from pa_npu.control.roster import Roster
from pa_npu.control.software import TRAINERS_RUN_ON, RunsOn
from pa_npu.control.tasks import TaskScope, cancel
from pa_npu.control.typed import Topic
from pa_npu.coordinator.evaluate import Evaluation, Evaluator
from pa_npu.coordinator.interruption import Interruptions
from pa_npu.coordinator.producer import Producer
from pa_npu.coordinator.production import Produced
from pa_npu.coordinator.record import RunRecords, iteration_record
from pa_npu.coordinator.resumed import put_back, usable_ahead
from pa_npu.data.prompts import Prompt, PromptSet, PromptStream, load_prompts
from pa_npu.dispatch.work import GroupWork
from pa_npu.engines.http_server import KEY_VARIABLE
from pa_npu.engines.membership import Fleet
from pa_npu.engines.pool import EnginePool, EngineUse
from pa_npu.engines.protocol import Sampling
from pa_npu.engines.registry import engine_kind
from pa_npu.environments.registry import make_environment
from pa_npu.errors import PaNpuError, UserError, exit_code
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.iteration_model.messages import IterationTimes, Prediction, Rules
from pa_npu.publish.coordinator_side import Connection, CoordinatorPublish, EnginesHold
from pa_npu.publish.messages import LATE_MANIFEST, MANIFEST, READY, StageManifest
from pa_npu.rewards.pool import RewardPool
from pa_npu.samples.rollout_buffer import StoreRolloutBuffer, written_buffer
from pa_npu.samples.wire import from_bytes
from pa_npu.telemetry.logs import setup_logging
from pa_npu.telemetry.timeline import Timeline, now, on_clock

logger = logging.getLogger(__name__)

# The trainers' buffer has this name too; its keys are those of one attempt of the run.
_BUFFER = "run"
# How long the record of a finished iteration may still take when the run fails in the next one.
_LAST_RECORD_S = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="resolved configuration of the run")
    arguments = parser.parse_args()
    setup_logging("coordinator")
    try:
        asyncio.run(run(load_config([arguments.config])))
    except PaNpuError as error:
        return exit_code(error, logger)
    return 0


async def run(config: Config) -> None:
    """Everything from an empty event loop to the last evaluation."""
    spec = ModelSpec.read(config.model.path)
    store = _store_address()
    key = os.environ.pop(KEY_VARIABLE, None)  # reward functions are users' code, and inherit the environment
    first = first_version(config)
    kind = engine_kind(config.rollout.backend)
    async with AsyncExitStack() as stack:
        tokenizer = load_tokenizer(config)
        train, held_out = load_prompt_sets(config, tokenizer)
        environment = make_environment(config, tokenizer)
        channel = StoreChannel(connect(*store, config.trainer.startup_timeout_s), attempt_prefix())
        roster = Roster(StoreChannel(connect(*store, config.trainer.startup_timeout_s), ROSTER_PREFIX))
        pool = await stack.enter_async_context(
            EnginePool((), config.rollout.probe_timeout_s, config.rollout.too_long == "cut")
        )
        fleet = await stack.enter_async_context(
            Fleet(config.rollout, pool, roster, lambda url: kind.client(url, spec.vocab_size, key))
        )
        rewards = await stack.enter_async_context(RewardPool(config.reward))
        timeline = stack.enter_context(
            Timeline.for_run(config.run.dir, "coordinator", enabled=config.telemetry.timeline)
        )
        records = stack.enter_context(RunRecords(config, first, lambda token: str(tokenizer.decode([token]))))
        store_thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="store"))
        sampling = training_sampling(config, spec)
        # groups go through a client of their own, so that a slow put delays no wait
        buffer_channel = StoreChannel(connect(*store, config.trainer.startup_timeout_s), attempt_prefix())
        num_ahead = config.schedule.max_staleness if config.interrupts else 0
        buffer = StoreRolloutBuffer(buffer_channel, _BUFFER, readers=1, ahead=num_ahead)
        interruptions = make_interruptions(config, tokenizer) if config.interrupts else None
        work = GroupWork(spec, config)
        controller = ScheduleController(Rules.of(config), work)
        producer = Producer(
            config,
            pool,
            environment,
            rewards,
            buffer,
            controller,
            sampling,
            timeline,
            work,
            store_thread,
            interruptions,
        )
        await fleet.wait_all_ready()
        backend = platform.get(config.run.device).comm_backend
        manifests = [await wait_manifests(config, channel, topic) for topic in (MANIFEST, LATE_MANIFEST)]
        trainers = await TRAINERS_RUN_ON.wait_async(channel, config.trainer.startup_timeout_s)
        records.write_runs_on(RunsOn(trainers, fleet.run_on()))
        publish = CoordinatorPublish(config, fleet, pool, channel, Connection(store, backend, *manifests), sampling)
        coordinator = Coordinator(
            config,
            channel,
            fleet,
            pool,
            producer,
            controller,
            publish,
            records,
            timeline,
            Evaluator(config, held_out, pool, environment, rewards, sampling) if held_out else None,
            interruptions,
        )
        ahead = usable_ahead(config)
        if interruptions is not None:
            for one in ahead:
                for data in one.groups:
                    interruptions.begin_with(from_bytes(data))
        else:
            for produced, state in put_back(ahead, buffer, config.data_parallel):
                coordinator.resume(produced, state, train)
        await coordinator.run(train, first)


class Coordinator:
    """The iteration protocol over parts that are already running."""

    def __init__(
        self,
        config: Config,
        channel: StoreChannel,
        fleet: Fleet,
        pool: EnginePool,
        producer: Producer,
        controller: ScheduleController,
        publish: CoordinatorPublish,
        records: RunRecords,
        timeline: Timeline,
        evaluator: Evaluator | None,
        interruptions: Interruptions | None = None,
    ) -> None:
        self._interruptions = interruptions
        self._config = config
        self._channel = channel
        self._fleet = fleet
        self._pool = pool
        self._producer = producer
        self._controller = controller
        self._publish = publish
        self._records = records
        self._timeline = timeline
        self._evaluator = evaluator
        self._freshness = Freshness(config.schedule.max_staleness)
        self._published: int | None = None
        self._produced: dict[int, Produced] = {}  # not trained yet, by iteration
        self._complete: dict[int, asyncio.Event] = {}  # of iterations whose responses come in parts
        self._recording: asyncio.Task[None] | None = None  # of the iteration before the one that runs

    def resume(self, produced: Produced, state: dict[str, Any], train: PromptStream) -> None:
        """Take an iteration that was produced before the run was interrupted, and is in the buffer again. In order."""
        self._put_position(produced.iteration, train)
        train.restore(state)
        self._take(produced)
        self._put_position(produced.iteration + 1, train)

    async def run(self, train: PromptStream, first: int) -> None:
        """From weight version `first` to the evaluation of the last one."""
        try:
            async with TaskScope() as scope:
                await self._run(train, first, scope)
        finally:
            if self._recording is not None:
                await asyncio.wait({self._recording}, timeout=_LAST_RECORD_S)
                await cancel([self._recording])

    async def _run(self, train: PromptStream, first: int, scope: TaskScope) -> None:
        last = self._config.schedule.iterations
        ahead = first + len(self._produced)  # the iteration that is produced next
        prompts: Sequence[Prompt] = ()
        self._put_position(ahead, train)
        before: _Window | None = None
        for version in range(first, last + 1):
            if ahead < last or not prompts:
                prompts = self._prompts(train)
            # between the first and the last version the first groups are the probe
            probes = version in (first, last) or not self._config.probe_rides
            preparing = self._prepare(ahead, prompts) if ahead < last else None
            border = await self._cross(version, prompts[0] if probes else None, is_first=version == first)
            await self._recorded()
            if preparing is not None:
                await preparing
            if before is not None:
                self._end(self._produced.pop(version - 1), before, border, version)
            evaluation = None
            due = self._evaluator is not None and self._evaluation_due(version)
            overlapped = self._config.evaluate.overlap and version != last
            if due and not overlapped:
                await self._recorded()
                evaluation = await self._evaluate(version)
            if version == last:
                await self._recorded()
                return
            if self._interruptions is not None:
                self._interruptions.publish(version)
            until = ahead
            while until < last and self._freshness.may_produce(until, self._published):
                prompts = prompts if until == ahead else self._prompts(train)
                if self._interruptions is None:
                    await self._produce(until, prompts, train)
                else:
                    self._begin(until, prompts, train, scope)
                until += 1
            if self._interruptions is not None:
                await self._interrupt(version, self._interruptions)
            if due and overlapped and self._evaluator is not None:
                self._evaluator.start(version, self._record_evaluation)
            before = _Window(evaluation, border, until - ahead)
            ahead = until

    def _prepare(self, iteration: int, prompts: Sequence[Prompt]) -> asyncio.Task[None] | None:
        """The schedule of the next iteration is chosen while trainers still train; not beside responses that go on."""
        if self._interruptions is not None:
            return None
        return asyncio.create_task(self._producer.prepare(iteration, prompts), name=f"schedule of {iteration}")

    def _prompts(self, train: PromptStream) -> Sequence[Prompt]:
        return train.take(self._config.schedule.prompts_per_iteration)

    async def _produce(self, iteration: int, prompts: Sequence[Prompt], train: PromptStream) -> None:
        """An iteration, whole, by the version that engines hold."""
        self._freshness.check_production(iteration, self._published)
        with self._timeline.span("produce", iteration=iteration):
            produced = await self._producer.produce(iteration, prompts, lambda: train.take(1)[0])
        self._take(produced)
        self._put_position(iteration + 1, train)

    def _begin(self, iteration: int, prompts: Sequence[Prompt], train: PromptStream, scope: TaskScope) -> None:
        """An iteration from this version on, its responses in parts."""
        self._freshness.check_production(iteration, self._published)
        self._put_position(iteration + 1, train)
        done = self._complete[iteration] = asyncio.Event()

        async def produce() -> None:
            self._take(await self._producer.produce(iteration, prompts))
            done.set()

        assert self._interruptions is not None
        self._interruptions.admits()
        scope.start(produce(), f"iteration {iteration}")

    async def _interrupt(self, version: int, interruptions: Interruptions) -> None:
        """All that this version may write is written, and the iteration that it trains is complete."""
        await interruptions.quiet()
        await self._complete.pop(version).wait()
        following, schedule = version + 1, self._config.schedule
        every = self._config.checkpoint.every
        if not every or following % every or following >= schedule.iterations:
            return
        iterations = list(range(following, min(following + schedule.max_staleness, schedule.iterations)))
        buffer = written_buffer(self._channel, following)
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

    def _put_position(self, iteration: int, train: PromptStream) -> None:
        """Which prompts were taken before an iteration, for checkpoints."""
        DATA_POSITION.put(self._channel, DataPosition(train.state()), iteration=iteration)

    async def _cross(self, version: int, prompt: Prompt | None, *, is_first: bool) -> _Border:
        """Weight version `version` from trainers to engines. prompt: for a probe."""
        trainer = self._config.trainer
        within_s = trainer.startup_timeout_s if is_first else trainer.wait_timeout_s
        if self._evaluator is not None and self._evaluator.is_running:
            # engines that wait inside a load answer nothing: with an evaluation they are asked when the trainers are ready
            await READY.wait_async(self._channel, within_s, version=version)
            await self._end_overlapped_evaluation(version - 1)
        held = await self._publish.publish(version, prompt, within_s)
        # engines were asked before: that ran beside training
        self._timeline.complete("publish", on_clock(held.ready_s), now(), version=version)
        self._published = version
        return _Border(held, self._pool.use(), self._fleet.size)

    def _evaluation_due(self, version: int) -> bool:
        schedule = self._config.schedule
        if version in (0, schedule.iterations):
            return True
        return bool(schedule.evaluate_every) and version % schedule.evaluate_every == 0

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
        if start.iterations_produced == 1:
            evaluation_s = start.evaluation["seconds"] if start.evaluation else 0.0
            prediction = self._controller.end_iteration(
                IterationTimes(
                    iteration_s=iteration_s - evaluation_s,
                    border_s=end.publish_s,
                    train_s=report.training.train_s,
                    step_s=report.training.step_s,
                )
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
    """From one publish to the next. border: the publish that began it."""

    evaluation: dict[str, Any] | None
    border: _Border
    iterations_produced: int


async def wait_manifests(config: Config, channel: StoreChannel, topic: Topic[StageManifest]) -> list[StageManifest]:
    """What each pipeline stage will publish to all engines (MANIFEST) or deliver to one (LATE_MANIFEST), in stage order."""
    limit_s = config.trainer.startup_timeout_s
    return [await topic.wait_async(channel, limit_s, stage=s) for s in range(config.trainer.pipeline_parallel)]


def training_sampling(config: Config, spec: ModelSpec) -> Sampling:
    return Sampling(
        max_tokens=config.rollout.max_response_tokens,
        temperature=config.rollout.temperature,
        stop_token_ids=spec.eos_token_ids,
        ignore_eos=config.rollout.ignore_eos,
    )


def make_interruptions(config: Config, tokenizer: Any) -> Interruptions:
    """For responses that go on under newer weights."""

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True))

    # all of an iteration's groups may wait for room at the same time
    return Interruptions(config.tokens_per_version, decode, config.engine_wait_s + config.trainer.wait_timeout_s)


def load_tokenizer(config: Config) -> Any:
    """The model's, of transformers."""
    from transformers import AutoTokenizer  # seconds of import, which engines and trainers spend starting anyway

    return AutoTokenizer.from_pretrained(config.model.path)


def load_prompt_sets(config: Config, tokenizer: Any) -> tuple[PromptStream, dict[str, PromptSet]]:
    """Training stream at the position of the checkpoint, and sets of held-out prompts by name."""
    train = load_prompts(config.data.train, tokenizer, config.data)
    logger.info("training on %s", train.summary)
    held_out = {
        name: load_prompts(path, tokenizer, config.data, config.key_of_set(name))
        for name, path in config.evaluation_sets.items()
    }
    for name, prompts in held_out.items():
        logger.info("evaluating on %s: %s", name, prompts.summary)
    stream = PromptStream(train, config.run.seed, config.data.shuffle)
    if config.checkpoint.load:
        stream.restore(read_meta(Path(config.checkpoint.load)).data)
    return stream, held_out


def first_version(config: Config) -> int:
    """The weight version that is published first: 0, or that of the checkpoint."""
    return read_meta(Path(config.checkpoint.load)).version if config.checkpoint.load else 0


def _store_address() -> tuple[str, int]:
    address = os.environ.get("PA_NPU_STORE", "")
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit():
        raise UserError(f"PA_NPU_STORE: {address!r} is not host:port; start the coordinator through the launcher")
    return host, int(port)


if __name__ == "__main__":
    sys.exit(main())

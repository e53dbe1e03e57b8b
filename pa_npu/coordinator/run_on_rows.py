"""A run without engines: reads rows, meets the trainers, and hands all parts to the loop (loop.py).

Of what a run with engines constructs (main.py) there are no engines, environments, rewards,
schedule controller, publish or probe.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from pa_npu.algorithm.registry import build_algorithm
from pa_npu.checkpoints.directories import read_meta
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel, attempt_prefix, connect
from pa_npu.control.freshness import Freshness
from pa_npu.control.messages import TRAINERS_RUN_ON, RunsOn
from pa_npu.control.milestones import Milestones
from pa_npu.coordinator.chain import RunChain
from pa_npu.coordinator.evaluate import Evaluations
from pa_npu.coordinator.held_out_loss import HeldOutLosses
from pa_npu.coordinator.iterations_ahead import IterationsAhead
from pa_npu.coordinator.loop import Coordinator, IterationEnd
from pa_npu.coordinator.no_publication import NoPublication
from pa_npu.coordinator.producer import Producer
from pa_npu.coordinator.row_groups import RowGroups
from pa_npu.coordinator.start import first_version, lead, make_records, store_address
from pa_npu.coordinator.updates import EveryGroup, Updates
from pa_npu.data.row_stream import RowGroupStream
from pa_npu.data.trained_sets import (
    AnySet,
    load_held_out_rows,
    load_training_rows,
    stream_of,
)
from pa_npu.dispatch.assignment import GroupWork
from pa_npu.families.model_directory import load_tokenizer
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.iteration_model.subjects import IterationTimes, Prediction
from pa_npu.samples.rollout_buffer import open_buffer
from pa_npu.telemetry.timeline import Timeline

logger = logging.getLogger(__name__)


async def run_on_rows(config: Config) -> None:
    """Everything from an empty event loop to the last evaluation."""
    spec = ModelSpec.from_config(config)
    store = store_address()
    first = first_version(config)
    limit_s = config.run.startup_timeout_s
    async with AsyncExitStack() as stack:
        tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
        row_is = build_algorithm(config).row_is
        train = open_stream(config, load_training_rows(config, tokenizer, row_is))
        held_out = load_held_out_rows(config, tokenizer, row_is)
        channel = StoreChannel(connect(*store, limit_s), attempt_prefix())
        timeline = stack.enter_context(Timeline.for_run(config.run.dir, "coordinator"))
        records = stack.enter_context(make_records(config, first, tokenizer))
        store_thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="store"))
        # groups go through a client of their own, so that a slow put delays no wait
        buffer_channel = StoreChannel(connect(*store, limit_s), attempt_prefix())
        buffer = open_buffer(config, buffer_channel)
        work = GroupWork(spec, config)
        producer = Producer(
            config=config,
            source=RowGroups(config, work),
            buffer=buffer,
            work=work,
            store_thread=store_thread,
        )
        freshness = Freshness.from_sections(config.schedule, config.publish)
        evaluations = Evaluations()
        if held_out:
            milestones = Milestones.from_sections(
                schedule=config.schedule, checkpoint=config.checkpoint, has_held_out=True
            )
            evaluations = HeldOutLosses(config, channel, held_out, records, timeline, milestones)
            evaluations.send()
        trainers = await TRAINERS_RUN_ON.wait_async(channel, limit_s)
        runs_on = RunsOn(trainers, ())
        records.write_runs_on(runs_on)
        chain = stack.enter_context(RunChain(config, channel, first, runs_on))
        schedule = config.schedule
        choice = partial(EveryGroup, order=schedule.order)
        updates = Updates(schedule.prompts_per_iteration, choice)
        ahead = IterationsAhead(
            config=config,
            channel=channel,
            producer=producer,
            timeline=timeline,
            freshness=freshness,
            updates=updates,
            train=train,
            next=first,
        )
        publication = NoPublication(
            channel=channel,
            first=first,
            startup_timeout_s=limit_s,
            wait_timeout_s=config.deadlines.wait_timeout_s,
        )
        iteration_end = IterationEnd(
            config=config,
            channel=channel,
            controller=NothingScheduled(),
            records=records,
            chain=chain,
        )
        await lead(
            Coordinator(
                first=first,
                last=schedule.iterations,
                publication=publication,
                ahead=ahead,
                evaluations=evaluations,
                iteration_end=iteration_end,
            )
        )


class NothingScheduled:
    """Stands where a run with engines has its schedule controller: rows need no schedule."""

    def end_iteration(self, times: IterationTimes, iteration: int) -> Prediction:
        """Learns nothing."""
        return Prediction("", None, None)


def open_stream(config: Config, loaded: list[AnySet]) -> RowGroupStream:
    """Returns the stream of groups of rows, at the position of the checkpoint."""
    for rows in loaded:
        logger.info("training on %s", rows.summary)
    stream = stream_of(config, loaded, build_algorithm(config).row_is)
    if config.checkpoint.load:
        stream.restore(read_meta(Path(config.checkpoint.load)).data)
    return stream

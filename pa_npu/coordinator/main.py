"""Entry of the coordinator: reads the data, meets engines and trainers, and hands all parts to the loop (loop.py).

    python -m pa_npu.coordinator.main --config RUN/config.yaml

The launcher names its store in PA_NPU_STORE (host:port), where the roster of engines is too. Engines may die, hang, leave and join
while the loop runs (engines/membership.py). Any other failure ends the process with one line; the launcher starts coordinator and
trainers again from the newest checkpoint. SIGTERM ends it when the last iteration's record is written (run_until_terminated).
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from pa_npu import platform
from pa_npu.agents.environment import AgentEnvironment, evaluated
from pa_npu.checkpoints.directories import read_meta
from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel, attempt_prefix, connect
from pa_npu.control.freshness import Freshness
from pa_npu.control.messages import TRAINERS_RUN_ON, RunsOn
from pa_npu.control.roster import PREFIX as ROSTER_PREFIX
from pa_npu.control.roster import Roster
from pa_npu.control.tasks import run_until_terminated
from pa_npu.control.typed import Topic
from pa_npu.coordinator.assembly import (
    decoder,
    make_gateway,
    make_service,
    make_updates,
)
from pa_npu.coordinator.border import BorderCrossing
from pa_npu.coordinator.evaluate import Evaluator, RunEvaluations
from pa_npu.coordinator.iterations_ahead import IterationsAhead, take_up
from pa_npu.coordinator.loop import Coordinator, IterationEnd
from pa_npu.coordinator.producer import Producer
from pa_npu.coordinator.record import RunRecords
from pa_npu.coordinator.roles import make_roles
from pa_npu.data.prompts import Prompt, load_prompts, load_training
from pa_npu.data.stream import TrainingStream
from pa_npu.dispatch.work import GroupWork
from pa_npu.engines.http_server import KEY_VARIABLE
from pa_npu.engines.membership import Fleet
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import Sampling
from pa_npu.engines.registry import engine_kind
from pa_npu.environments.protocol import Environment
from pa_npu.environments.registry import make_environment, opened
from pa_npu.errors import PaNpuError, UserError, exit_code
from pa_npu.families.model_directory import load_tokenizer
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.iteration_model.messages import Rules
from pa_npu.publish.coordinator_side import CoordinatorPublish
from pa_npu.publish.engine_groups import Connection
from pa_npu.publish.messages import LATE_MANIFEST, MANIFEST, StageManifest
from pa_npu.rewards.pool import RewardPool
from pa_npu.samples.routes import routes_of
from pa_npu.samples.shards import open_buffer
from pa_npu.telemetry.logs import setup_logging
from pa_npu.telemetry.timeline import Timeline
from pa_npu.weight_transfer.transport import run_and_exit

logger = logging.getLogger(__name__)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="resolved configuration of the run")
    arguments = parser.parse_args()
    setup_logging("coordinator")
    try:
        run_until_terminated(run(load_config([arguments.config])))
    except PaNpuError as error:
        return exit_code(error, logger)
    return 0


async def run(config: Config) -> None:
    """Everything from an empty event loop to the last evaluation."""
    spec = ModelSpec.of(config)
    store = _store_address()
    key = os.environ.pop(KEY_VARIABLE, None)  # reward functions are users' code, and inherit the environment
    first = first_version(config)
    kind = engine_kind(config.rollout.backend)
    sampling = training_sampling(config, spec)
    async with AsyncExitStack() as stack:
        tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
        train, held_out = load_prompt_sets(config, tokenizer)
        limit_s = config.run.startup_timeout_s
        environment = make_environment(config, tokenizer)
        channel = StoreChannel(connect(*store, limit_s), attempt_prefix())
        roster = Roster(StoreChannel(connect(*store, limit_s), ROSTER_PREFIX), key or "")
        pool = await stack.enter_async_context(EnginePool((), config.rollout.probe_timeout_s, decoder(tokenizer)))
        replays = sampling.routes is not None
        fleet = Fleet(
            config.rollout, pool, roster, lambda url: kind.client(url, spec.vocab_size, key), replays, limit_s
        )
        await stack.enter_async_context(fleet)
        rewards = await stack.enter_async_context(
            RewardPool(config.reward, config.run.dir, config.rollout.max_response_tokens)
        )
        timeline = stack.enter_context(Timeline.for_run(config.run.dir, "coordinator"))
        records = stack.enter_context(RunRecords(config, first, lambda token: str(tokenizer.decode([token]))))
        store_thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="store"))
        # groups go through a client of their own, so that a slow put delays no wait
        buffer_channel = StoreChannel(connect(*store, limit_s), attempt_prefix())
        freshness = Freshness.of(config)
        buffer = open_buffer(config, buffer_channel, ahead=int(config.publish.mode == "rolling"))
        work = GroupWork(spec, config)
        controller = ScheduleController(Rules.of(config), work)
        service = make_service(config, pool, sampling, tokenizer)
        if (gateway := make_gateway(config, environment, key, service)) is not None:
            where = (config.placement.address, config.agent.port or 0, Path(config.run.dir))
            await stack.enter_async_context(gateway.serving(*where))
        await stack.enter_async_context(opened(environment, limit_s))
        if (roles := make_roles(config, pool, timeline, controller)) is not None:
            stack.callback(roles.close)
        producer = Producer(
            *(config, pool, environment, rewards, buffer, controller, sampling, timeline, work, store_thread),
            [] if service is None else [service],
            roles=roles,
        )
        await fleet.wait_all_ready()
        if config.engines_sleep:
            fleet.check_sleep()
        device = platform.get(config.run.device)
        stages, late_stages = [await wait_manifests(config, channel, topic) for topic in (MANIFEST, LATE_MANIFEST)]
        trainers = await TRAINERS_RUN_ON.wait_async(channel, config.run.startup_timeout_s)
        records.write_runs_on(RunsOn(trainers, fleet.run_on()))
        connection = Connection(store, device.comm_backend, stages, late_stages, device.name)
        publish = CoordinatorPublish(config, fleet, pool, channel, connection, sampling)
        evaluator = None
        if held_out:
            tested = await stack.enter_async_context(opened(tested_in(config, tokenizer, environment), limit_s))
            evaluator = Evaluator(config, held_out, pool, tested, rewards, sampling)
        evaluations = RunEvaluations(config, evaluator, records, timeline)
        updates = make_updates(config, freshness, channel, buffer, train)
        ahead = IterationsAhead(config, channel, producer, timeline, freshness, updates, train, first)
        border = BorderCrossing(
            config, channel, fleet, pool, publish, timeline, evaluations, service, written=ahead.written
        )
        iteration_end = IterationEnd(config, channel, controller, records)
        coordinator = Coordinator(config, border, ahead, evaluations, iteration_end)
        take_up(config, freshness, ahead, updates, buffer)
        gc.collect()
        gc.freeze()  # what is here stays to the run's end, and every full collection would look at it again
        await coordinator.run(first)


def tested_in(config: Config, tokenizer: Any, environment: Environment) -> Environment:
    """The environment of evaluations: that of training, where agents have one gateway for both, else another of its kind."""
    if isinstance(environment, AgentEnvironment):
        return evaluated(environment)
    return make_environment(config, tokenizer)


async def wait_manifests(config: Config, channel: StoreChannel, topic: Topic[StageManifest]) -> list[StageManifest]:
    """Waits for each pipeline stage's manifest, in stage order: of a publish (MANIFEST) or a late delivery (LATE_MANIFEST)."""
    limit_s = config.run.startup_timeout_s
    return [await topic.wait_async(channel, limit_s, stage=s) for s in range(config.trainer.pipeline_parallel)]


def training_sampling(config: Config, spec: ModelSpec) -> Sampling:
    return Sampling(
        max_tokens=config.rollout.max_response_tokens,
        temperature=config.rollout.temperature,
        stop_token_ids=spec.eos_token_ids,
        ignore_eos=config.rollout.ignore_eos,
        routes=routes_of(config, spec),
    )


def load_prompt_sets(config: Config, tokenizer: Any) -> tuple[TrainingStream, dict[str, tuple[Prompt, ...]]]:
    """Training stream at the position of the checkpoint, and sets of held-out prompts by name."""
    loaded = load_training(config.data, tokenizer, config.needs_answers)
    for prompts in loaded:
        logger.info("training on %s", prompts.summary)
    held_out = {
        name: load_prompts(dataset, tokenizer, config.data, config.key_of_set(name), 0, config.needs_answers)
        for name, dataset in config.evaluation_sets.items()
    }
    for name, prompts in held_out.items():
        logger.info("evaluating on %s: %s", name, prompts.summary)
    stream = TrainingStream(config.data, loaded, config.run.seed)
    if config.checkpoint.load:
        stream.restore(read_meta(Path(config.checkpoint.load)).data)
    return stream, {name: found.prompts for name, found in held_out.items()}


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
    run_and_exit(main)

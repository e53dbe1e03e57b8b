"""Entry of the coordinator: reads the data, meets engines and trainers, and hands all parts to the loop (loop.py).

    python -m pa_npu.coordinator.main --config RUN/config.yaml

The launcher names its store in PA_NPU_STORE (host:port), where the roster of engines is too.
Engines may die, hang, leave and join while the loop runs (engines/membership.py). Any other failure
ends the process with one line; the launcher starts coordinator and trainers again from the newest
checkpoint. SIGTERM ends it when the last iteration's record is written (run_until_terminated).
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pa_npu import platform
from pa_npu.agents.environment import AgentEnvironment, evaluated
from pa_npu.agents.gateway import Gateway
from pa_npu.agents.session import Sessions
from pa_npu.algorithm.registry import build_algorithm
from pa_npu.checkpoints.directories import read_meta
from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel, attempt_prefix, connect
from pa_npu.control.freshness import Freshness
from pa_npu.control.messages import TRAINERS_RUN_ON, RunsOn, TrainersRunOn
from pa_npu.control.milestones import Milestones
from pa_npu.control.roster import PREFIX as ROSTER_PREFIX
from pa_npu.control.roster import Roster
from pa_npu.control.tasks import run_until_terminated
from pa_npu.coordinator.chain import RunChain
from pa_npu.coordinator.delivery import Delivery
from pa_npu.coordinator.engine_groups import producer_on_engines
from pa_npu.coordinator.evaluate import (
    BackgroundEvaluations,
    Evaluations,
    Evaluator,
    ForegroundEvaluations,
)
from pa_npu.coordinator.iterations_ahead import IterationsAhead
from pa_npu.coordinator.loop import Coordinator, IterationEnd
from pa_npu.coordinator.publication import EngineGuest, Publication, publication_kind
from pa_npu.coordinator.record import RunRecords
from pa_npu.coordinator.roles import Roles, RolesDelivery
from pa_npu.coordinator.run_on_rows import run_on_rows
from pa_npu.coordinator.served_run import ServedRun
from pa_npu.coordinator.start import first_version, lead, make_records, store_address
from pa_npu.coordinator.token_budget import BudgetedUpdates
from pa_npu.coordinator.updates import EveryGroup, InformativeGroups, Updates
from pa_npu.data.prompts import Prompt, load_prompts, load_training
from pa_npu.data.stream import TrainingStream
from pa_npu.data.teachers import check_teacher_names
from pa_npu.dispatch.assignment import GroupWork
from pa_npu.engines.http_server import KEY_FILE, KEY_VARIABLE
from pa_npu.engines.membership import Fleet
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import RolloutEngine, Sampling
from pa_npu.engines.registry import engine_kind
from pa_npu.environments.protocol import Environment
from pa_npu.environments.registry import make_environment, opened
from pa_npu.errors import PaNpuError, exit_code
from pa_npu.families.model_directory import load_tokenizer
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.iteration_model.subjects import Rules
from pa_npu.publish.coordinator_side import CoordinatorPublish
from pa_npu.publish.engines import Connection
from pa_npu.publish.messages import LATE_MANIFEST, MANIFEST
from pa_npu.publish.probes import ProbePlan
from pa_npu.rewards.functions import needs_answers
from pa_npu.rewards.pool import RewardPool
from pa_npu.samples.rollout_buffer import RolloutBuffer, open_buffer
from pa_npu.samples.routes import routes_of
from pa_npu.telemetry.logs import setup_logging
from pa_npu.telemetry.timeline import Timeline
from pa_npu.weight_transfer.computation import Computation
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
    if build_algorithm(config).samples_from == "rows":
        await run_on_rows(config)
        return
    spec = ModelSpec.from_config(config)
    store = store_address()
    # reward functions are users' code, and inherit the environment
    key = os.environ.pop(KEY_VARIABLE, None)
    first = first_version(config)
    kind = engine_kind(config.rollout.backend)
    sampling = training_sampling(config, spec)
    async with AsyncExitStack() as stack:
        tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
        train, held_out = load_prompt_sets(config, tokenizer)
        limit_s = config.run.startup_timeout_s
        sessions = make_sessions(config, key)
        environment = make_environment(config, tokenizer, sessions)
        channel = StoreChannel(connect(*store, limit_s), attempt_prefix())
        roster = Roster(StoreChannel(connect(*store, limit_s), ROSTER_PREFIX), key or "")
        pool, fleet = await open_engines(
            stack,
            config=config,
            tokenizer=tokenizer,
            roster=roster,
            make_engine=lambda url: kind.client(url, spec.vocab_size, key),
            needs_routes=sampling.routes is not None,
        )
        rewards = await stack.enter_async_context(
            RewardPool(config.reward, config.run.dir, config.rollout.max_response_tokens)
        )
        timeline = stack.enter_context(Timeline.for_run(config.run.dir, "coordinator"))
        records = stack.enter_context(make_records(config, first, tokenizer))
        store_thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="store"))
        # groups go through a client of their own, so that a slow put delays no wait
        buffer_channel = StoreChannel(connect(*store, limit_s), attempt_prefix())
        freshness = Freshness.from_sections(config.schedule, config.publish)
        ahead_of_trainers = publication_kind(config.publish).CONCURRENT_ITERATIONS
        buffer = open_buffer(config, buffer_channel, ahead=ahead_of_trainers)
        work = GroupWork(spec, config)
        controller = ScheduleController(Rules.from_config(config), work)
        service = make_service(config, pool, sampling, tokenizer)
        gateway = make_gateway(config, environment, sessions, service)
        if gateway is not None:
            await open_gateway(stack, config, gateway)
        await stack.enter_async_context(opened(environment, limit_s))
        roles = make_roles(config, pool, timeline, controller)
        if roles is not None:
            stack.callback(roles.close)
        producer = producer_on_engines(
            config=config,
            pool=pool,
            environment=environment,
            rewards=rewards,
            buffer=buffer,
            controller=controller,
            sampling=sampling,
            timeline=timeline,
            work=work,
            store_thread=store_thread,
            variants=[feature for feature in (service, roles) if feature is not None],
            streamed=Delivery if roles is None else partial(RolesDelivery, roles=roles),
        )
        await fleet.wait_all_ready()
        if config.devices.engines_sleep:
            fleet.check_sleep()
        connection, trainers = await connect_to_trainers(config, channel, store)
        runs_on = RunsOn(trainers, fleet.run_on())
        records.write_runs_on(runs_on)
        chain = stack.enter_context(RunChain(config, channel, first, runs_on))
        milestones = Milestones.from_sections(
            schedule=config.schedule, checkpoint=config.checkpoint, has_held_out=bool(held_out)
        )
        evaluator = None
        if held_out:
            evaluator = Evaluator(
                config=config,
                sets=held_out,
                pool=pool,
                environment=await open_evaluated(stack, config, environment, tokenizer),
                rewards=rewards,
                sampling=sampling,
            )
        evaluations = make_evaluations(
            evaluator, records=records, timeline=timeline, milestones=milestones
        )
        updates = make_updates(
            config,
            freshness=freshness,
            milestones=milestones,
            channel=channel,
            buffer=buffer,
            train=train,
        )
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
        publication = make_publication(
            config,
            channel=channel,
            fleet=fleet,
            pool=pool,
            connection=connection,
            sampling=sampling,
            timeline=timeline,
            guests=[evaluations] if service is None else [evaluations, service],
            written=ahead.written,
            milestones=milestones,
            first=first,
        )
        ahead.take_up(buffer)
        iteration_end = IterationEnd(
            config=config, channel=channel, controller=controller, records=records, chain=chain
        )
        await lead(
            Coordinator(
                first=first,
                last=config.schedule.iterations,
                publication=publication,
                ahead=ahead,
                evaluations=evaluations,
                iteration_end=iteration_end,
            )
        )


async def open_engines(
    stack: AsyncExitStack,
    *,
    config: Config,
    tokenizer: Any,
    roster: Roster,
    make_engine: Callable[[str], RolloutEngine],
    needs_routes: bool,
) -> tuple[EnginePool, Fleet]:
    """Opens the pool of engines and its membership on `stack`; see Fleet for the arguments."""

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True))

    pool = await stack.enter_async_context(
        EnginePool(probe_timeout_s=config.rollout.probe_timeout_s, decode=decode)
    )
    fleet = Fleet(
        config=config.rollout,
        pool=pool,
        roster=roster,
        make_engine=make_engine,
        needs_routes=needs_routes,
        startup_timeout_s=config.run.startup_timeout_s,
    )
    await stack.enter_async_context(fleet)
    return pool, fleet


async def open_gateway(stack: AsyncExitStack, config: Config, gateway: Gateway) -> None:
    """Serves agents and other programs until `stack` is closed."""
    port = config.agent.port or 0
    serving = gateway.serving(config.placement.address, port, Path(config.run.dir))
    await stack.enter_async_context(serving)


async def open_evaluated(
    stack: AsyncExitStack, config: Config, environment: Environment, tokenizer: Any
) -> Environment:
    """Opens the environment of evaluations on `stack`: one of its own, but for agents, which have
    one gateway for training and evaluations.
    """
    if isinstance(environment, AgentEnvironment):
        tested = evaluated(environment)
    else:
        tested = make_environment(config, tokenizer)
    await stack.enter_async_context(opened(tested, config.run.startup_timeout_s))
    return tested


async def connect_to_trainers(
    config: Config, channel: StoreChannel, store: tuple[str, int]
) -> tuple[Connection, TrainersRunOn]:
    """Waits until each stage has said how engines reach its groups, and rank 0 what trainers run
    with.

    Raises DeadlineExceeded.
    """
    device, limit_s = platform.get(config.run.device), config.run.startup_timeout_s
    numbers = range(config.trainer.pipeline_parallel)
    stages = [await MANIFEST.wait_async(channel, limit_s, stage=number) for number in numbers]
    late_stages = [
        await LATE_MANIFEST.wait_async(channel, limit_s, stage=number) for number in numbers
    ]
    trainers = await TRAINERS_RUN_ON.wait_async(channel, limit_s)
    computation = None
    if trainers.computation:
        computation = msgspec.convert(trainers.computation, Computation, strict=False)
    connection = Connection(
        store=store,
        backend=device.comm_backend,
        stages=stages,
        late_stages=late_stages,
        device=device.name,
        computation=computation,
    )
    return connection, trainers


# which features a run uses: the only place on the coordinator's side that reads their keys and
# constructs them


def make_updates(
    config: Config,
    *,
    freshness: Freshness,
    milestones: Milestones,
    channel: StoreChannel,
    buffer: RolloutBuffer,
    train: TrainingStream[Prompt],
) -> Updates:
    """Makes the run's policy on the groups of an update: by prompts, by informative groups, or by a
    budget of tokens.
    """
    schedule = config.schedule
    if schedule.tokens_per_update is not None:
        return BudgetedUpdates(
            config=config,
            tokens=schedule.tokens_per_update,
            freshness=freshness,
            milestones=milestones,
            channel=channel,
            buffer=buffer,
        )
    if schedule.dynamic_sampling:
        kind = partial(InformativeGroups, order=schedule.order, another=lambda: train.take(1)[0])
        return Updates(schedule.prompts_per_iteration, kind)
    return Updates(schedule.prompts_per_iteration, partial(EveryGroup, order=schedule.order))


def make_evaluations(
    evaluator: Evaluator | None,
    *,
    records: RunRecords,
    timeline: Timeline,
    milestones: Milestones,
) -> Evaluations:
    """Makes the run's evaluations, which are none without an evaluator."""
    if evaluator is None:
        return Evaluations()
    in_background = evaluator.config.evaluate.overlap
    kind = BackgroundEvaluations if in_background else ForegroundEvaluations
    return kind(evaluator, records, timeline, milestones)


def make_publication(
    config: Config,
    *,
    channel: StoreChannel,
    fleet: Fleet,
    pool: EnginePool,
    connection: Connection,
    sampling: Sampling,
    timeline: Timeline,
    guests: Sequence[EngineGuest],
    written: Callable[[int], Awaitable[None]],
    milestones: Milestones,
    first: int,
) -> Publication:
    """Makes the run's publication: how a version comes to the engines (publish.mode, divergence)."""
    probes = ProbePlan.from_sections(
        publish=config.publish,
        rollout=config.rollout,
        schedule=config.schedule,
        algorithm=config.algorithm,
    )
    publish = CoordinatorPublish(
        rollout=config.rollout,
        timeout_s=config.publish.timeout_s,
        seed=config.run.seed,
        senders=config.mesh.senders(),
        fleet=fleet,
        pool=pool,
        channel=channel,
        connection=connection,
        sampling=sampling,
        probes=probes,
    )
    kind = publication_kind(config.publish)
    return kind(
        channel=channel,
        fleet=fleet,
        pool=pool,
        publish=publish,
        timeline=timeline,
        guests=guests,
        written=written,
        probes=probes,
        milestones=milestones,
        first=first,
        startup_timeout_s=config.run.startup_timeout_s,
        wait_timeout_s=config.deadlines.wait_timeout_s,
        border_timeout_s=config.deadlines.border_timeout_s,
    )


def make_roles(
    config: Config, pool: EnginePool, timeline: Timeline, controller: ScheduleController
) -> Roles | None:
    """For a run whose devices decode and train in one iteration."""
    return Roles(config, pool, timeline, controller.speeds) if config.devices.follows_work else None


def make_service(
    config: Config, pool: EnginePool, sampling: Sampling, tokenizer: Any
) -> ServedRun | None:
    """For a run that other programs see through its gateway."""
    return None if config.agent.port is None else ServedRun(config, pool, sampling, tokenizer)


def make_sessions(config: Config, key: str | None) -> Sessions | None:
    """Makes the sessions that the run's gateway and its agents share.

    They are signed by the engines' key, or by the run's own if that is not known. None if the run
    has neither, and so no gateway.
    """
    file = Path(config.run.dir) / KEY_FILE
    if not key and not file.exists():
        return None
    return Sessions(key or file.read_text(encoding="utf-8").strip())


def make_gateway(
    config: Config,
    environment: Environment,
    sessions: Sessions | None,
    service: ServedRun | None,
) -> Gateway | None:
    """Makes the server of agents and of other programs, for a run that has any of these."""
    if service is None and not isinstance(environment, AgentEnvironment):
        return None
    assert sessions is not None, "the launcher writes a key for every run with a gateway"
    routes = None if service is None else service.routes
    return Gateway(sessions, config.rollout.temperature, routes)


def training_sampling(config: Config, spec: ModelSpec) -> Sampling:
    return Sampling(
        max_tokens=config.rollout.max_response_tokens,
        temperature=config.rollout.temperature,
        stop_token_ids=spec.eos_token_ids,
        ignore_eos=config.rollout.ignore_eos,
        routes=routes_of(config, spec),
    )


def load_prompt_sets(
    config: Config, tokenizer: Any
) -> tuple[TrainingStream[Prompt], dict[str, tuple[Prompt, ...]]]:
    """Training stream at the position of the checkpoint, and sets of held-out prompts by name."""
    loaded = load_training(config.data, tokenizer, needs_answers(config.reward, config.environment))
    for prompts in loaded:
        check_teacher_names(prompts.prompts, prompts.path, config)
        logger.info("training on %s", prompts.summary)
    held_out = {
        name: load_prompts(
            dataset,
            tokenizer,
            config.data,
            config.evaluate.key_of(name),
            0,
            needs_answers(config.reward, config.environment),
        )
        for name, dataset in config.evaluate.all_sets(config.data.test).items()
    }
    for name, prompts in held_out.items():
        logger.info("evaluating on %s: %s", name, prompts.summary)
    stream = TrainingStream(config.data, loaded, config.run.seed)
    if config.checkpoint.load:
        stream.restore(read_meta(Path(config.checkpoint.load)).data)
    return stream, {name: found.prompts for name, found in held_out.items()}


if __name__ == "__main__":
    run_and_exit(main)

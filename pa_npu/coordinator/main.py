"""Entry of the coordinator: reads the data, meets engines and trainers, and hands all parts to the loop (loop.py).

    python -m pa_npu.coordinator.main --config RUN/config.yaml

The launcher names its store in PA_NPU_STORE (host:port), where the roster of engines is too.
Engines may die, hang, leave and join while the loop runs (engines/membership.py). Any other failure
ends the process with one line; the launcher starts coordinator and trainers again from the newest
checkpoint. SIGTERM ends it when the last iteration's record is written (run_until_terminated).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pa_npu import platform
from pa_npu.agents.environment import AgentEnvironment, evaluated
from pa_npu.algorithm.registry import build_algorithm
from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel, attempt_prefix
from pa_npu.control.freshness import Freshness
from pa_npu.control.messages import TRAINERS_RUN_ON, RunsOn, TrainersRunOn
from pa_npu.control.milestones import Milestones
from pa_npu.control.roster import PREFIX as ROSTER_PREFIX
from pa_npu.control.roster import Roster
from pa_npu.control.tasks import run_until_terminated
from pa_npu.coordinator.assembly import (
    make_evaluations,
    make_gateway,
    make_publication,
    make_roles,
    make_service,
    make_updates,
)
from pa_npu.coordinator.chain import RunChain
from pa_npu.coordinator.delivery import Delivery
from pa_npu.coordinator.engine_groups import producer_on_engines
from pa_npu.coordinator.evaluate import Evaluations, Evaluator
from pa_npu.coordinator.features import Feature
from pa_npu.coordinator.inputs import RunInputs, read_inputs
from pa_npu.coordinator.iterations_ahead import IterationsAhead
from pa_npu.coordinator.loop import Coordinator, IterationEnd
from pa_npu.coordinator.producer import Producer
from pa_npu.coordinator.publication import EngineGuest, publication_kind
from pa_npu.coordinator.record import RunRecords
from pa_npu.coordinator.roles_delivery import RolesDelivery
from pa_npu.coordinator.run_on_rows import run_on_rows
from pa_npu.coordinator.served_run import ServedRun
from pa_npu.coordinator.start import lead, make_records
from pa_npu.coordinator.teachers import Teachers, open_teachers
from pa_npu.dispatch.assignment import GroupWork
from pa_npu.engines.membership import EngineMembership
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import RolloutEngine
from pa_npu.engines.registry import engine_kind
from pa_npu.environments.protocol import Environment
from pa_npu.environments.registry import make_environment, opened
from pa_npu.errors import PaNpuError, exit_code
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.iteration_model.subjects import Rules
from pa_npu.planning.publish import publishers_of
from pa_npu.publish.engines import Connection, check_announced
from pa_npu.publish.messages import LATE_MANIFEST, MANIFEST
from pa_npu.rewards.pool import RewardPool
from pa_npu.samples.rollout_buffer import RolloutBuffer, open_buffer
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
    """Runs the coordinator, from an empty event loop to the last evaluation."""
    if build_algorithm(config).samples_from == "rows":
        await run_on_rows(config)
        return
    inputs = read_inputs(config)
    async with AsyncExitStack() as stack:
        channel = inputs.channel(attempt_prefix())
        engines = await open_engines(stack, config, inputs)
        shared = await open_shared(stack, config, inputs)
        teachers, known_teachers = await open_teachers(stack, config, inputs)
        production = await open_production(stack, config, inputs, engines.pool, shared, teachers)
        await engines.membership.wait_all_ready()
        if any(teacher.place == "policy" for teacher in config.teacher.values()):
            engines.membership.check_scores(config.rollout.temperature)
        for teacher in known_teachers:
            await teacher.ready()
        if config.devices.engines_sleep:
            engines.membership.check_sleep()
        connection, trainers = await connect_to_trainers(config, channel, inputs.store)
        runs_on = RunsOn(trainers, engines.membership.run_on())
        shared.records.write_runs_on(runs_on)
        chain = stack.enter_context(RunChain(config, channel, inputs.first, runs_on))
        milestones = Milestones.from_sections(
            schedule=config.schedule,
            checkpoint=config.checkpoint,
            has_held_out=bool(inputs.held_out),
        )
        evaluations = await open_evaluations(
            stack, config, inputs, engines.pool, shared, milestones
        )
        coordinator = make_coordinator(
            config,
            inputs=inputs,
            channel=channel,
            engines=engines,
            shared=shared,
            production=production,
            connection=connection,
            chain=chain,
            milestones=milestones,
            evaluations=evaluations,
        )
        await lead(coordinator)


@dataclass(frozen=True)
class Engines:
    """The engines of a run, and who of them is a member."""

    pool: EnginePool
    membership: EngineMembership


async def open_engines(stack: AsyncExitStack, config: Config, inputs: RunInputs) -> Engines:
    """Opens the pool of engines and its membership on `stack`."""
    kind = engine_kind(config.rollout.backend)
    roster = Roster(inputs.channel(ROSTER_PREFIX), inputs.key or "")

    def make_engine(url: str) -> RolloutEngine:
        return kind.client(url, inputs.spec.vocab_size, inputs.key)

    def decode(tokens: Sequence[int]) -> str:
        return str(inputs.tokenizer.decode(list(tokens), skip_special_tokens=True))

    pool = await stack.enter_async_context(
        EnginePool(probe_timeout_s=config.rollout.probe_timeout_s, decode=decode)
    )
    membership = EngineMembership(
        config=config.rollout,
        pool=pool,
        roster=roster,
        make_engine=make_engine,
        needs_expert_choices=inputs.sampling.expert_choices is not None,
        startup_timeout_s=config.run.startup_timeout_s,
    )
    await stack.enter_async_context(membership)
    return Engines(pool, membership)


@dataclass(frozen=True)
class Shared:
    """The objects that several parts of a run use.

    store_thread: where groups are put into the store.
    """

    rewards: RewardPool
    timeline: Timeline
    records: RunRecords
    store_thread: ThreadPoolExecutor


async def open_shared(stack: AsyncExitStack, config: Config, inputs: RunInputs) -> Shared:
    """Opens what several parts use on `stack`."""
    rewards = await stack.enter_async_context(
        RewardPool(config.reward, config.run.dir, config.rollout.max_response_tokens)
    )
    return Shared(
        rewards=rewards,
        timeline=stack.enter_context(Timeline.for_run(config.run.dir, "coordinator")),
        records=stack.enter_context(make_records(config, inputs.first, inputs.tokenizer)),
        store_thread=stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="store")),
    )


@dataclass(frozen=True)
class ProductionParts:
    """The parts that produce the groups of iterations.

    service: what other programs see of the run; None if it serves none.
    """

    buffer: RolloutBuffer
    controller: ScheduleController
    service: ServedRun | None
    producer: Producer


async def open_production(
    stack: AsyncExitStack,
    config: Config,
    inputs: RunInputs,
    pool: EnginePool,
    shared: Shared,
    teachers: Teachers | None = None,
) -> ProductionParts:
    """Makes the producer, and opens its environment and gateway on `stack`."""
    # groups go through a client of their own, so that a slow put delays no wait
    buffer_channel = inputs.channel(attempt_prefix())
    concurrent_iterations = publication_kind(config.publish).CONCURRENT_ITERATIONS
    buffer = open_buffer(config, buffer_channel, ahead=concurrent_iterations)
    work = GroupWork(inputs.spec, config)
    controller = ScheduleController(Rules.from_config(config), work)
    service = make_service(config, pool, inputs.sampling, inputs.tokenizer)
    await open_gateway(stack, config, inputs, service)
    environment = inputs.environment
    await stack.enter_async_context(opened(environment, config.run.startup_timeout_s))
    features: list[Feature] = []
    if service is not None:
        features.append(service)
    make_delivery: Callable[..., Delivery] = Delivery
    roles = make_roles(config, pool, shared.timeline, controller)
    if roles is not None:
        stack.callback(roles.close)
        features.append(roles)
        make_delivery = partial(RolesDelivery, roles=roles)
    producer = producer_on_engines(
        config=config,
        pool=pool,
        environment=environment,
        rewards=shared.rewards,
        buffer=buffer,
        controller=controller,
        sampling=inputs.sampling,
        timeline=shared.timeline,
        work=work,
        store_thread=shared.store_thread,
        features=features,
        streamed=make_delivery,
        demonstrations=inputs.demonstrations,
        teachers=teachers,
    )
    return ProductionParts(buffer, controller, service, producer)


async def open_gateway(
    stack: AsyncExitStack, config: Config, inputs: RunInputs, service: ServedRun | None
) -> None:
    """Serves agents and other programs until `stack` is closed, if the run has any of these."""
    gateway = make_gateway(inputs.environment, inputs.sessions, service)
    if gateway is None:
        return
    port = config.agent.port or 0
    serving = gateway.serving(config.placement.address, port, Path(config.run.dir))
    await stack.enter_async_context(serving)


async def open_evaluations(
    stack: AsyncExitStack,
    config: Config,
    inputs: RunInputs,
    pool: EnginePool,
    shared: Shared,
    milestones: Milestones,
) -> Evaluations:
    """Makes the run's evaluations, and opens their environment on `stack`."""
    evaluator = None
    if inputs.held_out:
        evaluator = Evaluator(
            config=config,
            sets=inputs.held_out,
            pool=pool,
            environment=await open_evaluated(stack, config, inputs.environment, inputs.tokenizer),
            rewards=shared.rewards,
            sampling=inputs.sampling,
        )
    return make_evaluations(
        evaluator, records=shared.records, timeline=shared.timeline, milestones=milestones
    )


async def open_evaluated(
    stack: AsyncExitStack, config: Config, environment: Environment, tokenizer: Any
) -> Environment:
    """Opens the environment of evaluations on `stack`.

    Agents have one gateway for training and evaluations; every other environment is made anew.
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
    """Waits until each sender has said how engines reach its groups, and rank 0 what trainers run
    on.

    Raises DeadlineExceeded, and InvariantViolation if what senders announce is not each weight once.
    """
    device = platform.get(config.run.device)
    limit_s = config.run.startup_timeout_s
    ranks = publishers_of(config)
    stages = [await MANIFEST.wait_async(channel, limit_s, rank=rank) for rank in ranks]
    late_stages = [await LATE_MANIFEST.wait_async(channel, limit_s, rank=rank) for rank in ranks]
    # of a large mixture with many senders it takes seconds
    await asyncio.to_thread(check_announced, stages)
    await asyncio.to_thread(check_announced, late_stages)
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


def make_coordinator(
    config: Config,
    *,
    inputs: RunInputs,
    channel: StoreChannel,
    engines: Engines,
    shared: Shared,
    production: ProductionParts,
    connection: Connection,
    chain: RunChain,
    milestones: Milestones,
    evaluations: Evaluations,
) -> Coordinator:
    """Makes the loop of a run, all of whose other parts exist."""
    freshness = Freshness.from_sections(config.schedule, config.publish)
    updates = make_updates(
        config,
        freshness=freshness,
        milestones=milestones,
        channel=channel,
        buffer=production.buffer,
        train=inputs.train,
    )
    ahead = IterationsAhead(
        config=config,
        channel=channel,
        producer=production.producer,
        timeline=shared.timeline,
        freshness=freshness,
        updates=updates,
        train=inputs.train,
        next=inputs.first,
    )
    guests: list[EngineGuest] = [evaluations]
    if production.service is not None:
        guests.append(production.service)
    publication = make_publication(
        config,
        channel=channel,
        membership=engines.membership,
        pool=engines.pool,
        connection=connection,
        sampling=inputs.sampling,
        timeline=shared.timeline,
        guests=guests,
        written=ahead.written,
        milestones=milestones,
        first=inputs.first,
    )
    ahead.restore_groups(production.buffer)
    iteration_end = IterationEnd(
        config=config,
        channel=channel,
        controller=production.controller,
        records=shared.records,
        chain=chain,
    )
    return Coordinator(
        first=inputs.first,
        last=config.schedule.iterations,
        publication=publication,
        ahead=ahead,
        evaluations=evaluations,
        iteration_end=iteration_end,
    )


if __name__ == "__main__":
    run_and_exit(main)

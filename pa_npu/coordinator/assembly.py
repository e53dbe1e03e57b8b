"""Makes the objects of the features that a run uses, and no others.

This is the only place on the coordinator's side that reads the keys of these features.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pa_npu.agents.environment import AgentEnvironment
from pa_npu.agents.gateway import Gateway
from pa_npu.agents.open_sessions import Sessions
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.freshness import Freshness
from pa_npu.control.milestones import Milestones
from pa_npu.coordinator.evaluate import (
    BackgroundEvaluations,
    Evaluations,
    Evaluator,
    ForegroundEvaluations,
)
from pa_npu.coordinator.publication import EngineGuest, Publication, publication_kind
from pa_npu.coordinator.record import RunRecords
from pa_npu.coordinator.roles import Roles
from pa_npu.coordinator.served_run import ServedRun
from pa_npu.coordinator.token_budget import BudgetedUpdates
from pa_npu.coordinator.updates import EveryGroup, InformativeGroups, Updates
from pa_npu.data.prompts import Prompt
from pa_npu.data.stream import TrainingStream
from pa_npu.engines.http_server import KEY_FILE
from pa_npu.engines.membership import EngineMembership
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import Sampling
from pa_npu.environments.protocol import Environment
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.publish import contributors_of, publishers_of
from pa_npu.publish.coordinator_side import CoordinatorPublish
from pa_npu.publish.engines import Connection
from pa_npu.publish.probes import ProbePlan
from pa_npu.samples.rollout_buffer import RolloutBuffer
from pa_npu.telemetry.timeline import Timeline


def make_updates(
    config: Config,
    *,
    freshness: Freshness,
    milestones: Milestones,
    channel: StoreChannel,
    buffer: RolloutBuffer,
    train: TrainingStream[Prompt],
) -> Updates:
    """Makes the run's policy on the groups of an update.

    An update has a number of prompts, of informative groups, or a budget of tokens.
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
        kind = partial(
            InformativeGroups, order=schedule.order, another=lambda: train.next_items(1)[0]
        )
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
    membership: EngineMembership,
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
        senders=contributors_of(config),
        publishers=publishers_of(config),
        membership=membership,
        pool=pool,
        channel=channel,
        connection=connection,
        sampling=sampling,
        probes=probes,
    )
    kind = publication_kind(config.publish)
    return kind(
        channel=channel,
        membership=membership,
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
    """Makes the roles of a run whose devices decode and train in one iteration."""
    if not config.devices.follows_work:
        return None
    return Roles(config, pool, timeline, controller.speeds)


def make_service(
    config: Config, pool: EnginePool, sampling: Sampling, tokenizer: Any
) -> ServedRun | None:
    """Makes what other programs see of the run through its gateway, if it has a port."""
    if config.agent.port is None:
        return None
    return ServedRun(config, pool, sampling, tokenizer)


def make_sessions(run_dir: str, key: str | None) -> Sessions | None:
    """Makes the sessions that the run's gateway and its agents share.

    They are signed by the engines' key, or by the run's own if that is not known. None if the run
    has neither, and so no gateway.
    """
    file = Path(run_dir) / KEY_FILE
    if not key and not file.exists():
        return None
    return Sessions(key or file.read_text(encoding="utf-8").strip())


def make_gateway(
    environment: Environment,
    sessions: Sessions | None,
    service: ServedRun | None,
) -> Gateway | None:
    """Makes the server of agents and of other programs, for a run that has any of these."""
    if service is None and not isinstance(environment, AgentEnvironment):
        return None
    assert sessions is not None, "the launcher writes a key for every run with a gateway"
    routes = None if service is None else service.routes
    return Gateway(sessions, routes)

"""Which features a run uses: the only place on the coordinator's side that reads their keys and constructs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pa_npu.agents.environment import AgentEnvironment
from pa_npu.agents.gateway import Gateway
from pa_npu.agents.session import Sessions
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.freshness import Freshness
from pa_npu.coordinator.served_run import ServedRun
from pa_npu.coordinator.updates import BudgetedUpdates, InformativeUpdates, Updates
from pa_npu.data.stream import TrainingStream
from pa_npu.engines.handing_on import Decode
from pa_npu.engines.http_server import KEY_FILE
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import Sampling
from pa_npu.environments.protocol import Environment
from pa_npu.samples.rollout_buffer import RolloutBuffer


def make_updates(
    config: Config, freshness: Freshness, channel: StoreChannel, buffer: RolloutBuffer, train: TrainingStream
) -> Updates:
    """Makes the run's policy on the groups of an update: by prompts, by informative groups, or by a budget of tokens."""
    schedule = config.schedule
    if schedule.tokens_per_update is not None:
        return BudgetedUpdates(config, schedule.tokens_per_update, freshness, channel, buffer)
    if schedule.dynamic_sampling:
        return InformativeUpdates(schedule.prompts_per_iteration, schedule.order, lambda: train.take(1)[0])
    return Updates(schedule.prompts_per_iteration, schedule.order)


def decoder(tokenizer: Any) -> Decode:
    """The text of responses in parts."""
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def make_service(config: Config, pool: EnginePool, sampling: Sampling, tokenizer: Any) -> ServedRun | None:
    """For a run that other programs see through its gateway."""
    return None if config.agent.port is None else ServedRun(config, pool, sampling, tokenizer)


def make_gateway(
    config: Config, environment: Environment, key: str | None, service: ServedRun | None
) -> Gateway | None:
    """For agents, and for other programs, where a run has these. key: the engines'; the run's own where that is not known."""
    agents = environment if isinstance(environment, AgentEnvironment) else None
    if agents is None and service is None:
        return None
    sessions = Sessions(key or (Path(config.run.dir) / KEY_FILE).read_text(encoding="utf-8").strip())
    if agents is not None:
        agents.sessions = sessions
    return Gateway(sessions, config.rollout.temperature, service.routes if service is not None else None)

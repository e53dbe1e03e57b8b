"""Makes the environment that a configuration names, and opens and closes it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from pa_npu.algorithm.registry import build_algorithm
from pa_npu.config.schema import Config
from pa_npu.config.user_code import check_name, describe, import_function
from pa_npu.control.tasks import catch
from pa_npu.environments.protocol import Environment, EnvironmentContext, EnvironmentFailed
from pa_npu.environments.single_turn import SingleTurn
from pa_npu.environments.time_limit import LEAST_S, interrupting
from pa_npu.environments.tools import ToolEnvironment
from pa_npu.errors import ConfigError, PaNpuError

logger = logging.getLogger(__name__)

_CLOSE_S = 10.0  # whatever is open after that ends with this process

ENVIRONMENTS: dict[str, Callable[[EnvironmentContext], Environment]] = {
    "single_turn": SingleTurn,
    "tools": ToolEnvironment,
}
# Classes of a package above this one, which are therefore named and not imported.
_NAMED = {
    "agents": "pa_npu.agents.environment:AgentEnvironment",
    "remote": "pa_npu.agents.remote_protocols:make_remote",
    "verifiers": "pa_npu.agents.verifiers:VerifiersEnvironment",
    "tool_class": "pa_npu.agents.tool_class:ToolClassEnvironment",
}


def make_environment(config: Config, tokenizer: Any, sessions: Any = None) -> Environment:
    """Makes the environment of environment.name: a registered one, or the class of module:Class.

    sessions: see EnvironmentContext. Raises ConfigError if there is none, or if it cannot be made.
    """
    settings = config.environment
    name = settings.name
    observations = build_algorithm(config).observations
    context = EnvironmentContext(
        tokenizer=tokenizer,
        max_response_tokens=config.rollout.max_response_tokens,
        max_turns=settings.max_turns,
        timeout_s=config.deadlines.environment_timeout_s,
        options=settings.options,
        config=config,
        sessions=sessions,
        observations=settings.observations,
        observation_component=0 if observations is None else observations.number,
    )
    check_name("environment.name", name, [*ENVIRONMENTS, *_NAMED], "module:Class")
    try:
        make = ENVIRONMENTS.get(name)
        if make is None:
            make = import_function("environment.name", _NAMED.get(name, name))
        environment = make(context)
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a user's class may raise anything
        raise ConfigError(
            f"environment.name: {name} cannot be made ({describe(error)}); correct its __init__, "
            "which gets an EnvironmentContext"
        ) from error
    if not callable(getattr(environment, "rollout", None)):
        raise ConfigError(
            f"environment.name: {name} has no method rollout(prompt, num_samples, generate); add it"
        )
    return environment


@asynccontextmanager
async def opened(environment: Environment, limit_s: float) -> AsyncIterator[Environment]:
    """Opens the environment, yields it, and closes it, if it has such methods.

    limit_s: deadline of `open`. Raises EnvironmentFailed if it cannot be opened. A failure of
    `close` is only logged, because the run is over then.
    """
    name = type(environment).__name__
    try:
        try:
            await _call(environment, "open", limit_s)
        except (PaNpuError, asyncio.CancelledError, KeyboardInterrupt):
            raise
        except asyncio.TimeoutError:
            raise EnvironmentFailed(
                f"environment {name}: open has not ended within {limit_s:g} s; correct it"
            ) from None
        except BaseException as error:  # users' code
            raise EnvironmentFailed(
                f"environment {name}: open: {describe(error)}; correct the environment"
            ) from error
        with interrupting(environment, LEAST_S):
            yield environment
    finally:
        try:
            await _call(environment, "close", _CLOSE_S)
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException as error:  # users' code
            logger.warning("environment %s: close: %s", name, describe(error))


async def _call(environment: Environment, method: str, limit_s: float) -> None:
    bound_method = getattr(environment, method, None)
    if bound_method is not None:
        _, error = await asyncio.wait_for(catch(bound_method), limit_s)
        if error is not None:
            raise error

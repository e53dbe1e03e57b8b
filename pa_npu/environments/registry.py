"""Which environment a configuration names, made and checked before anything starts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.config.user_code import check_name, describe, import_function
from pa_npu.control.tasks import held
from pa_npu.environments.protocol import Environment, EnvironmentContext, EnvironmentFailed
from pa_npu.environments.single_turn import SingleTurn
from pa_npu.environments.time_limit import LEAST_S, interrupting
from pa_npu.environments.tools import ToolEnvironment
from pa_npu.errors import ConfigError, PaNpuError

logger = logging.getLogger(__name__)

_CLOSE_S = 10.0  # what is left after that ends with the process that opened it

ENVIRONMENTS: dict[str, Callable[[EnvironmentContext], Environment]] = {
    "single_turn": SingleTurn,
    "tools": ToolEnvironment,
}
# Of a room above this one, hence named and not imported.
_ELSEWHERE = {
    "agents": "pa_npu.agents.environment:AgentEnvironment",
    "remote": "pa_npu.agents.remote:RemoteEnvironment",
}


def make_environment(config: Config, tokenizer: Any) -> Environment:
    """The environment of environment.name: a registered one, or a class that module:Class names.

    Raises ConfigError.
    """
    chosen = config.environment
    context = EnvironmentContext(
        tokenizer,
        config.rollout.max_response_tokens,
        chosen.max_turns,
        config.deadlines.environment_timeout_s,
        chosen.options,
        config,
    )
    check_name("environment.name", chosen.name, [*ENVIRONMENTS, *_ELSEWHERE], "module:Class")
    try:
        known = ENVIRONMENTS.get(chosen.name)
        make = known or import_function(
            "environment.name", _ELSEWHERE.get(chosen.name, chosen.name)
        )
        environment = make(context)
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a user's class may raise whatever it likes
        raise ConfigError(
            f"environment.name: {chosen.name} cannot be made ({describe(error)}); correct its "
            "__init__, which gets an EnvironmentContext"
        ) from error
    if not callable(getattr(environment, "rollout", None)):
        raise ConfigError(
            f"environment.name: {chosen.name} has no method rollout(prompt, num_samples, "
            "generate); add it"
        )
    return environment


@asynccontextmanager
async def opened(environment: Environment, limit_s: float) -> AsyncIterator[Environment]:
    """The environment between its `open` and its `close`, where it has them; limit_s: for opening.

    Raises EnvironmentFailed where it cannot be opened. A failure of `close` is logged: the run is
    over by then.
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
    found = getattr(environment, method, None)
    if found is not None:
        _, failed = await asyncio.wait_for(held(found), limit_s)
        if failed is not None:
            raise failed

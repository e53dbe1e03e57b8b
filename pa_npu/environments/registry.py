"""Which environment a configuration names, made and checked before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.config.user_code import describe, find_function
from pa_npu.environments.clients import FromClients
from pa_npu.environments.protocol import Environment, EnvironmentContext
from pa_npu.environments.single_turn import SingleTurn
from pa_npu.environments.tools import ToolEnvironment
from pa_npu.errors import ConfigError

ENVIRONMENTS: dict[str, Callable[[EnvironmentContext], Environment]] = {
    "single_turn": SingleTurn,
    "tools": ToolEnvironment,
    "clients": FromClients,
}


def make_environment(config: Config, tokenizer: Any) -> Environment:
    """The environment of environment.name: a registered one, or a class that module:Class names. Raises ConfigError."""
    chosen = config.environment
    context = EnvironmentContext(
        tokenizer, config.rollout.max_response_tokens, chosen.max_turns, chosen.timeout_s, chosen.options
    )
    try:
        environment = find_environment(chosen.name)(context)
    except ConfigError:
        raise
    except Exception as error:  # a user's class may raise whatever it likes
        raise ConfigError(
            f"environment.name: {chosen.name} cannot be made ({describe(error)}); correct its __init__, "
            f"which gets an EnvironmentContext"
        ) from error
    if not callable(getattr(environment, "rollout", None)):
        raise ConfigError(
            f"environment.name: {chosen.name} has no method rollout(prompt, num_samples, generate); add it"
        )
    return environment


def find_environment(name: str) -> Callable[[EnvironmentContext], Environment]:
    """The class of a name. Raises ConfigError where there is none."""
    found: Callable[[EnvironmentContext], Environment] = find_function(
        "environment.name", name, ENVIRONMENTS, "module:Class"
    )
    return found

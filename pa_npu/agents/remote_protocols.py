"""Chooses how a remote environment is spoken to, by environment.options.protocol."""

from __future__ import annotations

from dataclasses import replace

from pa_npu.agents.openenv import OpenEnvEnvironment
from pa_npu.agents.remote import RemoteEnvironment
from pa_npu.config.words import choose_among
from pa_npu.environments.protocol import Environment, EnvironmentContext
from pa_npu.errors import ConfigError

PROTOCOLS = {"gymnasium": RemoteEnvironment, "openenv": OpenEnvEnvironment}


def make_remote(context: EnvironmentContext) -> Environment:
    """Makes the environment of environment.name=remote. Raises ConfigError."""
    options = dict(context.options)
    protocol = options.pop("protocol", "gymnasium")
    if not isinstance(protocol, str) or protocol not in PROTOCOLS:
        raise ConfigError(
            f"environment.options: protocol {protocol!r:.80} is not {' or '.join(PROTOCOLS)}; "
            f"{choose_among(str(protocol), PROTOCOLS)}"
        )
    return PROTOCOLS[protocol](replace(context, options=options))

"""Answers launcher and coordinator about transformers engines: the row of the registry."""

from __future__ import annotations

import sys
from functools import partial

from pa_npu.config.schema import Config
from pa_npu.engines.client import EngineClient, served_model
from pa_npu.engines.interpreter import distributions
from pa_npu.engines.registry import EngineKind
from pa_npu.engines.transformers.command import check_keys, server_command
from pa_npu.errors import ConfigError, UserError

_NEEDED = ("torch", "transformers", "aiohttp", "msgspec", "safetensors")


def check(config: Config) -> None:
    """The engines' interpreter has what the server imports."""
    _, missing = describe(config)
    if missing is not None:
        raise ConfigError(missing)


def describe(config: Config | None) -> tuple[str, str | None]:
    """Versions in the engines' interpreter, and what is missing."""
    python = config.rollout.python if config else None
    interpreter = python or sys.executable
    try:
        found = distributions(python, _NEEDED)
    except UserError as error:
        return f"none in {interpreter}", str(error)
    names = ", ".join(f"{name} {version}" for name, version in found.items())
    if missing := [name for name in _NEEDED if name not in found]:
        return names, (
            f"rollout.python: {interpreter} has no {', '.join(missing)}, which rollout.backend=transformers needs; install it"
        )
    return f"{names} ({interpreter})", None


TRANSFORMERS = EngineKind(
    server_command,
    partial(EngineClient, kind="transformers"),
    check_keys,
    check,
    describe,
    served_model,
    merges_adapters=True,
    records_routes=True,
)

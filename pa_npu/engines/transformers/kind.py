"""Answers launcher and coordinator about transformers engines: the row of the registry."""

from __future__ import annotations

import sys

from pa_npu.config.schema import Config
from pa_npu.engines.http_client import directory_in, get_json
from pa_npu.engines.interpreter import distributions
from pa_npu.engines.registry import EngineKind
from pa_npu.engines.transformers.client import TransformersEngine
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


def served_model(url: str, key: str) -> str:
    """The model directory that a running engine was started with."""
    return directory_in(get_json(f"{url}/info", key), "model")


TRANSFORMERS = EngineKind(
    server_command,
    TransformersEngine,
    check_keys,
    check,
    describe,
    served_model,
    merges_adapters=True,
    records_routes=True,
)

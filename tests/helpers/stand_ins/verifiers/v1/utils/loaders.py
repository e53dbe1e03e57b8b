"""Makes environments of their configurations."""

from __future__ import annotations

from typing import Any

from verifiers.v1 import Env


def resolve_env_config(config: dict[str, Any]) -> dict[str, Any]:
    return config


def load_environment(config: dict[str, Any]) -> Env:
    return Env(config)

"""The agents of an environment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def agent_config_fields(config: dict[str, Any]) -> dict[str, Any]:
    roles = config.get("roles", {"agent": {}})
    return {name: SimpleNamespace(client=role.get("client")) for name, role in roles.items()}

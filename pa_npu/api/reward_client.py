"""A reward worker's end of the caller's reward functions: `pa_npu.api.reward_client:NAME` asks the process that made the run."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from pa_npu.errors import UserError
from pa_npu.rewards.types import RewardInput

MODULE = "pa_npu.api.reward_client"
SOCKET_VARIABLE = "PA_NPU_REWARDS"

_connections: dict[str, Any] = {}


def __getattr__(name: str) -> Callable[[RewardInput], list[float]]:
    """The function of that name of the caller; that it exists shows when it is called, before the run starts."""
    if name.startswith("__"):
        raise AttributeError(name)

    def call(group: RewardInput) -> list[float]:
        return _ask(name, group)

    call.__name__ = name
    return call


def _ask(name: str, group: RewardInput) -> list[float]:
    path = os.environ.get(SOCKET_VARIABLE)
    if not path:
        raise UserError(
            f"reward.functions: {name} lives in the process that made the run with pa_npu.Run; start it from there"
        )
    if path not in _connections:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(path)  # the reward worker's own deadline bounds connecting and waiting
        _connections[path] = connection.makefile("rwb")
    stream = _connections[path]
    fields = {**asdict(group), "row": dict(group.row), "responses": list(group.responses)}
    fields["response_tokens"] = list(group.response_tokens)
    stream.write(json.dumps({"function": name, "group": fields}, default=str).encode() + b"\n")
    stream.flush()
    line = stream.readline()
    if not line:
        del _connections[path]
        raise RuntimeError("the process that made the run does not answer any more")
    reply = json.loads(line)
    if "error" in reply:
        raise RuntimeError(reply["error"])
    rewards: list[float] = reply["rewards"]
    return rewards

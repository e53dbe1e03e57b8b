"""The caller's reward functions, called for a run's reward workers: groups come as JSON lines over a socket of this user alone.

    caller's process: RewardServer ──socket──< reward worker: pa_npu.api.reward_client, which the run knows as a reward function

A function runs here in a thread per worker, an `async def` in a loop of its own. What it raises is the worker's error, and counts
as any failing reward.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import shutil
import socketserver
import tempfile
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from pa_npu.api.reward_client import MODULE, SOCKET_VARIABLE
from pa_npu.errors import UserError
from pa_npu.rewards.types import RewardInput

Reward = Callable[[RewardInput], Sequence[float] | Coroutine[Any, Any, Sequence[float]]]


class RewardServer:
    """Owns a socket in a directory of its own, mode 0700, from start() to close()."""

    def __init__(self, functions: Sequence[Reward]) -> None:
        self._functions: dict[str, Reward] = {}
        for number, function in enumerate(functions):
            if not callable(function):
                raise UserError(
                    f"reward: {function!r} is no function; give one that takes a group and returns as many numbers"
                )
            name = getattr(function, "__name__", "")
            if not name.isidentifier() or name in self._functions:
                name = f"reward_{number}"
            self._functions[name] = function
        self._directory: Path | None = None
        self._server: socketserver.ThreadingUnixStreamServer | None = None

    @property
    def names(self) -> list[str]:
        """Returns their names in reward.functions."""
        return [f"{MODULE}:{name}" for name in self._functions]

    def start(self) -> dict[str, str]:
        """Serve; returns the environment variable by which workers find it."""
        functions = self._functions

        class Connection(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                for line in self.rfile:
                    self.wfile.write(answer(functions, line))

        self._directory = Path(tempfile.mkdtemp(prefix="pa_npu-"))  # mode 0700
        self._server = socketserver.ThreadingUnixStreamServer(str(self._directory / "rewards"), Connection)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="rewards", daemon=True).start()
        return {SOCKET_VARIABLE: str(self._directory / "rewards")}

    def close(self) -> None:
        """Idempotent."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


def answer(functions: dict[str, Reward], line: bytes) -> bytes:
    """A worker's line, {"function", "group"}, to {"rewards"} or {"error"}."""
    try:
        request: dict[str, Any] = json.loads(line)
        values: Any = functions[request["function"]](RewardInput(**request["group"]))
        if inspect.iscoroutine(values):
            values = asyncio.run(values)
        reply: dict[str, Any] = {"rewards": [float(value) for value in values]}
    except Exception as error:  # the user's code may raise anything, and its worker has to hear of it
        reply = {"error": f"{type(error).__name__}: {error}"}
    return json.dumps(reply).encode() + b"\n"

"""Tools as the tool environment calls them: the calculator in place, a user's function in a process that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pa_npu
from pa_npu.environments.calculator import calculate
from pa_npu.environments.protocol import EnvironmentContext
from pa_npu.errors import ConfigError, PaNpuError

Tool = Callable[[str], Awaitable[str]]
"""From a call's text to the answer's; a failure is an answer that begins with "error: "."""

_STARTUP_TIMEOUT_S = 60.0  # importing a user's module on a busy machine
_LONGEST_ANSWER_BYTES = 64 * 1024
_KILL_GRACE_S = 5.0

logger = logging.getLogger(__name__)


def make_tool(context: EnvironmentContext) -> Tool:
    """The tool of environment.options. Raises ConfigError where there is none of this name."""
    name = context.options.get("tool", "calculator")
    if name == "calculator":
        return _calculator
    if not isinstance(name, str) or ":" not in name:
        raise ConfigError(
            f"environment.options: tool {name!r} is neither calculator nor module:function; use one of these"
        )
    return ToolProcess(name, context.timeout_s)


async def _calculator(call: str) -> str:
    return calculate(call)


class ToolProcess:
    """A user's function in a process of its own; calls one after another, each with a time limit, after which it is killed."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def __call__(self, call: str) -> str:
        async with self._turn:
            process = self._process or await self._start()
            try:
                return await asyncio.wait_for(self._ask(process, call), self._timeout_s)
            except asyncio.TimeoutError:
                reason = f"no answer within {self._timeout_s:g} s"
            except (OSError, ValueError, asyncio.LimitOverrunError) as error:
                reason = f"the tool ended or wrote what cannot be read ({type(error).__name__})"
            await self._end()
            logger.warning("environment.options: tool %s: %s; it is started anew", self._name, reason)
            return f"error: {reason}"

    async def _start(self) -> asyncio.subprocess.Process:
        root = str(Path(pa_npu.__file__).parents[1])
        search_path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), root)))
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pa_npu.environments.tool_worker", self._name, "--parent", str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LONGEST_ANSWER_BYTES,
            env={**os.environ, "PYTHONPATH": search_path},
            start_new_session=True,  # so that what the tool starts can be killed with it
        )
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), _STARTUP_TIMEOUT_S)
            reply = json.loads(line) if line else {"unusable": "its process ended while importing it, see the log"}
        except (asyncio.TimeoutError, ValueError) as error:
            reply = {"unusable": f"it is not there within {_STARTUP_TIMEOUT_S:g} s ({type(error).__name__})"}
        if "unusable" in reply:
            await self._end()
            raise PaNpuError(f"environment.options: tool {self._name}: {reply['unusable']}; correct the function")
        return self._process

    async def _ask(self, process: asyncio.subprocess.Process, call: str) -> str:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps({"call": call}).encode() + b"\n")
        await process.stdin.drain()
        return str(json.loads(await process.stdout.readline())["answer"])

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), _KILL_GRACE_S)

"""Tools as the tool environment calls them: the calculator in place, a user's function in a process that can be killed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from pa_npu.control.worker_process import WorkerProcess, json_line
from pa_npu.environments.calculator import calculate
from pa_npu.environments.protocol import EnvironmentContext
from pa_npu.errors import ConfigError, DeadlineExceeded

Tool = Callable[[str], Awaitable[str]]
"""From a call's text to the answer's; a failure is an answer that begins with "error: "."""

_MODULE = "pa_npu.environments.tool_worker"
_STARTUP_TIMEOUT_S = 60.0  # importing a user's module on a busy machine

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
        self._worker: WorkerProcess | None = None

    async def __call__(self, call: str) -> str:
        return (await self._answer(call))[0]

    async def trial(self, calls: Sequence[str]) -> None:
        """Calls the tool before a run. Raises ConfigError where it answers none of the calls, or does not answer in time."""
        try:
            answers = [await self._answer(call) for call in calls]
        finally:
            worker, self._worker = self._worker, None
            if worker is not None:
                await worker.reap()
        if all(failed for _, failed in answers):
            tried = ", ".join(repr(call[:40]) for call in calls)
            raise ConfigError(
                f"environment.options: tool {self._name} fails for each of {tried} ({answers[-1][0].removeprefix('error: ')}); "
                f"correct the function, or name a call that it answers in environment.options.example"
            )

    async def _answer(self, call: str) -> tuple[str, bool]:
        """The answer, and whether it is the tool's failure."""
        async with self._turn:
            worker = self._worker or await self._start()
            worker.write(json_line({"call": call}))
            try:
                reply = await asyncio.wait_for(worker.read(), self._timeout_s)
                if reply is not None:
                    return str(reply["answer"]), "failure" in reply
                reason = "the tool ended, or wrote what cannot be read"
            except asyncio.TimeoutError:
                reason = f"no answer within {self._timeout_s:g} s"
            await self.close()
            logger.warning("environment.options: tool %s: %s; it is started anew", self._name, reason)
            return f"error: {reason}", True

    async def _start(self) -> WorkerProcess:
        try:
            worker = await WorkerProcess.start([_MODULE, self._name], None, _STARTUP_TIMEOUT_S)
        except DeadlineExceeded as late:
            raise ConfigError(f"environment.options: tool {self._name}: {late}; correct the function") from None
        problem = worker.ready.get("unusable") if worker.ready else "its process ended while importing it, see the log"
        if problem:
            await worker.reap()
            raise ConfigError(f"environment.options: tool {self._name}: {problem}; correct the function")
        self._worker = worker
        return worker

    async def close(self) -> None:
        """End the process; a later call starts another."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.reap()

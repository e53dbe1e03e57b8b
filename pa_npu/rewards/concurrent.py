"""The parent's side of reward functions that wait: groups go to their process at once, and come back in any order.

A process that dies, or whose event loop a user's function blocks, is replaced, and what it had is asked again; a group with which
it dies a third time has no verdict.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from pa_npu.control.worker_process import WorkerProcess
from pa_npu.errors import PaNpuError
from pa_npu.rewards.functions import FunctionSpec
from pa_npu.rewards.process import CONCURRENT_WORKER, first_of_concurrent, start_again, start_worker
from pa_npu.rewards.types import RewardInput, group_line

ATTEMPTS = 3  # processes that may die of one group
_SILENCE_S = 30.0  # a loop that turns says so every second; and a machine may be busy

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Waiting:
    line: bytes
    future: asyncio.Future[dict[str, Any]]
    deaths: int = 0


class ConcurrentRewards:
    """`start`, then `score` from any number of tasks; owner calls `close`. labels: of the functions that it runs."""

    def __init__(self, specs: tuple[FunctionSpec, ...], timeout_s: float) -> None:
        self._first = first_of_concurrent(specs, timeout_s, trial=False)
        self._silence_s = timeout_s + _SILENCE_S
        self._waiting: dict[int, _Waiting] = {}
        self._process: WorkerProcess | None = None
        self._server: asyncio.Task[None] | None = None
        self._broken: PaNpuError | None = None
        self._last_identity = 0

    async def start(self) -> None:
        self._process = await start_worker(self._first, CONCURRENT_WORKER)
        self._server = asyncio.create_task(self._serve(), name="concurrent rewards")

    async def close(self) -> None:
        self._give_up(PaNpuError("the reward pool is closed; score groups before leaving it"))
        if self._server is not None:
            self._server.cancel()
            await asyncio.gather(self._server, return_exceptions=True)
        process, self._process = self._process, None
        if process is not None:
            await process.reap()

    async def score(self, group: RewardInput) -> dict[str, Any]:
        """{"rewards", "errors", "fatal"} as the process gives them; {"failure"} where it never did."""
        if self._broken is not None:
            raise self._broken
        self._last_identity += 1
        identity = self._last_identity
        waiting = _Waiting(group_line(identity, group), asyncio.get_running_loop().create_future())
        self._waiting[identity] = waiting
        if self._process is not None:
            self._process.write(waiting.line)
        try:
            return await waiting.future
        finally:
            self._waiting.pop(identity, None)

    async def _serve(self) -> None:
        try:
            while self._broken is None:
                assert self._process is not None
                reason = await self._read(self._process)
                dead, self._process = self._process, None
                cause = reason or await dead.reap()
                await dead.reap()
                self._bury(cause)
                self._process = await start_again("reward functions that wait", self._first, CONCURRENT_WORKER)
                for waiting in list(self._waiting.values()):
                    self._process.write(waiting.line)
        except Exception as error:
            self._give_up(PaNpuError(f"the process of reward functions that wait cannot go on: {error}"))
            raise

    async def _read(self, process: WorkerProcess) -> str | None:
        """Until there is nothing more: why the process must go, None where it went by itself."""
        while True:
            try:
                reply = await asyncio.wait_for(process.read(), self._silence_s)
            except asyncio.TimeoutError:
                return f"its event loop stood still for {self._silence_s:g} s, blocked by a function"
            if reply is None:
                return None
            waiting = self._waiting.get(reply.get("id", 0))
            if waiting is not None and not waiting.future.done():
                waiting.future.set_result(reply)

    def _bury(self, cause: str) -> None:
        log.warning("the process of reward functions that wait has ended (%s); it is started anew", cause)
        for waiting in self._waiting.values():
            waiting.deaths += 1
            if waiting.deaths >= ATTEMPTS and not waiting.future.done():
                waiting.future.set_result({"failure": f"its process died {ATTEMPTS} times (last: {cause})"})

    def _give_up(self, error: PaNpuError) -> None:
        self._broken = self._broken or error
        for waiting in self._waiting.values():
            if not waiting.future.done():
                waiting.future.set_exception(error)

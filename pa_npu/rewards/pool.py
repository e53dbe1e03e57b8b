"""RewardPool: reward functions in worker processes, from asyncio, with a time limit per group.

    score(group) ──> waiting ──> worker (head, then up to PIPELINE_DEPTH - 1 behind it) ──> RewardResult
                        ▲                │ time limit: the head gets zeros and a log line
                        └────────────────┘ worker died: the head is scored again, and gets zeros when it dies of it a third time;
                                           in both cases the groups behind it wait again, and the worker is started anew

So a worker that somebody kills changes no reward (I6), and a function that kills its worker every time costs its group.
A group's time limit runs while it is the head, not while it waits. Groups behind a slow head do not stall: a worker
without work takes them over (a reward is a function of the group, so whoever answers first is right).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np

from pa_npu.config.sections import RewardConfig
from pa_npu.errors import PaNpuError
from pa_npu.rewards.failures import FailingShare
from pa_npu.rewards.process import WorkerProcess, check_reward_functions, group_line, reward_specs
from pa_npu.rewards.types import SHAPING, RewardInput, RewardResult

__all__ = ["RewardInput", "RewardPool", "RewardResult", "check_reward_functions"]

PIPELINE_DEPTH = 4  # groups in a worker at once, so that it never waits for the event loop
ATTEMPTS = 3  # workers that may die of one group
FAILED_STARTS = 3  # in a row, then the pool gives up

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Job:
    """A group on its way. future: resolves to the worker's reply. workers: indices of those that hold it now.

    deaths: of workers while it was their head.
    """

    line: bytes
    identity: int
    future: asyncio.Future[dict[str, Any]]
    workers: set[int] = field(default_factory=set)
    deaths: int = 0


class RewardPool:
    """`async with RewardPool(config.reward) as pool: result = await pool.score(group)`.

    Entering starts the workers and raises DataError where a function cannot be used. A function that raises, returns
    nonsense, crashes every worker or exceeds reward.timeout_s costs the group that reward, logged. `score` raises
    DataError when that happens too often (reward.max_failing_share), and PaNpuError when no worker can be started any more
    or the pool is closed.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.specs = reward_specs(config.functions)
        self.timeout_s = config.timeout_s
        self._failing = FailingShare([spec.label for spec in self.specs], config.max_failing_share)
        self._weights = np.array([function.weight for function in config.functions], np.float32)
        # The verdict on a response is that of the first function that judges its content.
        self._judge = next((number for number, spec in enumerate(self.specs) if spec.name not in SHAPING), 0)
        self._waiting: deque[_Job] = deque()
        self._workers = [_Worker(index, self) for index in range(config.workers)]
        self._broken: PaNpuError | None = None
        self._last_identity = 0

    async def __aenter__(self) -> RewardPool:
        try:
            # all of them, so that none still starts after the others were ended for one that failed
            for error in await asyncio.gather(*(worker.start() for worker in self._workers), return_exceptions=True):
                if error is not None:
                    raise error
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all workers and fails what still waits. Idempotent."""
        self.give_up(PaNpuError("the reward pool is closed; score groups before leaving it"))
        await asyncio.gather(*(worker.close() for worker in self._workers))

    async def score(self, group: RewardInput) -> RewardResult:
        """Rewards of the group's G responses, in order."""
        if self._broken is not None:
            raise self._broken
        job = self._job(group)
        self._waiting.append(job)
        self.dispatch()
        reply = await job.future
        errors: dict[str, str] = reply["errors"]
        if not reply["rewards"]:  # the worker did not survive it, whichever function that was
            errors = {spec.label: reply["failure"] for spec in self.specs}
        reasons = (
            [reply["failure"]] if not reply["rewards"] else [f"{label}: {error}" for label, error in errors.items()]
        )
        for reason in reasons:
            log.warning("rewards: zero for the responses to %.80r: %s", group.prompt, reason)
        self._failing.note(errors)
        rewards = np.zeros((len(self.specs), len(group.responses)), np.float32)
        if reply["rewards"]:
            rewards[:] = reply["rewards"]
        return RewardResult(
            total=self._weights @ rewards,
            functions={spec.label: values for spec, values in zip(self.specs, rewards, strict=True)},
            correct=rewards[self._judge] > 0,
            errors=tuple(reasons),
        )

    def _job(self, group: RewardInput) -> _Job:
        self._last_identity += 1
        line = group_line(self._last_identity, group)
        return _Job(line, self._last_identity, asyncio.get_running_loop().create_future())

    def dispatch(self) -> None:
        """Hands waiting groups to the least occupied workers, then groups that wait behind others to workers without work."""
        while self._waiting:
            if self._waiting[0].future.done():  # its caller was cancelled, or another worker answered
                self._waiting.popleft()
                continue
            worker = min((w for w in self._workers if w.has_room), key=lambda w: len(w.jobs), default=None)
            if worker is None:
                return
            worker.send(self._waiting.popleft())
        for idle in self._workers:
            if not idle.has_room or idle.jobs:
                continue
            stuck = (job for worker in self._workers for job in list(worker.jobs)[1:])
            job = next((job for job in stuck if len(job.workers) == 1 and not job.future.done()), None)
            if job is None:
                return
            idle.send(job)

    def put_back(self, jobs: list[_Job]) -> None:
        """Groups of a dead worker that no other holds wait again, before all others."""
        self._waiting.extendleft(job for job in reversed(jobs) if not job.workers and not job.future.done())
        self.dispatch()

    def give_up(self, error: PaNpuError) -> None:
        """Everything that waits, and every later `score`, fails with `error`."""
        self._broken = self._broken or error
        for job in (*self._waiting, *(job for worker in self._workers for job in worker.jobs)):
            if not job.future.done():
                job.future.set_exception(error)
        self._waiting.clear()


class _Worker:
    """A worker's place in the pool: one process at a time, started anew whenever it dies. jobs: the head first."""

    def __init__(self, index: int, pool: RewardPool) -> None:
        self.jobs: deque[_Job] = deque()
        self._index = index
        self._pool = pool
        self._process: WorkerProcess | None = None
        self._server: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._overdue: _Job | None = None
        self._closing = False

    @property
    def has_room(self) -> bool:
        return self._process is not None and len(self.jobs) < PIPELINE_DEPTH

    async def start(self) -> None:
        self._process = await WorkerProcess.start(self._pool.specs)
        self._server = asyncio.create_task(self._serve(), name=f"reward worker {self._index}")

    async def close(self) -> None:
        self._set_clock(None)
        self._closing = True
        if self._server is not None:
            self._server.cancel()
            await asyncio.gather(self._server, return_exceptions=True)
        process, self._process = self._process, None
        if process is not None:
            await process.reap()

    def send(self, job: _Job) -> None:
        assert self._process is not None
        self._process.write(job.line)
        job.workers.add(self._index)
        self.jobs.append(job)
        if len(self.jobs) == 1:
            self._set_clock(job)

    async def _serve(self) -> None:
        """Reads replies for as long as the pool lives; replaces the process when it dies."""
        try:
            # not for ever: wait_for of Python 3.10 and 3.11 can swallow the cancellation when a process has just ended
            while not self._closing:
                assert self._process is not None
                await self._read_replies(self._process)
                dead, self._process = self._process, None
                self._bury(await dead.reap())
                self._process = await self._restart()
                self._pool.dispatch()
        except Exception as error:
            self._pool.give_up(PaNpuError(f"reward worker {self._index} cannot go on: {error}"))
            raise

    async def _read_replies(self, process: WorkerProcess) -> None:
        """Until there are no more. Replies come in the order of the jobs."""
        while (reply := await process.read()) is not None:
            job = self.jobs.popleft()
            if reply["id"] != job.identity:
                raise PaNpuError(f"it answered group {reply['id']} instead of {job.identity}")
            self._resolve(job, reply)
            self._set_clock(self.jobs[0] if self.jobs else None)
            self._pool.dispatch()

    def _bury(self, cause: str) -> None:
        """The process died, of its head perhaps, unless that just became the head when another ran out of time."""
        self._set_clock(None)
        overdue, self._overdue = self._overdue, None
        jobs = list(self.jobs)
        self.jobs.clear()
        if not jobs and overdue is None:
            log.warning("reward worker %d died without work (%s); it is started anew", self._index, cause)
        elif jobs and overdue is None:
            jobs[0].deaths += 1
            if jobs[0].deaths < ATTEMPTS:
                log.warning(
                    "reward worker %d died (%s) while scoring a group, which is scored again", self._index, cause
                )
            else:
                reason = f"its reward worker died {ATTEMPTS} times (last: {cause})"
                self._resolve(jobs.pop(0), {"rewards": [], "errors": {}, "failure": reason})
        elif jobs and jobs[0] is overdue:
            reason = f"not done within reward.timeout_s = {self._pool.timeout_s:g} s, so its worker was killed"
            self._resolve(jobs.pop(0), {"rewards": [], "errors": {}, "failure": reason})
        for job in jobs:
            job.workers.discard(self._index)
        self._pool.put_back(jobs)

    async def _restart(self) -> WorkerProcess:
        for attempt in range(1, FAILED_STARTS + 1):
            try:
                return await WorkerProcess.start(self._pool.specs)
            except (PaNpuError, OSError) as error:
                log.warning("reward worker %d: start %d of %d failed: %s", self._index, attempt, FAILED_STARTS, error)
                last = error
        raise last

    def _resolve(self, job: _Job, reply: dict[str, Any]) -> None:
        job.workers.discard(self._index)
        if not job.future.done():
            job.future.set_result(reply)

    def _set_clock(self, head: _Job | None) -> None:
        """Starts the time limit of a new head; stops it without one."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if head is not None:
            self._timer = asyncio.get_running_loop().call_later(self._pool.timeout_s, self._on_time_limit, head)

    def _on_time_limit(self, head: _Job) -> None:
        self._overdue = head
        if self._process is not None:
            self._process.kill()

"""Workers: groups handed to processes of reward functions (worker.py), each answered once.

    score(group) ──> waiting ──> worker ──> its reply
                        ▲           │ says nothing for too long: it is killed
                        └───────────┘ died: what it was scoring is scored again, and fails when a worker dies of it a third time;
                                      what was behind that waits again, and the worker is started anew

A worker of functions that compute has a head, which its time limit is for, and groups behind it. Groups behind a slow head do not
stall: a worker without work takes them over (a reward is a function of the group, so whoever answers first is right). The worker
of functions that wait has all groups at once, and says every second that its event loop turns.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pa_npu.control.worker_process import WorkerProcess
from pa_npu.errors import PaNpuError
from pa_npu.rewards.functions import FunctionSpec
from pa_npu.rewards.process import first_message, start_worker
from pa_npu.rewards.types import RewardInput, group_line

PIPELINE_DEPTH = 4  # groups in a worker at once, so that it never waits for the event loop
ATTEMPTS = 3  # workers that may die of one group
FAILED_STARTS = 3  # in a row, then the pool gives up
SILENCE_S = 30.0  # beyond the time of a user's function that waits; a machine may be busy

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Job:
    """A group on its way. future: resolves to the worker's reply. workers: indices of those that hold it now.

    deaths: of workers while they scored it.
    """

    line: bytes
    identity: int
    future: asyncio.Future[dict[str, Any]]
    workers: set[int] = field(default_factory=set)
    deaths: int = 0


class Workers:
    """Processes of the same functions. Owner starts and closes them.

    others: labels of functions that they leave to the other kind, known once they have started.
    """

    def __init__(self, specs: Sequence[FunctionSpec], timeout_s: float, *, waits: bool, count: int = 1) -> None:
        self.first = first_message(specs, timeout_s, waits=waits)
        self.waits = waits
        self.timeout_s = timeout_s
        self.others: set[str] = set()
        self._waiting: deque[_Job] = deque()
        self._workers = [_Worker(index, self) for index in range(count)]
        self._broken: PaNpuError | None = None
        self._last_identity = 0

    async def start(self) -> None:
        # all of them, so that none still starts after the others were ended for one that failed
        for error in await asyncio.gather(*(worker.start() for worker in self._workers), return_exceptions=True):
            if error is not None:
                raise error

    async def close(self) -> None:
        """Ends all workers and fails what still waits. Idempotent."""
        self.give_up(PaNpuError("the reward pool is closed; score groups before leaving it"))
        await asyncio.gather(*(worker.close() for worker in self._workers))

    async def score(self, group: RewardInput) -> dict[str, Any]:
        """{"rewards", "errors", "fatal"} as a worker gives them; {"failure"} where none ever did."""
        if self._broken is not None:
            raise self._broken
        self._last_identity += 1
        line = group_line(self._last_identity, group)
        job = _Job(line, self._last_identity, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self.dispatch()
        return await job.future

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
            stuck = (job for worker in self._workers for job in list(worker.jobs.values())[1:])
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
        for job in (*self._waiting, *(job for worker in self._workers for job in worker.jobs.values())):
            if not job.future.done():
                job.future.set_exception(error)
        self._waiting.clear()


class _Worker:
    """A worker's place: one process at a time, started anew whenever it dies. jobs: by identity, the head first."""

    def __init__(self, index: int, workers: Workers) -> None:
        self.jobs: dict[int, _Job] = {}
        self._index = index
        self._all = workers
        self._name = "the worker of reward functions that wait" if workers.waits else f"reward worker {index}"
        self._process: WorkerProcess | None = None
        self._server: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._overdue: list[_Job] = []
        self._closing = False

    @property
    def has_room(self) -> bool:
        return self._process is not None and (self._all.waits or len(self.jobs) < PIPELINE_DEPTH)

    @property
    def _scored(self) -> list[_Job]:
        """The groups that the process works at."""
        return list(self.jobs.values())[: None if self._all.waits else 1]

    async def start(self) -> None:
        self._process = await start_worker(self._all.first)
        self._all.others.update(self._process.ready["others"])
        self._server = asyncio.create_task(self._serve(), name=self._name)

    async def close(self) -> None:
        self._stop_clock()
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
        self.jobs[job.identity] = job
        if len(self.jobs) == 1:
            self._restart_clock()

    async def _serve(self) -> None:
        """Reads replies for as long as the pool lives; replaces the process when it dies."""
        try:
            # not for ever: wait_for of Python 3.10 and 3.11 can swallow the cancellation when a process has just ended
            while not self._closing:
                assert self._process is not None
                await self._read_replies(self._process)
                dead, self._process = self._process, None
                self._bury(await dead.reap())
                self._process = await self._started_again()
                self._all.dispatch()
        except Exception as error:
            self._all.give_up(PaNpuError(f"{self._name} cannot go on: {error}"))
            raise

    async def _started_again(self) -> WorkerProcess:
        """A process in the place of one that died. Raises what the last of FAILED_STARTS attempts raised."""
        for attempt in range(1, FAILED_STARTS + 1):
            try:
                return await start_worker(self._all.first)
            except (PaNpuError, OSError) as error:
                log.warning("%s: start %d of %d failed: %s", self._name, attempt, FAILED_STARTS, error)
                last = error
        raise last

    async def _read_replies(self, process: WorkerProcess) -> None:
        """Until there are no more."""
        while (reply := await process.read()) is not None:
            job = self.jobs.pop(reply.get("id", 0), None)
            if job is not None:
                self._resolve(job, reply)
            self._restart_clock()
            self._all.dispatch()

    def _bury(self, cause: str) -> None:
        """The process died of what it was scoring perhaps, unless it was killed for a group that it has answered since."""
        self._stop_clock()
        overdue, self._overdue = self._overdue, []
        scored = [job for job in self._scored if not overdue or job in overdue]
        jobs = list(self.jobs.values())
        self.jobs.clear()
        limit_s = self._all.timeout_s
        if overdue and self._all.waits:
            cause = f"its event loop stood still for {limit_s + SILENCE_S:g} s, blocked by a function"
        for job in scored:
            job.deaths += 1
            if overdue and not self._all.waits:
                reason = f"not done within reward.timeout_s = {limit_s:g} s, so its worker was killed"
                self._resolve(job, {"failure": reason})
            elif job.deaths >= ATTEMPTS:
                self._resolve(job, {"failure": f"its reward worker died {ATTEMPTS} times (last: {cause})"})
        again = "; what it scored is scored again" if any(not job.future.done() for job in scored) else ""
        log.warning("%s died (%s)%s", self._name, cause, again)
        for job in jobs:
            job.workers.discard(self._index)
        self._all.put_back(jobs)

    def _resolve(self, job: _Job, reply: dict[str, Any]) -> None:
        job.workers.discard(self._index)
        if not job.future.done():
            job.future.set_result(reply)

    def _restart_clock(self) -> None:
        """Starts the time in which the process has to say something, where it has anything to score."""
        self._stop_clock()
        limit_s = self._all.timeout_s + (SILENCE_S if self._all.waits else 0.0)
        if self.jobs:
            self._timer = asyncio.get_running_loop().call_later(limit_s, self._on_time_limit)

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _on_time_limit(self) -> None:
        self._overdue = self._scored
        if self._process is not None:
            self._process.kill()

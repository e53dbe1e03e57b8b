"""RewardPool: reward functions in worker processes, from asyncio, with a time limit per group.

    score(group) ──> waiting ──> worker (head, then up to PIPELINE_DEPTH - 1 behind it) ──> RewardResult
                        ▲                │ time limit: the head gets zeros and a log line
                        └────────────────┘ worker died: the head is scored again, and gets zeros when it dies of it a third time;
                                           in both cases the groups behind it wait again, and the worker is started anew

So a worker that somebody kills changes no reward (I6), and a function that kills its worker every time costs its group.
Functions that wait (a judge, the sandbox, a user's `async def`) run beside these in one process for all groups (concurrent.py).
A group's time limit runs while it is the head, not while it waits. Groups behind a slow head do not stall: a worker
without work takes them over (a reward is a function of the group, so whoever answers first is right).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from pa_npu.config.sections import RewardConfig
from pa_npu.control.tasks import gather
from pa_npu.control.worker_process import WorkerProcess
from pa_npu.errors import DataError, PaNpuError
from pa_npu.rewards.concurrent import ConcurrentRewards
from pa_npu.rewards.functions import CONCURRENT, FunctionSpec, function_specs
from pa_npu.rewards.process import check_reward_functions, first_of_computing, start_again, start_worker
from pa_npu.rewards.types import SHAPING, RewardInput, RewardResult, group_line

__all__ = ["RewardInput", "RewardPool", "RewardResult", "check_reward_functions"]

WINDOW = 64  # groups that a function's failing share is taken over
LEAST = 8  # groups that must have been scored before it is judged
PIPELINE_DEPTH = 4  # groups in a worker at once, so that it never waits for the event loop
ATTEMPTS = 3  # workers that may die of one group
_NO_VERDICT_AT_ALL = 0.5  # of a judge's 0 to 1
_RIGHT_FROM = {"code": 1.0}  # what counts as right
_RIGHT_FROM_HALF = 0.5  # of a judge and of graded functions: 0.128 is no right answer

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
    DataError when that happens too often (FailingShare), and PaNpuError when no worker can be started any more
    or the pool is closed.
    """

    def __init__(self, config: RewardConfig, run_dir: str | Path | None = None, max_response_tokens: int = 0) -> None:
        self.specs = function_specs(config, run_dir, max_response_tokens)
        self.timeout_s = config.timeout_s
        self._neutral = config.judge.on_failure == "neutral"
        self._failing = FailingShare([spec.label for spec in self.specs])
        self._weights = np.array([function.weight for function in config.functions], np.float32)
        # The verdict on a response is that of the first function that judges its content.
        self._judge = next((number for number, spec in enumerate(self.specs) if spec.name not in SHAPING), 0)
        self._waiting: deque[_Job] = deque()
        num_workers = 0 if all(spec.name in CONCURRENT for spec in self.specs) else config.workers
        self._workers = [_Worker(index, self) for index in range(num_workers)]
        self._computed = {spec.label for spec in self.specs if spec.name not in CONCURRENT}  # by these workers
        self._concurrent: ConcurrentRewards | None = None
        self._broken: PaNpuError | None = None
        self._last_identity = 0

    async def __aenter__(self) -> RewardPool:
        try:
            # all of them, so that none still starts after the others were ended for one that failed
            for error in await asyncio.gather(*(worker.start() for worker in self._workers), return_exceptions=True):
                if error is not None:
                    raise error
            self._computed -= {label for worker in self._workers for label in worker.concurrent}
            waiting = tuple(spec for spec in self.specs if spec.label not in self._computed)
            if waiting:
                self._concurrent = ConcurrentRewards(waiting, self.timeout_s)
                await self._concurrent.start()
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
        if self._concurrent is not None:
            await self._concurrent.close()

    async def score(self, group: RewardInput) -> RewardResult:
        """Rewards of the group's G responses, in order."""
        if self._broken is not None:
            raise self._broken
        parts = [part for part in (self._compute(group), self._wait_for(group)) if part is not None]
        values: dict[str, list[float | None]] = {}
        errors: dict[str, str] = {}
        reasons: list[tuple[str, str]] = []  # (what comes of it, why)
        judging = {spec.label for spec in self.specs if spec.name in CONCURRENT}
        for labels, reply in [await parts[0]] if len(parts) == 1 else await gather(parts):
            if reply.get("fatal"):
                raise DataError(reply["fatal"])
            if "failure" in reply:  # the worker did not survive it, whichever function that was
                errors.update(dict.fromkeys(labels, reply["failure"]))
                reasons.append((_outcome(judging.issuperset(labels)), reply["failure"]))
                continue
            values.update(reply["rewards"])
            errors.update(reply["errors"])
            reasons += [(_outcome(label in judging), f"{label}: {error}") for label, error in reply["errors"].items()]
        for outcome, reason in reasons:
            log.warning("rewards: %s the responses to %.80r: %s", outcome, group.prompt, reason)
        rewards = np.zeros((len(self.specs), len(group.responses)), np.float32)
        no_verdict: dict[str, int] = {}
        for row, spec in zip(rewards, self.specs, strict=True):
            found = values.get(spec.label)
            if found is None:
                found = [None if spec.name in CONCURRENT else 0.0] * len(group.responses)
            if missing := sum(value is None for value in found):
                no_verdict[spec.label] = missing
                self._refuse_where_it_ends(spec, missing, group, errors.get(spec.label, ""))
            row[:] = neutral(found)
        self._failing.note(errors)
        return RewardResult(
            total=self._weights @ rewards,
            functions={spec.label: row for spec, row in zip(self.specs, rewards, strict=True)},
            correct=rewards[self._judge] >= _RIGHT_FROM.get(self.specs[self._judge].name, _RIGHT_FROM_HALF),
            errors=tuple(reason for _, reason in reasons),
            no_verdict=no_verdict,
        )

    def _compute(self, group: RewardInput) -> Coroutine[Any, Any, tuple[set[str], dict[str, Any]]] | None:
        """By the workers, of functions that compute."""
        if not self._computed:
            return None

        async def compute() -> tuple[set[str], dict[str, Any]]:
            job = self._job(group)
            self._waiting.append(job)
            self.dispatch()
            return self._computed, await job.future

        return compute()

    def _wait_for(self, group: RewardInput) -> Coroutine[Any, Any, tuple[set[str], dict[str, Any]]] | None:
        """By the process of functions that wait."""
        concurrent = self._concurrent
        if concurrent is None:
            return None

        async def wait() -> tuple[set[str], dict[str, Any]]:
            return {spec.label for spec in self.specs} - self._computed, await concurrent.score(group)

        return wait()

    def _refuse_where_it_ends(self, spec: FunctionSpec, missing: int, group: RewardInput, reason: str) -> None:
        if spec.name == "judge" and not self._neutral:
            raise PaNpuError(
                f"reward.judge: {reason or f'no verdict on {missing} responses'}, to {group.prompt[:80]!r}; let its server answer, "
                f"or set reward.judge.on_failure=neutral"
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


def neutral(values: Sequence[float | None]) -> list[float]:
    """The values, those that are missing replaced by the mean of the others: no signal. In the middle (0.5) where all are."""
    known = [value for value in values if value is not None]
    mean = sum(known) / len(known) if known else _NO_VERDICT_AT_ALL
    return [mean if value is None else value for value in values]


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

    @property
    def concurrent(self) -> list[str]:
        """Functions that it leaves to the process of those that wait."""
        return list(self._process.ready["concurrent"]) if self._process is not None else []

    async def start(self) -> None:
        self._process = await start_worker(first_of_computing(self._pool.specs))
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
                self._process = await start_again(f"reward worker {self._index}", first_of_computing(self._pool.specs))
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
                self._resolve(jobs.pop(0), {"failure": reason})
        elif jobs and jobs[0] is overdue:
            reason = f"not done within reward.timeout_s = {self._pool.timeout_s:g} s, so its worker was killed"
            self._resolve(jobs.pop(0), {"failure": reason})
        for job in jobs:
            job.workers.discard(self._index)
        self._pool.put_back(jobs)

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


def _outcome(judges: bool) -> str:
    """Says what follows a failure: a judge gives no verdict (reward.judge.on_failure decides), another function zero."""
    return "no verdict on" if judges else "zero for"


class FailingShare:
    """Ends a run whose reward functions fail for most of the last groups: training on their zeros teaches nothing."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._failed: dict[str, deque[bool]] = {label: deque(maxlen=WINDOW) for label in labels}

    def note(self, errors: Mapping[str, str]) -> None:
        """One scored group. errors: what went wrong, by the function's label. Raises DataError where it is too often."""
        for label, failed in self._failed.items():
            failed.append(label in errors)
            if label in errors and len(failed) >= LEAST and 2 * sum(failed) > len(failed):
                raise DataError(
                    f"reward.functions: {label} failed for {sum(failed)} of the last {len(failed)} groups, which were trained "
                    f"without it (last: {errors[label]}); correct the function"
                )

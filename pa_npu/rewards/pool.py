"""RewardPool: rewards of finished groups from reward functions in worker processes, from asyncio.

    score(group) ──> waiting ──> worker ──> its reply
                        ▲           │ a user's function takes too long: it is killed, the group has zero
                        └───────────┘ died: what it was scoring is scored again, and fails when a worker dies of it a third time;
                                      the worker is started anew

So a worker that somebody kills changes no reward (I6), and a function that kills its worker every
time costs its group.

Functions that compute run in reward.workers processes (worker.py), each of which has one group at a
time. A user's function has reward.timeout_s in which it could run (running_time.py): what it waits
for a processor does not count. `math` and `format` have processor time for each response. So a busy
machine changes no verdict, and every wait has an end.

Functions that wait (a judge, the sandbox, a user's `async def`) run beside these in one process,
which has all groups at once and says every second that its event loop turns.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pa_npu.config.sections.rollout import MAX_REWARD, RewardConfig
from pa_npu.control.running_time import TimeLimit
from pa_npu.control.tasks import gather
from pa_npu.control.worker_process import WorkerProcess
from pa_npu.errors import DataError, DeadlineExceeded, InvariantViolation, PaNpuError
from pa_npu.rewards import loading
from pa_npu.rewards.functions import (
    CONCURRENT,
    SHAPING,
    FunctionSpec,
    RewardInput,
    RewardResult,
    function_specs,
    scored_digest,
)

STARTUP_TIMEOUT_S = 120.0  # importing math-verify and a user's module on a busy machine
WINDOW = 64  # groups that a function's failing share is taken over
LEAST = 8  # groups that must have been scored before it is judged
_NO_VERDICT_AT_ALL = 0.5  # of a judge's 0 to 1
_RIGHT_FROM = {"code": 1.0}  # what counts as right
_RIGHT_FROM_HALF = 0.5  # of a judge and of graded functions: 0.128 is no right answer
ATTEMPTS = 3  # workers that may die of one group
FAILED_STARTS = 3  # in a row, then the pool gives up
# of a built-in function, which has processor time: the process was stopped, or has no processor
OWN_SILENCE_S = 600.0
SILENCE_S = 30.0  # beyond the time of a user's function that waits; a machine may be busy

log = logging.getLogger(__name__)


class RewardPool:
    """`async with RewardPool(config.reward) as pool: result = await pool.score(group)`.

    Entering starts the workers and raises DataError where a function cannot be used. A function
    that raises, returns nonsense, crashes every worker or exceeds reward.timeout_s costs the group
    that reward, logged. `score` raises DataError when that happens too often (FailingShare), and
    PaNpuError when no worker can be started any more or the pool is closed.
    """

    def __init__(
        self, config: RewardConfig, run_dir: str | Path | None = None, max_response_tokens: int = 0
    ) -> None:
        self.specs = function_specs(config, run_dir, max_response_tokens)
        self.timeout_s = config.timeout_s
        self._neutral = config.judge.on_failure == "neutral"
        self._failing = FailingShare([spec.label for spec in self.specs])
        self._weights = np.array([function.weight for function in config.functions])
        # The verdict on a response is that of the first function that judges its content.
        self._judge = next(
            (number for number, spec in enumerate(self.specs) if spec.name not in SHAPING), 0
        )
        self._count = config.workers
        self._workers: list[tuple[set[str], Workers]] = []  # with the labels of their functions

    async def __aenter__(self) -> RewardPool:
        try:
            computing = [spec for spec in self.specs if spec.name not in CONCURRENT]
            others: set[str] = {spec.label for spec in self.specs} - {
                spec.label for spec in computing
            }
            if computing:
                others |= (await self._start(computing, waits=False, count=self._count)).others
            if waiting := [spec for spec in self.specs if spec.label in others]:
                await self._start(waiting, waits=True, count=1)
        except BaseException:
            await self.close()
            raise
        return self

    async def _start(self, specs: Sequence[FunctionSpec], *, waits: bool, count: int) -> Workers:
        workers = Workers(specs, self.timeout_s, waits=waits, count=count)
        labels = {spec.label for spec in specs}
        self._workers.append((labels, workers))
        await workers.start()
        labels -= workers.others
        return workers

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all workers and fails what still waits. Idempotent."""
        for _, workers in self._workers:
            await workers.close()

    async def replies(self, group: RewardInput) -> list[tuple[set[str], dict[str, Any]]]:
        """Replies of workers of both kinds to a group, with their functions' labels.

        Raises DataError where that ends the run.
        """
        parts = [(labels, workers) for labels, workers in self._workers if labels]
        scoring = [workers.score(group) for _, workers in parts]
        # a task for each costs as much as the rest of handing over
        replies = [await scoring[0]] if len(scoring) == 1 else await gather(scoring)
        for reply in replies:
            if reply.get("fatal"):
                raise DataError(reply["fatal"])
            if "rewards" in reply and reply["scored"] != scored_digest(
                group.prompt, group.responses, reply["rewards"]
            ):
                raise InvariantViolation(
                    "I7 rewards: a reward worker answered for other texts than the "
                    f"{len(group.responses)} responses to {group.prompt[:80]!r} that it was given, "
                    "or its answer was changed on its way"
                )
        return [(labels, reply) for (labels, _), reply in zip(parts, replies, strict=True)]

    async def score(self, group: RewardInput) -> RewardResult:
        """Rewards of the group's G responses, in order."""
        values: dict[str, list[float | None]] = {}
        errors: dict[str, str] = {}
        reasons: list[tuple[str, str]] = []  # (what comes of it, why)
        judging = {spec.label for spec in self.specs if spec.name in CONCURRENT}
        for labels, reply in await self.replies(group):
            if "failure" in reply:  # the worker did not survive it, whichever function that was
                errors.update(dict.fromkeys(labels, reply["failure"]))
                reasons.append((_outcome(judging.issuperset(labels)), reply["failure"]))
                continue
            values.update(reply["rewards"])
            errors.update(reply["errors"])
            reasons += [
                (_outcome(label in judging), f"{label}: {error}")
                for label, error in reply["errors"].items()
            ]
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
                if spec.name == "judge" and not self._neutral:
                    reason = errors.get(spec.label) or f"no verdict on {missing} responses"
                    raise PaNpuError(
                        f"reward.judge: {reason}, to {group.prompt[:80]!r}; let its server answer, "
                        "or set reward.judge.on_failure=neutral"
                    )
            row[:] = neutral(found)
        total = self._weights @ rewards.astype(np.float64)
        if (largest := float(np.abs(total).max(initial=0.0))) > MAX_REWARD:
            reason = f"a weighted sum of {largest:g} is beyond {MAX_REWARD:g}"
            errors.update({spec.label: reason for spec in self.specs if spec.label not in errors})
            reasons.append((_outcome(judges=False), reason))
            log.warning("rewards: zero for the responses to %.80r: %s", group.prompt, reason)
            total = np.zeros_like(total)
        total = total.astype(np.float32)
        self._failing.note(errors)
        return RewardResult(
            total=total,
            functions={spec.label: row for spec, row in zip(self.specs, rewards, strict=True)},
            correct=rewards[self._judge]
            >= _RIGHT_FROM.get(self.specs[self._judge].name, _RIGHT_FROM_HALF),
            errors=tuple(reason for _, reason in reasons),
            no_verdict=no_verdict,
            scored=scored_digest(group.prompt, group.responses, total.tolist()),
        )


def neutral(values: Sequence[float | None]) -> list[float]:
    """The values, those that are missing replaced by the mean of the others: no signal.

    In the middle (0.5) where all are.
    """
    known = [value for value in values if value is not None]
    mean = sum(known) / len(known) if known else _NO_VERDICT_AT_ALL
    return [mean if value is None else value for value in values]


def _outcome(judges: bool) -> str:
    """Says what follows a failure: a judge gives no verdict (reward.judge.on_failure decides),
    another function zero.
    """
    return "no verdict on" if judges else "zero for"


class FailingShare:
    """Ends a run whose reward functions fail for most of the last groups: training on their zeros
    teaches nothing.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self._failed: dict[str, deque[bool]] = {label: deque(maxlen=WINDOW) for label in labels}

    def note(self, errors: Mapping[str, str]) -> None:
        """One scored group. errors: what went wrong, by the function's label.

        Raises DataError where it is too often.
        """
        for label, failed in self._failed.items():
            failed.append(label in errors)
            if label in errors and len(failed) >= LEAST and 2 * sum(failed) > len(failed):
                raise DataError(
                    f"reward.functions: {label} failed for {sum(failed)} of the last {len(failed)} "
                    f"groups, which were trained without it (last: {errors[label]}); correct the "
                    "function"
                )


def _group_line(identity: int, group: RewardInput) -> bytes:
    """A group as a worker reads it."""
    fields = {
        "prompt": group.prompt,
        "answer": group.answer,
        "responses": list(group.responses),
        "response_tokens": [int(length) for length in group.response_tokens],
        "row": dict(group.row),
    }
    return json.dumps({"id": identity, "group": fields}, default=str).encode() + b"\n"


@dataclass(eq=False)
class _Job:
    """A group on its way. future: resolves to the worker's reply. deaths: of workers while they
    scored it.
    """

    line: bytes
    identity: int
    future: asyncio.Future[dict[str, Any]]
    deaths: int = 0


class Workers:
    """Processes of the same functions. Owner starts and closes them.

    others: labels of functions that they leave to the other kind, known once they have started.
    """

    def __init__(
        self, specs: Sequence[FunctionSpec], timeout_s: float, *, waits: bool, count: int = 1
    ) -> None:
        self.first = {
            "functions": [asdict(spec) for spec in specs],
            "waits": waits,
            "timeout_s": timeout_s,
            "patience_s": loading.PATIENCE_S,
        }
        self.waits = waits
        self.timeout_s = timeout_s
        self.others: set[str] = set()
        self._waiting: deque[_Job] = deque()
        self._workers = [_Worker(index, self) for index in range(count)]
        self._broken: PaNpuError | None = None
        self._last_identity = 0

    async def start(self) -> None:
        # all of them, so that none still starts after the others were ended for one that failed
        for error in await asyncio.gather(
            *(worker.start() for worker in self._workers), return_exceptions=True
        ):
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
        line = _group_line(self._last_identity, group)
        job = _Job(line, self._last_identity, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self.dispatch()
        return await job.future

    def dispatch(self) -> None:
        """Hands waiting groups to workers that have room."""
        while self._waiting:
            if self._waiting[0].future.done():  # its caller was cancelled
                self._waiting.popleft()
                continue
            worker = next((worker for worker in self._workers if worker.has_room), None)
            if worker is None:
                return
            worker.send(self._waiting.popleft())

    def put_back(self, jobs: list[_Job]) -> None:
        """Groups of a dead worker wait again, before all others."""
        self._waiting.extendleft(job for job in reversed(jobs) if not job.future.done())
        self.dispatch()

    def give_up(self, error: PaNpuError) -> None:
        """Everything that waits, and every later `score`, fails with `error`."""
        self._broken = self._broken or error
        for job in (
            *self._waiting,
            *(job for worker in self._workers for job in worker.jobs.values()),
        ):
            if not job.future.done():
                job.future.set_exception(error)
        self._waiting.clear()


async def start_worker(first: Mapping[str, Any]) -> WorkerProcess:
    """Return a process whose functions are loaded. first: what it reads first.

    Raises DataError where a function cannot be used, DeadlineExceeded where loading takes too long.
    """
    try:
        worker = await WorkerProcess.start(["pa_npu.rewards.worker"], first, STARTUP_TIMEOUT_S)
    except DeadlineExceeded:
        raise DeadlineExceeded(
            f"a reward worker did not load its functions within {STARTUP_TIMEOUT_S:.0f} s; make "
            "them import faster"
        ) from None
    died = (
        "reward.functions: the reward worker died while loading them; correct what its output "
        "above says"
    )
    if problem := worker.ready.get("unusable") if worker.ready else died:
        await worker.reap()
        raise DataError(problem)
    return worker


class _Worker:
    """A worker's place: one process at a time, started anew whenever it dies. jobs: what it scores,
    by identity.
    """

    def __init__(self, index: int, workers: Workers) -> None:
        self.jobs: dict[int, _Job] = {}
        self._all = workers
        self._name = (
            "the worker of reward functions that wait"
            if workers.waits
            else f"reward worker {index}"
        )
        self._process: WorkerProcess | None = None
        self._server: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._limit: TimeLimit | None = None
        self._overdue: list[_Job] = []
        self._closing = False
        self._runs_users_code = False

    @property
    def has_room(self) -> bool:
        return self._process is not None and (self._all.waits or not self.jobs)

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
        self.jobs[job.identity] = job
        if len(self.jobs) == 1:
            self._runs_users_code = self._all.waits
            self._restart_clock()

    async def _serve(self) -> None:
        """Reads replies for as long as the pool lives; replaces the process when it dies."""
        try:
            # not for ever: wait_for of Python 3.10 and 3.11 can swallow the cancellation when a
            # process has just ended
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
        """A process in the place of one that died.

        Raises what the last of FAILED_STARTS attempts raised.
        """
        for attempt in range(1, FAILED_STARTS + 1):
            try:
                return await start_worker(self._all.first)
            except (PaNpuError, OSError) as error:
                log.warning(
                    "%s: start %d of %d failed: %s", self._name, attempt, FAILED_STARTS, error
                )
                last = error
        raise last

    async def _read_replies(self, process: WorkerProcess) -> None:
        """Until there are no more."""
        while (reply := await process.read()) is not None:
            if "running" in reply:
                self._runs_users_code = reply["running"] == "users"
            job = self.jobs.pop(reply.get("id", 0), None)
            if job is not None:
                self._resolve(job, reply)
            self._restart_clock()
            self._all.dispatch()

    def _bury(self, cause: str) -> None:
        """The process died of what it was scoring perhaps, unless it was killed for a group that it
        has answered since.
        """
        self._stop_clock()
        overdue, self._overdue = self._overdue, []
        jobs = list(self.jobs.values())
        self.jobs.clear()
        scored = [job for job in jobs if not overdue or job in overdue]
        limit_s = self._all.timeout_s
        if overdue and not self._runs_users_code:
            cause = f"it said nothing for {OWN_SILENCE_S:g} s"
        elif overdue and self._all.waits:
            cause = (
                f"its event loop stood still for {limit_s + SILENCE_S:g} s, blocked by a function"
            )
        for job in scored:
            job.deaths += 1
            if overdue and not self._all.waits and self._runs_users_code:
                reason = (
                    f"not done within reward.timeout_s = {limit_s:g} s, so its worker was killed"
                )
                self._resolve(job, {"failure": reason})
            elif job.deaths >= ATTEMPTS:
                self._resolve(
                    job, {"failure": f"its reward worker died {ATTEMPTS} times (last: {cause})"}
                )
        again = (
            "; what it scored is scored again"
            if any(not job.future.done() for job in scored)
            else ""
        )
        log.warning("%s died (%s)%s", self._name, cause, again)
        self._all.put_back(jobs)

    def _resolve(self, job: _Job, reply: dict[str, Any]) -> None:
        if not job.future.done():
            job.future.set_result(reply)

    def _restart_clock(self) -> None:
        """Starts the time in which the process has to say something, where it has anything to
        score.
        """
        self._stop_clock()
        if not self.jobs or self._process is None:
            return
        if self._runs_users_code:
            limit_s = self._all.timeout_s + (SILENCE_S if self._all.waits else 0.0)
            self._limit = TimeLimit(self._process.pid, limit_s)
        else:
            self._limit = TimeLimit(self._process.pid, OWN_SILENCE_S, longest_s=OWN_SILENCE_S)
        self._look_later()

    def _look_later(self) -> None:
        assert self._limit is not None
        self._timer = asyncio.get_running_loop().call_later(self._limit.look_again_s(), self._look)

    def _look(self) -> None:
        assert self._limit is not None
        if self._limit.is_over():
            self._on_time_limit()
        else:
            self._look_later()

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._limit = None

    def _on_time_limit(self) -> None:
        self._overdue = list(self.jobs.values())
        if self._process is not None:
            self._process.kill()

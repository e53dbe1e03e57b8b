"""Worker processes of reward functions: hands groups to them and starts those that die anew.

A group that a worker was scoring when it died is scored again, and fails when a third worker dies
of it. So a worker that somebody kills changes no reward (I6). A function that kills its worker
every time, or takes too long, costs the group that function's reward: the group is scored once more
without it.

A user's function has reward.timeout_s in which it could run (running_time.py): time that it waits
for a processor does not count. `math` and `format` have processor time for each response. So a busy
machine changes no verdict, and every wait has an end.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pa_npu.control.running_time import TimeLimit
from pa_npu.control.worker_process import WorkerProcess
from pa_npu.errors import DataError, DeadlineExceeded, PaNpuError
from pa_npu.rewards import loading
from pa_npu.rewards.functions import FunctionSpec, RewardInput

STARTUP_TIMEOUT_S = 120.0  # importing math-verify and a user's module on a busy machine
ATTEMPTS = 3  # workers that may die of one group
FAILED_STARTS = 3  # in a row, then the workers give up
# Built-in functions have processor time: a silent process was stopped, or has no processor.
BUILTIN_SILENCE_S = 600.0
SILENCE_S = 30.0  # beyond the time of a user's function that waits; a machine may be busy

log = logging.getLogger(__name__)


def _group_line(identity: int, group: RewardInput, without: Sequence[str] = ()) -> bytes:
    """Returns a group as a line that a worker reads. `without`: functions not to call."""
    fields = {
        "prompt": group.prompt,
        "answer": group.answer,
        "responses": list(group.responses),
        "response_tokens": [int(length) for length in group.response_tokens],
        "row": dict(group.row),
    }
    line = {"id": identity, "group": fields, "without": list(without)}
    return json.dumps(line, default=str).encode() + b"\n"


@dataclass(eq=False)
class _Job:
    """A group that waits to be scored.

    future: resolves to the worker's reply. deaths: workers that died while they scored it.
    failures: functions that workers kept dying of, or that took too long, with the reason.
    """

    group: RewardInput
    identity: int
    future: asyncio.Future[dict[str, Any]]
    deaths: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    def line(self) -> bytes:
        return _group_line(self.identity, self.group, list(self.failures))


class Workers:
    """Processes of the same functions. Its owner starts and closes them.

    other_kind: labels of functions that need the other kind of workers (waiting or computing),
    known once these have started.
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
        self.other_kind: set[str] = set()
        self._labels = {spec.label for spec in specs}
        self._waiting: deque[_Job] = deque()
        self._workers = [_WorkerSlot(index, self) for index in range(count)]
        self._broken: PaNpuError | None = None
        self._last_identity = 0

    @property
    def labels(self) -> set[str]:
        """Labels of the functions that these workers call."""
        return self._labels - self.other_kind

    async def start(self) -> None:
        # Waits for all of them, so that none still starts after one failed and the rest was ended.
        starts = [worker.start() for worker in self._workers]
        for error in await asyncio.gather(*starts, return_exceptions=True):
            if error is not None:
                raise error

    async def close(self) -> None:
        """Ends all workers and fails what still waits. Idempotent."""
        self.give_up(PaNpuError("the reward pool is closed; score groups before leaving it"))
        await asyncio.gather(*(worker.close() for worker in self._workers))

    async def score(self, group: RewardInput) -> dict[str, Any]:
        """Returns {"rewards", "errors", "fatal"} of a worker, or {"failures"} by label where no
        function is left that a worker survives.
        """
        if self._broken is not None:
            raise self._broken
        self._last_identity += 1
        job = _Job(group, self._last_identity, asyncio.get_running_loop().create_future())
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
        """Lets the groups of a dead worker wait again, before all others."""
        self._waiting.extendleft(job for job in reversed(jobs) if not job.future.done())
        self.dispatch()

    def give_up(self, error: PaNpuError) -> None:
        """Fails everything that waits, and every later `score`, with `error`."""
        self._broken = self._broken or error
        jobs = list(self._waiting)
        for worker in self._workers:
            jobs += worker.jobs.values()
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(error)
        self._waiting.clear()


async def start_worker(first: Mapping[str, Any]) -> WorkerProcess:
    """Returns a process whose functions are loaded. `first`: the line that it reads first.

    Raises DataError if a function cannot be used, DeadlineExceeded if loading takes too long.
    """
    try:
        worker = await WorkerProcess.start(["pa_npu.rewards.worker"], first, STARTUP_TIMEOUT_S)
    except DeadlineExceeded:
        raise DeadlineExceeded(
            f"{_imported(first)} did not load within {STARTUP_TIMEOUT_S:.0f} s; "
            "let its module import faster"
        ) from None
    if worker.ready:
        problem = worker.ready.get("unusable", "")
        if problem:
            await worker.reap()
            raise DataError(problem)
        return worker
    if await worker.reap() == loading.ENDED_BY.name:
        _, computing_s = first["patience_s"]
        reason = loading.computed_for(computing_s)
        raise DataError(loading.refusal(_imported(first), reason))
    raise DataError(
        "reward.functions: the reward worker died while loading them; correct what its output "
        "above says"
    )


def _imported(first: Mapping[str, Any]) -> str:
    """Returns the names of a worker's functions that are imported, all of them if there are none."""
    names = [spec["name"] for spec in first["functions"]]
    return ", ".join([name for name in names if ":" in name] or names)


class _WorkerSlot:
    """The place of a worker: one process at a time, started anew whenever it dies.

    jobs: groups that it scores, by identity.
    """

    def __init__(self, index: int, workers: Workers) -> None:
        self.jobs: dict[int, _Job] = {}
        self._all = workers
        self._name = f"reward worker {index}"
        if workers.waits:
            self._name = "the worker of reward functions that wait"
        self._process: WorkerProcess | None = None
        self._server: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._limit: TimeLimit | None = None
        self._overdue: list[_Job] = []
        self._closing = False
        self._runs_users_code = False
        self._running_label: str | None = None  # of a process with one group at a time

    @property
    def has_room(self) -> bool:
        return self._process is not None and (self._all.waits or not self.jobs)

    async def start(self) -> None:
        self._process = await start_worker(self._all.first)
        self._all.other_kind.update(self._process.ready["others"])
        self._server = asyncio.create_task(self._serve(), name=self._name)

    async def close(self) -> None:
        self._stop_clock()
        self._closing = True
        if self._server is not None:
            self._server.cancel()
            await asyncio.gather(self._server, return_exceptions=True)
        process = self._process
        self._process = None
        if process is not None:
            await process.reap()

    def send(self, job: _Job) -> None:
        assert self._process is not None
        self._process.write(job.line())
        self.jobs[job.identity] = job
        self._running_label = None
        if len(self.jobs) == 1:
            self._runs_users_code = self._all.waits
            self._restart_clock()

    async def _serve(self) -> None:
        """Reads replies for as long as the pool lives; replaces the process when it dies."""
        try:
            # A loop without an end would not do: wait_for of Python 3.10 and 3.11 can swallow the
            # cancellation when a process has just ended.
            while not self._closing:
                assert self._process is not None
                await self._read_replies(self._process)
                dead = self._process
                self._process = None
                self._on_death(await dead.reap())
                self._process = await self._started_again()
                self._all.dispatch()
        except Exception as error:
            self._all.give_up(PaNpuError(f"{self._name} cannot go on: {error}"))
            raise

    async def _started_again(self) -> WorkerProcess:
        """Returns a process in the place of one that died.

        Raises the error of the last of FAILED_STARTS attempts.
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
        """Handles the process's replies until there are no more."""
        while (reply := await process.read()) is not None:
            if "running" in reply:
                self._runs_users_code = reply["running"] == "users"
                self._running_label = reply["label"]
            job = self.jobs.pop(reply.get("id", 0), None)
            if job is not None:
                if job.failures:
                    reply["errors"] = {**reply["errors"], **job.failures}
                self._resolve(job, reply)
            self._restart_clock()
            self._all.dispatch()

    def _on_death(self, cause: str) -> None:
        """Puts the groups of a dead process back, without the function that workers keep dying of.

        A group counts as the cause of the death, unless the process was killed for another group.
        Of a process with many groups at the same time, nothing says which function it died of; the
        group fails then, as it does where no function is left.
        """
        self._stop_clock()
        overdue = self._overdue
        self._overdue = []
        jobs = list(self.jobs.values())
        self.jobs.clear()

        limit_s = self._all.timeout_s
        if overdue and not self._runs_users_code:
            cause = f"it said nothing for {BUILTIN_SILENCE_S:g} s"
        elif overdue and self._all.waits:
            cause = (
                f"its event loop stood still for {limit_s + SILENCE_S:g} s, blocked by a function"
            )

        suspects = [job for job in jobs if not overdue or job in overdue]
        is_too_slow = bool(overdue) and not self._all.waits and self._runs_users_code
        for job in suspects:
            job.deaths += 1
            if is_too_slow:
                failure = (
                    f"not done within reward.timeout_s = {limit_s:g} s, so its worker was killed"
                )
                self._note_failure(job, failure)
            elif job.deaths >= ATTEMPTS:
                failure = f"its reward worker died {ATTEMPTS} times (last: {cause})"
                self._note_failure(job, failure)

        again = ""
        if any(not job.future.done() for job in suspects):
            again = "; what it scored is scored again"
        log.warning("%s died (%s)%s", self._name, cause, again)
        self._all.put_back(jobs)

    def _note_failure(self, job: _Job, failure: str) -> None:
        """Charges the running function with a failure, or all of them if it is not known."""
        labels = self._all.labels
        charged = labels if self._running_label is None else {self._running_label}
        job.failures.update(dict.fromkeys(charged, failure))
        job.deaths = 0
        if labels <= job.failures.keys():
            self._resolve(job, {"failures": job.failures})

    def _resolve(self, job: _Job, reply: dict[str, Any]) -> None:
        if not job.future.done():
            job.future.set_result(reply)

    def _restart_clock(self) -> None:
        """Starts the time within which the process has to reply, if it scores anything."""
        self._stop_clock()
        if not self.jobs or self._process is None:
            return
        if self._runs_users_code:
            limit_s = self._all.timeout_s + (SILENCE_S if self._all.waits else 0.0)
            self._limit = TimeLimit(self._process.pid, limit_s)
        else:
            self._limit = TimeLimit(
                self._process.pid, BUILTIN_SILENCE_S, longest_s=BUILTIN_SILENCE_S
            )
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

"""The coordinator's end of the trackers: records and samples are handed over at once, and delivered beside the run.

What a tracker fails to take costs that tracker the record: it is counted (records_lost), and the first of each tracker is said in
the log and on the console. A process that does not answer in time is killed and started again, a few times; then the run goes on
without this tracker. An iteration that a tracker already has is not sent again after a resume, except to TensorBoard, which can
take back; what an earlier attempt did not get to send is sent first, from metrics.jsonl.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pa_npu
from pa_npu.config.sections import TelemetryConfig
from pa_npu.errors import DataError
from pa_npu.telemetry.metrics import read_evaluations, read_records
from pa_npu.telemetry.record_file import note_lost, say
from pa_npu.telemetry.sample_store import KeptResponse
from pa_npu.telemetry.trackers.identity import KeptIdentity
from pa_npu.telemetry.trackers.names import SAMPLES_TABLE, tracked, tracked_evaluation
from pa_npu.telemetry.trackers.protocol import TrackedRun

QUEUE = 256  # messages that wait for a slow tracker: over a hundred iterations with their samples
STARTS = 3  # processes in a row that may fail without having taken anything
PAUSE_S = 10.0  # before the next of them
LONGEST_TEXT = 4096  # characters of a prompt or a response in a table
FAILED_RUN_S = 2.0  # how long a run that has failed, and is to be started again, waits for its trackers
_LINE_BYTES = 1 << 16
_CAN_TAKE_BACK = frozenset({"tensorboard"})


@dataclass(frozen=True)
class _Message:
    """content: as the process reads it. delivered: what the identity notes when it was taken."""

    content: Mapping[str, Any]
    delivered: Mapping[str, int]


class Trackers:
    """All trackers of a run. Owner closes it (context manager). config: of the run, flat; values that are secret left out.

    first_iteration: as MetricsWriter's, whose files must have been cut back to it already.
    """

    def __init__(
        self, run_dir: Path | str, telemetry: TelemetryConfig, config: Mapping[str, Any], first_iteration: int = 0
    ) -> None:
        self._convention = telemetry.metric_names
        self._table_groups = telemetry.samples_per_iteration
        self._timeout_s = telemetry.tracker_timeout_s
        self._feeds = [TrackerFeed(name, run_dir, telemetry, config, first_iteration) for name in telemetry.trackers]
        if first_iteration and self._feeds:
            records = [self._of_record(record) for record in _written(read_records, run_dir)]
            records += [self._of_evaluation(record) for record in _written(read_evaluations, run_dir)]
            for feed in self._feeds:
                feed.catch_up(records)
        for feed in self._feeds:
            feed.start()

    def write_iteration(self, record: Mapping[str, Any], kept: Sequence[KeptResponse] = ()) -> None:
        """One finished iteration with its kept samples; returns at once."""
        if not self._feeds:
            return
        messages = [self._of_record(record)]
        rows = [row for row in kept if row.index < self._table_groups]
        if rows:
            messages.append(_table(SAMPLES_TABLE[self._convention], record["iteration"], rows))
        for feed in self._feeds:
            for message in messages:
                feed.put(message)

    def write_evaluation(self, record: Mapping[str, Any]) -> None:
        """One evaluation; returns at once."""
        for feed in self._feeds:
            feed.put(self._of_evaluation(record))

    def close(self, limit_s: float | None = None) -> None:
        """Waits until everything is where it belongs, all trackers together at most telemetry.tracker_timeout_s, or limit_s."""
        deadline_s = time.monotonic() + (self._timeout_s if limit_s is None else limit_s)
        for feed in self._feeds:
            feed.end()
        for feed in self._feeds:
            feed.wait_until(deadline_s)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(None if kind is None else FAILED_RUN_S)

    def _of_record(self, record: Mapping[str, Any]) -> _Message:
        step = int(record["iteration"])
        return _Message({"log": tracked(record, self._convention), "step": step}, {"iteration": step})

    def _of_evaluation(self, record: Mapping[str, Any]) -> _Message:
        step = int(record["version"])
        return _Message({"log": tracked_evaluation(record, self._convention), "step": step}, {"version": step})


class TrackerFeed:
    """One tracker: a bounded queue, a thread that empties it, and the process that the thread talks to."""

    def __init__(
        self,
        tracker: str,
        run_dir: Path | str,
        telemetry: TelemetryConfig,
        config: Mapping[str, Any],
        first_iteration: int,
    ) -> None:
        self._tracker = tracker
        self._run_dir = Path(run_dir)
        self._telemetry = telemetry
        self._config = config
        self._first = first_iteration
        name = telemetry.run_name or self._run_dir.resolve().name
        self._identity = KeptIdentity(run_dir, tracker, telemetry.project, name)
        self._has = (
            {"iteration": first_iteration - 1, "version": first_iteration - 1}
            if tracker in _CAN_TAKE_BACK
            else {"iteration": self._identity.value.iteration, "version": self._identity.value.version}
        )
        self._queue: deque[_Message] = deque()
        self._changed = threading.Condition()
        self._ending = False
        self._given_up = False
        self._said = False
        self._process: _Process | None = None
        self._thread = threading.Thread(target=self._run, name=f"tracker {tracker}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def catch_up(self, messages: Sequence[_Message]) -> None:
        """Queues messages of earlier attempts that this tracker may lack, before `start`."""
        self._queue.extend(message for message in messages if self._lacks(message))

    def put(self, message: _Message) -> None:
        """Never waits. A message that finds the queue full is lost to this tracker."""
        if not self._lacks(message):
            return
        with self._changed:
            if self._given_up or self._ending:
                self._lose("it was given up")
            elif len(self._queue) >= QUEUE:
                self._lose(f"{QUEUE} records wait for it already")
            else:
                self._queue.append(message)
                self._changed.notify()

    def end(self) -> None:
        """No more messages come."""
        with self._changed:
            self._ending = True
            self._changed.notify()

    def wait_until(self, deadline_s: float) -> None:
        """Until all is delivered, or that time (monotonic), when the process is killed and the rest is lost."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if not self._thread.is_alive():
            return
        with self._changed:
            self._given_up = True
            process, left = self._process, len(self._queue)
        for _ in range(max(1, left)):
            self._lose("the run ended before it had taken them")
        if process is not None:
            process.kill()

    def _lacks(self, message: _Message) -> bool:
        return all(self._has[kind] < number for kind, number in message.delivered.items())

    def _run(self) -> None:
        """The thread: start the process, deliver in order, start it again where it hangs or dies."""
        failed = 0
        while failed < STARTS and not self._given_up:
            try:
                with _Process(self._tracker, self._run_dir, self._telemetry) as process:
                    self._process = process
                    self._identity.update(id=process.begin(self._tracked_run()), known=True)
                    while (message := self._next()) is not None:
                        self._deliver(process, message)
                        failed = 0
                    process.ask({"finish": True})
                    return
            except _Refused as refused:  # it lives, and cannot begin or end
                failed += 1
                reason = str(refused)
            except (OSError, ValueError, TimeoutError) as error:
                failed += 1
                reason = " ".join(str(error).split()) or type(error).__name__
            if self._given_up:
                return
            self._lose(reason)
            with self._changed:
                if failed < STARTS:
                    self._changed.wait_for(lambda: self._ending, PAUSE_S)
                if self._ending and not self._queue:
                    return
        with self._changed:
            self._given_up = True
            left = len(self._queue)
            self._queue.clear()
        for _ in range(left):
            self._lose("it was given up")

    def _deliver(self, process: _Process, message: _Message) -> None:
        """Raises where the process does not answer; a record that it refuses is lost, and the next is tried."""
        try:
            process.ask(message.content)
        except _Refused as refused:
            self._lose(str(refused))
            return
        newest = {kind: max(number, getattr(self._identity.value, kind)) for kind, number in message.delivered.items()}
        if newest:
            self._identity.update(**newest)

    def _next(self) -> _Message | None:
        with self._changed:
            while not self._queue and not self._ending:
                self._changed.wait()
            return self._queue.popleft() if self._queue else None

    def _tracked_run(self) -> TrackedRun:
        identity = self._identity.value
        return TrackedRun(
            run_dir=str(self._run_dir),
            project=identity.project,
            name=identity.name,
            tags=self._telemetry.tags,
            id=identity.id,
            resumed=identity.known,
            first_step=self._first,
            offline=self._telemetry.offline,
            config=self._config,
        )

    def _lose(self, reason: str) -> None:
        what = f"telemetry.trackers: {self._tracker}"
        note_lost(what, RuntimeError(reason))
        if not self._said:
            self._said = True
            say(f"| tracker {self._tracker}: {reason}; the run goes on, see logs/tracker-{self._tracker}.log")


class _Refused(Exception):
    """The tracker's process says that it could not do what it was asked."""


class _Process:
    """pa_npu.telemetry.trackers.worker with two pipes; every exchange has the deadline telemetry.tracker_timeout_s."""

    def __init__(self, tracker: str, run_dir: Path, telemetry: TelemetryConfig) -> None:
        self._timeout_s = telemetry.tracker_timeout_s
        self._rest = b""
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        os.set_blocking(self._out, False)
        log = run_dir / "logs" / f"tracker-{tracker}.log"
        root = str(Path(pa_npu.__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        command = [telemetry.tracker_python or sys.executable, "-m", "pa_npu.telemetry.trackers.worker", tracker]
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    [*command, str(theirs_in), str(theirs_out), str(self._timeout_s)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(theirs_in, theirs_out),
                    start_new_session=True,  # so that what the library starts can be killed with it
                    env={**os.environ, "PYTHONPATH": path},
                )
        except OSError:
            os.close(self._out)
            os.close(self._in)
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)
        os.close(self._in)
        self.kill()
        self._process.wait()

    def begin(self, run: TrackedRun) -> str:
        """The run's id with the tracker."""
        return str(self.ask({"run": asdict(run)})["ready"])

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Its answer. Raises _Refused where that is a failure, OSError where it is gone, TimeoutError where none comes in time."""
        deadline_s = time.monotonic() + self._timeout_s
        self._send(json.dumps(message).encode() + b"\n", deadline_s)
        answer: dict[str, Any] = json.loads(self._receive(deadline_s))
        if "failed" in answer:
            raise _Refused(answer["failed"])
        return answer

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _send(self, data: bytes, deadline_s: float) -> None:
        while data:
            self._wait([], [self._out], deadline_s)
            data = data[os.write(self._out, data) :]

    def _receive(self, deadline_s: float) -> bytes:
        while b"\n" not in self._rest:
            self._wait([self._in], [], deadline_s)
            more = os.read(self._in, _LINE_BYTES)
            if not more:
                raise OSError("its process ended")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _wait(self, reading: list[int], writing: list[int], deadline_s: float) -> None:
        if not any(select.select(reading, writing, [], max(0.0, deadline_s - time.monotonic()))):
            raise TimeoutError(f"no answer within telemetry.tracker_timeout_s = {self._timeout_s:g} s")


def _table(name: str, iteration: int, rows: Sequence[KeptResponse]) -> _Message:
    functions = list(rows[0].rewards)
    columns = ["step", "prompt", "completion", "answer", *functions, "reward", "advantage", "correct", "tokens"]
    cells = [
        [
            iteration,
            _text(row.prompt),
            _text(row.text),
            _text(row.answer),
            *(row.rewards[function] for function in functions),
            row.reward,
            row.advantage,
            row.correct,
            len(row.tokens),
        ]
        for row in rows
    ]
    return _Message({"table": name, "columns": columns, "rows": cells, "step": iteration}, {})


def _text(text: str) -> str:
    """The end is what a reward reads, so the middle of a long text is left out; no half surrogates."""
    clean = text.encode("utf-8", "replace").decode()
    if len(clean) <= LONGEST_TEXT:
        return clean
    return f"{clean[: LONGEST_TEXT // 2]} [...] {clean[-LONGEST_TEXT // 2 :]}"


def _written(read: Callable[[Path | str], list[dict[str, Any]]], run_dir: Path | str) -> list[dict[str, Any]]:
    """Records of earlier attempts; none where there are none, or where a file cannot be read."""
    try:
        return read(run_dir)
    except DataError:
        return []

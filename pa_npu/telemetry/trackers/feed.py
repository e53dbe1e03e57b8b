"""The coordinator's end of the trackers: what they get is appended to one file, which each tracker's process follows (follow.py).

What a tracker fails to take costs that tracker the record: it is counted (records_lost), and the first of each tracker is said in
the log and on the console. A process that ends is started again, a few times; then this attempt goes on without this tracker. What
a tracker was not given stays in the file, and a resumed run gives it first. What it was given is not given again, except to
TensorBoard, which can take back.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pa_npu
from pa_npu.config.sections import TelemetryConfig
from pa_npu.telemetry.metrics import drop_records
from pa_npu.telemetry.record_file import RecordFile, json_line, note_lost, say
from pa_npu.telemetry.sample_store import SAMPLES_IN_SHORT, KeptResponse
from pa_npu.telemetry.trackers.identity import DIRECTORY, EXPLAINED, RECORDS, KeptIdentity
from pa_npu.telemetry.trackers.names import SAMPLES_TABLE, tracked, tracked_evaluation

ANSWER_TIMEOUT_S = 60.0
"""Deadline of a tracker's answer, and at the end of the run of all it still has to take; then the run ends without it."""
STARTS = 3  # processes in a row that may end without having taken anything
LONGEST_TEXT = 4096  # characters of a prompt or a response in a table
FAILED_RUN_S = 2.0  # how long a run that has failed, and is to be started again, waits for its trackers
_LOOK_S = 0.05
_CAN_TAKE_BACK = frozenset({"tensorboard"})


class Trackers:
    """All trackers of a run. Owner closes it (context manager). config: of the run, flat; values that are secret left out.

    first_iteration: as MetricsWriter's; what an earlier attempt appended of it and later ones is removed.
    """

    def __init__(
        self, run_dir: Path | str, telemetry: TelemetryConfig, config: Mapping[str, Any], first_iteration: int = 0
    ) -> None:
        self._convention = telemetry.metric_names
        self._followers: list[_Follower] = []
        if telemetry.trackers:
            path = Path(run_dir) / DIRECTORY / RECORDS
            drop_records(path, "step", first_iteration)
            self._file = RecordFile(path)
            self._followers = [
                _Follower(name, Path(run_dir), telemetry, config, first_iteration) for name in telemetry.trackers
            ]

    def write_iteration(self, record: Mapping[str, Any], kept: Sequence[KeptResponse] = ()) -> None:
        """One finished iteration with its kept samples; returns at once."""
        message = {"kind": "iteration", "step": int(record["iteration"]), "log": tracked(record, self._convention)}
        if rows := [row for row in kept if row.index < SAMPLES_IN_SHORT]:
            message["table"] = _table(SAMPLES_TABLE[self._convention], record["iteration"], rows)
        self._write(message)

    def write_evaluation(self, record: Mapping[str, Any]) -> None:
        """One evaluation; returns at once."""
        log = tracked_evaluation(record, self._convention)
        self._write({"kind": "version", "step": int(record["version"]), "log": log})

    def close(self, limit_s: float | None = None) -> None:
        """Waits until everything is where it belongs, all trackers together at most ANSWER_TIMEOUT_S, or limit_s."""
        deadline_s = time.monotonic() + (ANSWER_TIMEOUT_S if limit_s is None else limit_s)
        for follower in self._followers:
            follower.end()
        while any(follower.look() for follower in self._followers) and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        for follower in self._followers:
            follower.kill()
        if self._followers:
            self._file.close()

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(None if kind is None else FAILED_RUN_S)

    def _write(self, message: Mapping[str, Any]) -> None:
        if self._followers:
            self._file.write(json_line(message))
        for follower in self._followers:
            follower.look()


class _Follower:
    """The process of one tracker, started again where it ends early. Its input is open as long as the run goes on."""

    def __init__(
        self, tracker: str, run_dir: Path, telemetry: TelemetryConfig, config: Mapping[str, Any], first: int
    ) -> None:
        self._tracker = tracker
        self._run_dir = run_dir
        self._identity = KeptIdentity(run_dir, tracker, telemetry.project, run_dir.resolve().name)
        found = self._identity.value
        again = {key: min(getattr(found, key), first - 1) for key in ("iteration", "version")}
        self._identity.update(**again if tracker in _CAN_TAKE_BACK else {})
        self._lost, self._delivered = found.lost, found.delivered
        run = {"project": found.project, "name": found.name, "first_step": first}
        self._run = json.dumps({**run, "config": config}).encode() + b"\n"
        python = telemetry.tracker_python or sys.executable
        self._command = [python, "-m", "pa_npu.telemetry.trackers.follow", tracker, str(run_dir)]
        self._command.append(str(ANSWER_TIMEOUT_S))
        self._failed = 0
        self._ending = self._done = self._said = False
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def look(self) -> bool:
        """Counts what was lost, starts the process again where it has ended; returns whether it goes on."""
        if self._done:
            return False
        ended = EXPLAINED if self._process is None else self._process.poll()  # asked first: it writes before it ends
        found = self._identity.read()
        for _ in range(found.lost - self._lost):
            self._lose(found.reason)
        if ended and ended != EXPLAINED:
            self._lose("its process ended")
        if found.delivered > self._delivered:
            self._failed = 0
        self._failed += bool(ended)
        self._lost, self._delivered = found.lost, found.delivered
        self._done = ended == 0 or self._failed >= STARTS
        if ended and not self._done:
            self._start()
        return not self._done

    def end(self) -> None:
        """No more messages come."""
        self._ending = True
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def kill(self) -> None:
        """Ends the process where it has not ended by itself."""
        if self.look():
            self._lose("the run ended before it had taken everything")
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _start(self) -> None:
        root = str(Path(pa_npu.__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        log = self._run_dir / "logs" / f"tracker-{self._tracker}.log"
        self._process = None
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # so that what the library starts can be killed with it
                    env={**os.environ, "PYTHONPATH": path},
                )
            assert self._process.stdin is not None
            self._process.stdin.write(self._run)
            self._process.stdin.flush()
        except OSError as error:
            self._lose(" ".join(str(error).split()))
        if self._ending:
            self.end()

    def _lose(self, reason: str) -> None:
        note_lost(f"telemetry.trackers: {self._tracker}", RuntimeError(reason))
        if not self._said:
            self._said = True
            say(f"| tracker {self._tracker}: {reason}; the run goes on, see logs/tracker-{self._tracker}.log")


def _table(name: str, iteration: int, rows: Sequence[KeptResponse]) -> dict[str, Any]:
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
    return {"name": name, "columns": columns, "rows": cells}


def _text(text: str) -> str:
    """The end is what a reward reads, so the middle of a long text is left out; no half surrogates."""
    clean = text.encode("utf-8", "replace").decode()
    if len(clean) <= LONGEST_TEXT:
        return clean
    return f"{clean[: LONGEST_TEXT // 2]} [...] {clean[-LONGEST_TEXT // 2 :]}"

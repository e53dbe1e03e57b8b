"""The supervisor: starts the commands of a run, waits for readiness, relays progress, ends when the run ends or fails."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from pa_npu.launcher.commands import Command
from pa_npu.launcher.console import Console
from pa_npu.launcher.log_tail import MarkedLines
from pa_npu.launcher.process_tree import Process, ProcessTree
from pa_npu.launcher.readiness import Awaited
from pa_npu.telemetry.progress import PREFIX
from pa_npu.telemetry.timeline import Timeline, now

FAILED = 1
BAD_INPUT = 2

_TICK_S = 0.1
_PROBE_EVERY_S = 0.5
_WAITING_LINE_EVERY_S = 15.0
_LOG_LINES = 20
# Processes that follow a dead one within this time are mentioned, not blamed.
_AFTERMATH_S = 1.0


class StopSignals:
    """SIGINT and SIGTERM as a wish to stop; a second one insists on stopping at once."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def insisted(self) -> bool:
        return len(self.received) > 1

    def record(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    signals = StopSignals()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = [signal.signal(number, signals.record) for number in numbers]
    try:
        yield signals
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


@dataclass
class _Failure(Exception):
    """The run must end: in words, with the process to show the log of, if one is to blame."""

    reason: str
    process: Process | None = None


class Supervisor:
    """Of all processes of a run, or of engines alone, which serve until a signal comes."""

    def __init__(self, tree: ProcessTree, console: Console, timeline: Timeline, signals: StopSignals) -> None:
        self._tree = tree
        self._console = console
        self._timeline = timeline
        self._signals = signals
        self._progress: MarkedLines | None = None

    def run(self, commands: Sequence[Command], awaited: Sequence[Awaited]) -> int:
        """Returns the exit code of the run; everything is stopped then."""
        start_s = now()
        try:
            for command in commands:
                process = self._tree.start(command.name, command.argv, command.env, command.cores)
                if command.name == "coordinator":
                    self._progress = MarkedLines(process.log, PREFIX)
            if self._until_ready(awaited) and self._until_done():
                self._timeline.complete("run", start_s, now(), "run")
                self._stop("the run is done")
                return 0
        except _Failure as failure:
            return self._fail(failure)
        number = self._signals.received[0]
        self._stop(f"{signal.Signals(number).name}: stopping (once more: at once)")
        return 128 + number

    def _until_ready(self, awaited: Sequence[Awaited]) -> bool:
        """False when a signal came first."""
        began, said, clock = time.monotonic(), time.monotonic(), now()
        pending, next_probe = list(awaited), 0.0
        while pending:
            if not self._tick():
                return False
            seconds = time.monotonic() - began
            if time.monotonic() < next_probe:
                continue
            for item in [item for item in pending if item.is_ready()]:
                pending.remove(item)
                self._timeline.complete(f"start {item.name}", clock, now(), item.name)
                self._console.say(f"{item.name} ready after {seconds:.0f} s")
            next_probe = time.monotonic() + _PROBE_EVERY_S
            for item in pending:
                if seconds > item.timeout_s:
                    raise _Failure(
                        f"{item.name} not ready after {seconds:.0f} s ({item.section}.startup_timeout_s)",
                        next((process for process in self._tree.processes if process.name == item.process), None),
                    )
            if pending and time.monotonic() - said > _WAITING_LINE_EVERY_S:
                said = time.monotonic()
                self._console.say(f"waiting for {', '.join(item.name for item in pending)} ({seconds:.0f} s)")
        return True

    def _until_done(self) -> bool:
        """Until coordinator and trainers have ended well: each of them has deadlines on all of its own waits.

        Where there are none, engines serve until a signal.
        """
        workers = [process for process in self._tree.processes if not process.name.startswith("engine-")]
        while not workers or any(process.exit_code is None for process in workers):
            if not self._tick():
                return False
        return True

    def _tick(self) -> bool:
        """Wait a moment, relay progress, look for dead processes; False when a signal asks to stop."""
        time.sleep(_TICK_S)
        self._relay()
        if self._signals.received:
            return False
        failed = self._failed()
        if failed:
            raise _Failure(f"{failed[0].name} ended: {failed[0].describe_end()}", failed[0])
        return True

    def _failed(self) -> list[Process]:
        """What ended and should not have: engines at all, the others with anything but 0."""
        ended = self._tree.ended()
        return [process for process in ended if process.exit_code != 0 or process.name.startswith("engine-")]

    def _relay(self) -> None:
        for line in self._progress.new() if self._progress else ():
            self._console.say(line)

    def _fail(self, failure: _Failure) -> int:
        self._console.complain(f"failed: {failure.reason}")
        process = failure.process
        if process is not None:
            self._console.complain(f"last lines of {process.log}:")
            for line in process.last_lines(_LOG_LINES):
                self._console.complain(f"    {line}")
        time.sleep(_AFTERMATH_S)
        for other in self._failed():
            if other is not process:
                last = other.last_lines(1)
                self._console.complain(f"also: {other.name} ended: {other.describe_end()}: {last[0] if last else ''}")
        self._stop("stopping the others")
        return BAD_INPUT if process is not None and process.exit_code == BAD_INPUT else FAILED

    def _stop(self, reason: str) -> None:
        self._relay()
        self._console.say(reason)
        began = time.monotonic()
        self._tree.stop()
        self._relay()
        self._console.say(f"all processes ended ({time.monotonic() - began:.1f} s)")

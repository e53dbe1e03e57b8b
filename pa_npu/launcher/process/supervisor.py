"""The supervisor: starts the commands of a run, waits for readiness, relays progress, ends when the run ends or fails.

What ends before the run was ready for the first time fails it: something is wrong with the run or
the machine. What ends later is started again as far as `Recovery` allows.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from pa_npu.control.channel import StoreChannel
from pa_npu.control.messages import EARLY_END, EarlyEnd
from pa_npu.errors import BAD_INPUT, FAILED
from pa_npu.launcher.process.commands import Startable
from pa_npu.launcher.process.console import Console
from pa_npu.launcher.process.process_tree import MarkedLines, StartError
from pa_npu.launcher.process.processes import Awaited, Process, Processes
from pa_npu.launcher.process.recovery import Attempt, Failure, Recovery, StartedTeacher
from pa_npu.telemetry.progress import PREFIX
from pa_npu.telemetry.run_end import RunEnd, record_end
from pa_npu.telemetry.timeline import Timeline, now

_TICK_S = 0.1
_PROBE_EVERY_S = 0.5
_WAITING_LINE_EVERY_S = 15.0
_LOG_LINES = 20
# Processes that follow a dead one within this time are mentioned, not blamed.
_AFTERMATH_S = 1.0


class StopSignals:
    """SIGINT and SIGTERM as a wish to stop; a second one insists on stopping at once.

    received: the signals, but for one that asks for an early end: the first SIGINT, while
    `can_end_early` is set.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self.can_end_early = False
        self.early_end_wanted = False

    def insisted(self) -> bool:
        return len(self.received) > 1

    def record(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.can_end_early and not self.early_end_wanted:
            self.early_end_wanted = True
        else:
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


class EarlyEndRequest:
    """Asks the trainers of a run to end it after the iteration that they train, in whichever
    attempt the run is.
    """

    def __init__(self) -> None:
        self._channel: StoreChannel | None = None
        self.is_made = False

    def attempt_begins(self, channel: StoreChannel) -> None:
        """channel: the attempt's, whose trainers have heard of no earlier request."""
        self._channel = channel
        if self.is_made:
            self.make()

    def make(self) -> None:
        self.is_made = True
        if self._channel is not None:
            EARLY_END.put(self._channel, EarlyEnd())


class Supervisor:
    """Watches all processes of a run, or engines alone, which serve until a signal comes."""

    def __init__(
        self,
        tree: Processes,
        console: Console,
        timeline: Timeline,
        signals: StopSignals,
        recovery: Recovery | None = None,
        early_end: EarlyEndRequest | None = None,
    ) -> None:
        """recovery: None where nothing is started again. early_end: None where a first SIGINT stops
        everything at once.
        """
        self._tree = tree
        self._recovery = recovery
        self._early_end = early_end
        self._recovers = False
        self._console = console
        self._timeline = timeline
        self._signals = signals
        self._lines: MarkedLines | None = None

    def run(
        self,
        engines: Sequence[Startable],
        workers: Sequence[Startable],
        awaited: Sequence[Awaited],
        teachers: Sequence[StartedTeacher] = (),
    ) -> int:
        """Returns the exit code of the run; everything is stopped then. engines: in the order of
        the roster. teachers: engines of teachers.
        """
        start_s = now()
        try:
            for index, command in enumerate(engines):
                process = self._start(command)
                if self._recovery is not None:
                    self._recovery.watch(command, index, process)
            for teacher in teachers:
                process = self._start(teacher.command)
                if self._recovery is not None:
                    self._recovery.watch_teacher(teacher, process)
            for command in workers:
                self._start(command)
            if self._until_done(awaited):
                record_end(self._timeline, start_s, RunEnd("finished"))
                ends_early = any(process.exit_code is None for process in self._workers())
                self._stop("the run has ended early, as asked" if ends_early else "the run is done")
                return 0
        except (Failure, StartError) as error:
            if not self._signals.received:
                failure = error if isinstance(error, Failure) else Failure(str(error))
                record_end(self._timeline, start_s, _end_by(failure))
                return self._fail(failure)
        number = self._signals.received[0]
        name = signal.Signals(number).name
        record_end(self._timeline, start_s, RunEnd("stopped", name))
        self._stop(f"{name}: stopping (once more: at once)")
        return 128 + number

    def _start(self, command: Startable) -> Process:
        process = self._tree.launch(command)
        if command.name == "coordinator" and self._lines is None:
            self._lines = MarkedLines(process.log, PREFIX)
        return process

    def _until_ready(self, awaited: Sequence[Awaited]) -> bool:
        """False when a signal came first."""
        began = time.monotonic()
        last_line_s = time.monotonic()
        clock = now()
        pending = list(awaited)
        next_probe = 0.0
        while pending:
            try:
                if not self._tick():
                    return False
            except Failure:
                if self._recovery is None or not all(item.is_ready() for item in pending):
                    raise
                # what it waited for came since the last look: who died was at work, and is started
                # again
                return True
            seconds = time.monotonic() - began
            if time.monotonic() < next_probe:
                continue
            for item in [item for item in pending if item.is_ready()]:
                pending.remove(item)
                self._timeline.complete(f"start {item.name}", clock, now(), item.name)
                self._console.print_line(f"{item.name} ready after {seconds:.0f} s")
            next_probe = time.monotonic() + _PROBE_EVERY_S
            for item in pending:
                if seconds > item.timeout_s:
                    raise Failure(
                        f"{item.name} not ready after {seconds:.0f} s (run.startup_timeout_s)",
                        next(
                            (
                                process
                                for process in self._tree.processes
                                if process.name == item.process
                            ),
                            None,
                        ),
                    )
            if pending and time.monotonic() - last_line_s > _WAITING_LINE_EVERY_S:
                last_line_s = time.monotonic()
                names = ", ".join(item.name for item in pending)
                self._console.print_line(f"waiting for {names} ({seconds:.0f} s)")
        return True

    def _until_done(self, awaited: Sequence[Awaited]) -> bool:
        """Until coordinator and trainers have ended well: each of them has deadlines on all of its
        own waits.

        Where there are none, engines serve until a signal.
        """
        while True:
            try:
                if not self._until_ready(awaited):
                    return False
                self._recovers = self._recovery is not None
                self._signals.can_end_early = self._early_end is not None
                while not self._is_over():
                    if not self._tick():
                        return False
                return True
            except Failure as failure:
                if self._signals.received or not (attempt := self._next_attempt(failure)):
                    raise
                for command in attempt.commands:
                    self._start(command)
                awaited = attempt.awaited

    def _is_over(self) -> bool:
        """Returns whether coordinator and trainers have ended; of a run that ends early the
        trainers alone, which leave the model.
        """
        workers = self._workers()
        if self._early_end is not None and self._early_end.is_made:
            trainers = [process for process in workers if process.name != "coordinator"]
            if trainers and all(process.exit_code == 0 for process in trainers):
                return True
        return bool(workers) and all(process.exit_code is not None for process in workers)

    def _next_attempt(self, failure: Failure) -> Attempt | None:
        failed = failure.process
        if not self._recovers or self._recovery is None or failed is None or _is_engine(failed):
            return None
        return self._recovery.next_attempt(self._failed() or [failed])

    def _workers(self) -> list[Process]:
        return [process for process in self._tree.processes if not _is_engine(process)]

    def _tick(self) -> bool:
        """Wait a moment, relay progress, look for dead processes; False when a signal asks to stop."""
        time.sleep(_TICK_S)
        self._relay()
        if self._signals.received:
            return False
        if (
            self._early_end is not None
            and self._signals.early_end_wanted
            and not self._early_end.is_made
        ):
            self._early_end.make()
            self._console.print_line(
                "SIGINT: the run ends after this iteration, with a checkpoint and an export (once "
                "more: without)"
            )
        if self._recovery is not None and self._recovers:
            self._recovery.restart_engines()
        if self._failed():
            self._tree.settle(_AFTERMATH_S)  # the first to end is not always the first to be seen
            culprit = self._failed()[0]
            raise Failure(f"{culprit.name} ended: {culprit.describe_end()}", culprit)
        return True

    def _failed(self) -> list[Process]:
        """Returns processes that should not have ended: engines, unless they are started again, and
        others with a code but 0.
        """
        return [
            process
            for process in self._tree.ended()
            if (not self._recovers if _is_engine(process) else process.exit_code != 0)
        ]

    def _relay(self) -> None:
        for line in self._lines.new() if self._lines else ():
            self._console.print_line(line)

    def _fail(self, failure: Failure) -> int:
        self._console.print_error(f"failed: {failure.reason}")
        process = failure.process
        if process is not None:
            self._console.print_error(f"last lines of {process.log}:")
            for line in process.last_lines(_LOG_LINES):
                self._console.print_error(f"    {line}")
        for failed in self._failed():
            if failed is not process:
                last = failed.last_lines(1)
                self._console.print_error(
                    f"also: {failed.name} ended: {failed.describe_end()}: {last[0] if last else ''}"
                )
        self._stop("stopping the others")
        return BAD_INPUT if process is not None and process.exit_code == BAD_INPUT else FAILED

    def _stop(self, reason: str) -> None:
        self._relay()
        self._console.print_line(reason)
        began = time.monotonic()
        self._tree.stop()
        self._relay()
        self._console.print_line(f"all processes ended ({time.monotonic() - began:.1f} s)")


def _end_by(failure: Failure) -> RunEnd:
    process = failure.process
    if process is None:
        return RunEnd("failed", failure.reason)
    return RunEnd("failed", failure.reason, process.name, tuple(process.last_lines(_LOG_LINES)))


def _is_engine(process: Process) -> bool:
    return process.name.startswith(("engine-", "teacher-"))

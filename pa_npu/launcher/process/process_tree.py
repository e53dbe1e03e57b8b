"""The processes of a run: started with a log file each, which is read here, polled, and stopped together, with nothing left behind.

Every command runs under a keeper (`pa_npu.control.keeper`), which ends all its descendants whatever
happens to the command, to the keeper or to this process.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from pa_npu.control import keeper
from pa_npu.errors import PaNpuError, printable
from pa_npu.launcher.process.commands import Command, Role, Startable
from pa_npu.launcher.process.processes import Process
from pa_npu.telemetry.logs import LAST_ERROR

# Engines need about 2 s to leave on SIGTERM; the whole stop stays below 10 s.
GRACE_S = 5.0
_KILL_MARGIN_S = 2.0
"""How much longer than the grace a keeper gets to kill and reap before it is killed itself."""
_POLL_S = 0.02
_ERROR_BYTES = _TAIL_BYTES = 64 * 1024


def describe_end(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


@dataclass(eq=False)
class TreeProcess:
    """One command of the run, under its keeper. `name` is also its log's name."""

    name: str
    log: Path
    popen: subprocess.Popen[bytes]
    last_error: IO[bytes]
    scratch: Path | None = None

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        code = self.popen.poll()
        if code is None:
            # a keeper that was stopped would hide its command's end
            self.popen.send_signal(signal.SIGCONT)
        return code

    def describe_end(self) -> str:
        """Returns how the process ended, such as "exit code 1" or "killed by SIGKILL"."""
        return describe_end(self.exit_code or 0)

    def last_lines(self, count: int) -> list[str]:
        """Returns its log's last lines, and the error that it ended with, which a log on a full
        disk may not have taken.
        """
        # it runs, or a signal ended it: what it logged as an error may be long ago
        if (self.exit_code or 0) <= 0:
            return last_lines(self.log, count)
        error = os.pread(self.last_error.fileno(), _ERROR_BYTES, 0).decode("utf-8", "replace")
        return last_lines(self.log, count, [printable(line) for line in error.splitlines()])


def _file_in_memory() -> IO[bytes]:
    """Without a name; on no disk that can be full, where the system allows that."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("last error"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


class StartError(PaNpuError):
    """The machine does not allow a process to start."""


class ProcessTree:
    """Owner of all processes of a run.

    Use it as a context manager: leaving it stops what still runs.
    """

    def __init__(
        self, log_dir: Path, grace_s: float, hurry: Callable[[], bool] = lambda: False
    ) -> None:
        """grace_s: from SIGTERM to SIGKILL. hurry: asked while stopping; true ends the grace."""
        self.processes: list[TreeProcess] = []
        # the commands of the roles that are started here
        self.build: Callable[[Role], Command] | None = None
        self._log_dir = log_dir
        self._grace_s = grace_s
        self._hurry = hurry
        self._lifeline, self._lifeline_writer = os.pipe()
        log_dir.mkdir(parents=True, exist_ok=True)
        self._not_ours = frozenset(keeper.descendants(os.getpid()))
        keeper.become_reaper()

    def launch(self, command: Startable) -> TreeProcess:
        """Start it with stdout and stderr in LOG_DIR/<name>.log, on its cores only, if it has any.

        Raises StartError where the machine does not allow it: no room for its log, too many
        processes.
        """
        if isinstance(command, Role):
            assert self.build is not None, (
                f"{command.name} is for node {command.node}, not for this one"
            )
            command = self.build(command)
        try:
            return self._start(command)
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise StartError(
                f"{command.name} cannot be started: {error.strerror or error}{where}"
            ) from None

    def _start(self, command: Command) -> TreeProcess:
        last_error = _file_in_memory()
        env = {**command.env, LAST_ERROR: str(last_error.fileno())}
        scratch = None
        if command.scratch_env:
            scratch = Path(tempfile.mkdtemp(prefix="pa-", dir=command.scratch_parent))
            env |= {command.scratch_env: str(scratch), keeper.SCRATCH: str(scratch)}
        if command.own_tmpdir:
            env["TMPDIR"] = str(scratch)
        log = self._log_dir / f"{command.name}.log"
        numbers = [str(self._lifeline), str(self._grace_s), ",".join(map(str, command.cores))]
        # -I -S: the keeper needs the standard library only, and starts in 15 ms this way
        argv = [sys.executable, "-I", "-S", keeper.__file__, *numbers, "--", *command.argv]
        with log.open("ab") as file:
            popen = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=env,
                pass_fds=[self._lifeline, last_error.fileno()],
                start_new_session=True,  # a Ctrl-C in the terminal reaches the launcher alone
            )
        process = TreeProcess(command.name, log, popen, last_error, scratch)
        self.processes.append(process)
        return process

    def can_launch(self, command: Startable) -> bool:
        """This machine is always there."""
        return True

    def ended(self) -> list[TreeProcess]:
        """Processes that ended, those killed by a signal first: the others often only lost contact
        with these.
        """
        ended = [process for process in self.processes if process.exit_code is not None]
        return sorted(ended, key=lambda process: (process.exit_code or 0) >= 0)

    def stop(self, processes: Sequence[Process] | None = None) -> None:
        """SIGTERM to all at once, SIGKILL after the grace; returns when they and all their
        descendants are gone.
        """
        running = [
            process
            for process in self.processes
            if (processes is None or process in processes) and process.exit_code is None
        ]
        for process in running:
            process.popen.terminate()
        deadline = time.monotonic() + self._grace_s + _KILL_MARGIN_S
        while any(process.exit_code is None for process in running):
            if time.monotonic() > deadline or self._hurry():
                self._kill(running)
            time.sleep(_POLL_S)
        self.kill_strays()

    def kill_one(self, process: Process) -> None:
        """SIGKILL a process, which may hang, and its descendants."""
        self._kill([running for running in self.processes if running is process])
        self.kill_strays()

    def forget(self, processes: Sequence[Process]) -> None:
        """Forgets processes that have ended; others may take their names."""
        self.processes = [process for process in self.processes if process not in processes]

    def settle(self, seconds: float) -> None:
        """Waits until processes that end at the same time have been reaped."""
        time.sleep(seconds)

    def _kill(self, processes: Sequence[TreeProcess]) -> None:
        for process in processes:
            if process.exit_code is None:
                process.popen.kill()
                process.popen.wait()

    def kill_strays(self) -> list[int]:
        """Kill what a killed keeper left behind."""
        keepers = frozenset(
            process.popen.pid for process in self.processes if process.exit_code is None
        )
        killed = keeper.kill_descendants(self._not_ours | keepers)
        for process in self.processes:
            if process.scratch is not None and process.exit_code is not None:
                shutil.rmtree(process.scratch, ignore_errors=True)
        return killed

    def __enter__(self) -> ProcessTree:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        finally:
            self._kill(self.processes)
            self.kill_strays()
            os.close(self._lifeline)
            os.close(self._lifeline_writer)


def last_lines(log: Path, count: int, written: Sequence[str] = ()) -> list[str]:
    """Returns the last `count` lines that are not blank; empty when there is no log.

    written: lines that the process has written too, and that are the last ones where the log does
    not have them.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        text = ""
    lines = [printable(line.rstrip()) for line in text.split("\n") if line.strip()]
    missing = [line for line in written if line not in lines]
    return [*lines, *missing][-count:]


class MarkedLines:
    """Follows a growing log and yields its complete new lines that begin with `mark`, without the
    mark.
    """

    def __init__(self, log: Path, mark: str) -> None:
        self._log = log
        self._mark = mark.encode()
        self._position = log.stat().st_size if log.exists() else 0
        self._partial = b""

    def new(self) -> list[str]:
        try:
            with self._log.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return []
        self._position += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        marked = [line[len(self._mark) :] for line in lines if line.startswith(self._mark)]
        return [printable(line.decode("utf-8", "replace").rstrip()) for line in marked]

"""The processes of a run: started with a log file each, polled, and stopped together, with nothing left behind.

Every command runs under a keeper (`pa_npu.control.keeper`), which ends all its descendants whatever happens to the
command, to the keeper or to this process.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from pa_npu.control import keeper
from pa_npu.errors import PaNpuError, printable
from pa_npu.launcher.process.commands import Command, Role, Startable
from pa_npu.launcher.process.log_tail import last_lines
from pa_npu.launcher.process.processes import Process as AnyProcess
from pa_npu.telemetry.logs import LAST_ERROR

# Engines need about 2 s to leave on SIGTERM; the whole stop stays below 10 s.
GRACE_S = 5.0
_KILL_MARGIN_S = 2.0
"""How much longer than the grace a keeper gets to kill and reap before it is killed itself."""
_POLL_S = 0.02
_ERROR_BYTES = 64 * 1024


def describe_end(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


@dataclass(eq=False)
class Process:
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
            self.popen.send_signal(signal.SIGCONT)  # a keeper that was stopped would hide its command's end
        return code

    def describe_end(self) -> str:
        """For example "exit code 1" or "killed by SIGKILL"."""
        return describe_end(self.exit_code or 0)

    def last_lines(self, count: int) -> list[str]:
        """Returns its log's last lines, and the error that it ended with, which a log on a full disk may not have taken."""
        if (self.exit_code or 0) <= 0:  # it runs, or a signal ended it: what it logged as an error may be long ago
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
    """Owner of all processes of a run. Use it as a context manager: leaving it stops what still runs."""

    def __init__(self, log_dir: Path, grace_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """grace_s: from SIGTERM to SIGKILL. hurry: asked while stopping; true ends the grace."""
        self.processes: list[Process] = []
        self.build: Callable[[Role], Command] | None = None  # the commands of the roles that are started here
        self._log_dir = log_dir
        self._grace_s = grace_s
        self._hurry = hurry
        self._lifeline, self._lifeline_writer = os.pipe()
        log_dir.mkdir(parents=True, exist_ok=True)
        self._not_ours = frozenset(keeper.descendants(os.getpid()))
        keeper.become_reaper()

    def start(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        cores: Sequence[int] = (),
        scratch_env: str | None = None,
    ) -> Process:
        """Start a command with stdout and stderr in LOG_DIR/<name>.log, on the given cores only, if any.

        scratch_env: the variable in which it finds a directory of its own, which is removed when it has ended.
        Raises StartError where the machine does not allow it: no room for its log, too many processes.
        """
        try:
            return self._start(name, argv, env, cores, scratch_env)
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise StartError(f"{name} cannot be started: {error.strerror or error}{where}") from None

    def _start(
        self, name: str, argv: Sequence[str], env: Mapping[str, str], cores: Sequence[int], scratch_env: str | None
    ) -> Process:
        scratch = Path(tempfile.mkdtemp(prefix="pa-")) if scratch_env else None
        if scratch_env:
            env = {**env, scratch_env: str(scratch), keeper.SCRATCH: str(scratch)}
        last_error = _file_in_memory()
        env = {**env, LAST_ERROR: str(last_error.fileno())}
        log = self._log_dir / f"{name}.log"
        numbers = [str(self._lifeline), str(self._grace_s), ",".join(map(str, cores))]
        # -I -S: the keeper needs the standard library only, and starts in 15 ms this way
        command = [sys.executable, "-I", "-S", keeper.__file__, *numbers, "--", *argv]
        with log.open("ab") as file:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=env,
                pass_fds=[self._lifeline, last_error.fileno()],
                start_new_session=True,  # a Ctrl-C in the terminal reaches the launcher alone
            )
        process = Process(name, log, popen, last_error, scratch)
        self.processes.append(process)
        return process

    def can_launch(self, command: Startable) -> bool:
        """This machine is always there."""
        return True

    def launch(self, command: Startable) -> Process:
        if isinstance(command, Role):
            assert self.build is not None, f"{command.name} is for node {command.node}, not for this one"
            command = self.build(command)
        return self.start(command.name, command.argv, command.env, command.cores, command.scratch_env)

    def ended(self) -> list[Process]:
        """Processes that ended, those killed by a signal first: the others often only lost contact with these."""
        ended = [process for process in self.processes if process.exit_code is not None]
        return sorted(ended, key=lambda process: (process.exit_code or 0) >= 0)

    def stop(self, processes: Sequence[AnyProcess] | None = None) -> None:
        """SIGTERM to all at once, SIGKILL after the grace; returns when they and all their descendants are gone."""
        running = self.terminate(processes)
        deadline = time.monotonic() + self._grace_s + _KILL_MARGIN_S
        while any(process.exit_code is None for process in running):
            if time.monotonic() > deadline or self._hurry():
                self._kill(running)
            time.sleep(_POLL_S)
        self.kill_strays()

    def terminate(self, processes: Sequence[AnyProcess] | None = None) -> list[Process]:
        """SIGTERM to those that run, without waiting; returns them."""
        running = [
            process
            for process in self.processes
            if (processes is None or process in processes) and process.exit_code is None
        ]
        for process in running:
            process.popen.terminate()
        return running

    def kill_one(self, process: AnyProcess) -> None:
        """SIGKILL a process, which may hang, and its descendants."""
        self._kill([one for one in self.processes if one is process])
        self.kill_strays()

    def forget(self, processes: Sequence[AnyProcess]) -> None:
        """These have ended, others may take their names."""
        self.processes = [process for process in self.processes if process not in processes]

    def settle(self, seconds: float) -> None:
        """Waits until processes that end at the same time have been reaped."""
        time.sleep(seconds)

    def kill(self) -> None:
        """SIGKILL everything at once."""
        self._kill(self.processes)
        self.kill_strays()

    def _kill(self, processes: Sequence[Process]) -> None:
        for process in processes:
            if process.exit_code is None:
                process.popen.kill()
                process.popen.wait()

    def kill_strays(self) -> list[int]:
        """Kill what a killed keeper left behind."""
        keepers = frozenset(process.popen.pid for process in self.processes if process.exit_code is None)
        killed = keeper.kill_descendants(self._not_ours | keepers)
        for process in self.processes:
            if process.scratch is not None and process.exit_code is not None:
                shutil.rmtree(process.scratch, ignore_errors=True)
        return killed

    def __enter__(self) -> ProcessTree:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            self.kill()
            os.close(self._lifeline)
            os.close(self._lifeline_writer)

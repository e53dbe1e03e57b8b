"""Agent programs: agent.command in a process of its own, for one session, or one that stays and takes tasks.

    OPENAI_BASE_URL, OPENAI_API_KEY    of its session; with agent.programs the key is that for GET
                                       GATEWAY_URL/tasks, which is asked with the header x-program:
                                       PROGRAM
    TASK, TASK_FILE                    JSON: the dataset's row and what follows from it, and a file
                                       of the same; not with agent.programs. A task that is too long
                                       for a variable is in the file alone
    GATEWAY_URL, SESSION_URL           of the gateway, and of the session (reward, end)

`python` in the command is the run's interpreter. It runs in a directory of its own, which goes with
it, under a keeper that kills whatever it leaves behind; with agent.container in a container, with
the image's `python` and files. What it writes is kept up to agent.output_kib, and the last of it is
in the log where the program fails.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from pa_npu.agents.session import Session, Sessions
from pa_npu.config.sections.rollout import AgentConfig
from pa_npu.control import keeper
from pa_npu.control.tasks import cancel
from pa_npu.control.worker_process import start_kept
from pa_npu.errors import ConfigError
from pa_npu.telemetry.secrets import without_secrets

logger = logging.getLogger(__name__)

_KILL_S = 15.0  # until a keeper has ended; it may have a container to remove
_GRACE_S = 5.0  # of a program whose session has reached a limit, to end by itself
_LAST_WORDS = 300  # characters
_RESTARTS = 3  # of a program that stays, without a session done in between
_TASK_FILE = "task.json"
_LONGEST_VARIABLE = 2**17 - 2**10  # bytes of its value; Linux takes 128 KiB with its name
_PROXIES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_STORE = "PA_NPU_STORE"  # the run's own address
_PROGRAMS = ("docker", "podman")
# of one that is given too, docker and podman take the last
_USUAL = ("--memory=4g", "--cpus=2", "--pids-limit=512")
_NETWORK = ("--network", "--net")
_SIGNAL = 128  # and its number: the exit code of a container whose program a signal killed


class Programs:
    """Starts them, and ends them. settings: the run's section `agent`."""

    def __init__(self, settings: AgentConfig, sessions: Sessions) -> None:
        assert settings.command is not None
        self._containers = Containers(settings) if settings.container is not None else None
        try:
            parts = shlex.split(settings.command)
        except ValueError as error:
            raise ConfigError(
                f"agent.command: {settings.command!r:.80} cannot be read ({error}); correct its "
                "quotes"
            ) from None
        self._command = parts if self._containers is not None else [_found(part) for part in parts]
        self._most_bytes = settings.output_kib * 1024
        self._sessions = sessions
        self.last_words = ""

    async def run(self, session: Session) -> None:
        """One program for the session, until either has ended."""
        variables = {
            "OPENAI_BASE_URL": self._sessions.base_url(session),
            "OPENAI_API_KEY": self._sessions.key_of(f"session:{session.id}"),
            "SESSION_URL": f"{self._sessions.url}/sessions/{session.id}",
        }
        code = await self._run(variables, session)
        if session.outcome is None and code is not None:
            if code < 0:
                session.lose()
            else:
                session.end("done" if code == 0 else "failed")

    async def stay(self, number: int) -> None:
        """A program that takes one task after another, started again where it ends, until
        cancelled.
        """
        failures = 0
        while failures < _RESTARTS:
            variables = {
                "OPENAI_API_KEY": self._sessions.key_of(f"program:{number}"),
                "PROGRAM": str(number),
            }
            code = await self._run(variables, None)
            failures = 0 if self._sessions.taker_ended(str(number)) else failures + 1
            logger.warning(
                "agent.command: program %d ended (%s): %s",
                number,
                code,
                self.last_words or "it said nothing",
            )
        raise ConfigError(
            f"agent.command: program {number} ended {_RESTARTS} times without a session done, the "
            f"last time with exit code {code} ({self.last_words or 'it said nothing'}); correct "
            "it, or remove agent.programs for a program of one session"
        )

    async def _run(self, variables: Mapping[str, str], session: Session | None) -> int | None:
        """The exit code, negative for a signal; None where the session ended before the program."""
        with tempfile.TemporaryDirectory(
            prefix="pa_npu-agent-", ignore_cleanup_errors=True
        ) as directory:
            command, mounts = self._command, {}
            given = {"GATEWAY_URL": self._sessions.url, **self._proxy_exceptions(), **variables}
            if session is not None:
                task = json.dumps(session.task, ensure_ascii=False, default=str).encode()
                file = Path(directory) / _TASK_FILE
                file.write_bytes(task)
                fits = len(task) <= _LONGEST_VARIABLE
                if fits:
                    given["TASK"] = task.decode()
                if self._containers is None:
                    given["TASK_FILE"] = str(file)
                elif not fits:
                    given["TASK_FILE"] = f"/{_TASK_FILE}"
                    mounts = {file: given["TASK_FILE"]}
            path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), os.getcwd())))
            env = {**self._inherited(), "PYTHONPATH": path, **given}
            if self._containers is not None:
                command, removal = self._containers.commands(command, given, mounts)
                env[keeper.LAST] = shlex.join(removal)
            output = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
            process, lifeline = await start_kept(
                command, env, stdin=asyncio.subprocess.DEVNULL, cwd=directory, **output
            )
            waiting: list[asyncio.Task[object]] = []
            try:
                reading = asyncio.create_task(
                    self._read(process, session), name="output of an agent"
                )
                waiting = [reading]
                if session is not None:
                    waiting.append(asyncio.create_task(session.ended(), name="end of a session"))
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():  # it may still write what it has learned
                    await asyncio.wait([reading], timeout=_GRACE_S)
                if reading.done() and reading.result():
                    code = await asyncio.wait_for(process.wait(), _KILL_S)
                    return code if self._containers is None else self._containers.exit_code(code)
                return None
            finally:
                os.close(lifeline)
                await cancel(waiting)
                await _reap(process)

    def _inherited(self) -> dict[str, str]:
        """This process's environment without secrets: the keys of hubs, trackers and judges, and
        URLs with a password.
        """
        inherited = without_secrets(os.environ)
        inherited.pop(_STORE, None)
        return inherited

    def _proxy_exceptions(self) -> dict[str, str]:
        """The variables that keep requests to the gateway from a proxy, by both names that programs
        read.
        """
        variables: dict[str, str] = {}
        if self._containers is not None and not any(os.environ.get(name) for name in _PROXIES):
            return variables  # containers have no variable of the run's, hence no proxy
        for name in ("NO_PROXY", "no_proxy"):
            names = [host.strip() for host in os.environ.get(name, "").split(",") if host.strip()]
            if names != ["*"]:
                gateway = urlsplit(self._sessions.url).hostname
                names += [host for host in (*_LOOPBACK, gateway) if host and host not in names]
            variables[name] = ",".join(dict.fromkeys(names))
        return variables

    async def _read(self, process: asyncio.subprocess.Process, session: Session | None) -> bool:
        """Reads its output until its end (True) or its limit."""
        assert process.stdout is not None
        num_bytes, last = 0, b""
        while data := await process.stdout.read(65536):
            num_bytes += len(data)
            last = (last + data)[-4 * _LAST_WORDS :]
            self.last_words = " ".join(last.decode("utf-8", "replace").split())[-_LAST_WORDS:]
            if session is not None and num_bytes > self._most_bytes:
                session.end("output")
                return False
        return True


def _found(part: str) -> str:
    """A part of the command as it is from any directory: files by their whole path, and `python` is
    the run's own.
    """
    if part == "python":
        return sys.executable
    return str(Path(part).absolute()) if Path(part).is_file() else part


async def _reap(process: asyncio.subprocess.Process) -> None:
    """Until a process whose lifeline is closed has ended; what it still said is dropped."""
    try:
        await asyncio.wait_for(process.communicate(), _KILL_S)
    except asyncio.TimeoutError:
        logger.warning("an agent's keeper %d has not ended within %g s", process.pid, _KILL_S)


class Containers:
    """Commands of docker, or podman, that run a program in an image and remove what is left of it.

    The program has the variables of the gateway and none of the coordinator's. It shares the
    machine's network, since the gateway listens on loopback, unless an option in agent.container
    says another; it has no capabilities and cannot gain any. Raises ConfigError where neither
    program is on PATH.
    """

    def __init__(self, settings: AgentConfig) -> None:
        assert settings.container is not None
        self._program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
        if self._program is None:
            raise ConfigError(
                f"agent.container: {settings.container} needs docker or podman, and neither is on "
                "PATH; install one, or remove the key, so that programs run in processes"
            )
        *given, self._image = settings.container.split()
        own = any(option.partition("=")[0] in _NETWORK for option in given)
        self._options = [*_USUAL, *([] if own else ["--network=host"]), *given]

    def commands(
        self, command: Sequence[str], variables: Iterable[str], mounts: Mapping[Path, str]
    ) -> tuple[list[str], list[str]]:
        """Returns the command that runs a program in a container of its own, and the one that
        removes it.

        variables: names of what it inherits. mounts: files that it may read, with their paths in
        it.
        """
        assert self._program is not None
        name = f"pa_npu-agent-{secrets.token_hex(8)}"
        fixed = [
            "--rm",
            "--init",
            f"--name={name}",
            "--cap-drop=ALL",
            "--security-opt=no-new-privileges",
        ]
        given = [f"--env={variable}" for variable in variables]
        given += [f"--volume={file}:{place}:ro" for file, place in mounts.items()]
        run = [self._program, "run", *fixed, *given, *self._options, self._image, *command]
        return run, [self._program, "rm", "--force", name]

    @staticmethod
    def exit_code(code: int) -> int:
        """The program's, negative for a signal, from the container's."""
        return _SIGNAL - code if code > _SIGNAL else code

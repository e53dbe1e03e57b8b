"""Runs agent programs: agent.command in a process per session, or in one that stays for many.

A program gets these variables:

    OPENAI_BASE_URL, OPENAI_API_KEY    the session's; with agent.programs the key is the program's,
                                       for GET GATEWAY_URL/tasks with the header x-program: PROGRAM
    ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY   the session's, not with agent.programs
    TASK, TASK_FILE                    the task as JSON, and a file with the same; not with
                                       agent.programs. A task that is too long for a variable is in
                                       the file only
    GATEWAY_URL, SESSION_URL           the gateway's, and the session's (for reward and end)

`python` in the command is the run's interpreter. The program runs in a temporary directory, under a
keeper that kills whatever the program leaves behind. With agent.container it runs in a container,
with the image's `python` and files. It may write agent.output_kib; the end of its output is logged
if it fails.
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

from pa_npu.agents.open_sessions import Sessions
from pa_npu.agents.session import Session
from pa_npu.config.sections.rollout import AgentConfig
from pa_npu.control import keeper
from pa_npu.control.tasks import cancel
from pa_npu.control.worker_process import start_kept
from pa_npu.errors import ConfigError
from pa_npu.telemetry.secrets import without_secrets

logger = logging.getLogger(__name__)

COMMAND_KEY = "agent.command"
_KILL_S = 15.0  # until a keeper has ended; it may have a container to remove
_GRACE_S = 5.0  # for a program to end by itself after its session has reached a limit
_SHOWN_OUTPUT = 300  # characters of output that messages show
_RESTARTS = 3  # starts of a program that stays, without a session done in between
_TASK_FILE = "task.json"
_LONGEST_VARIABLE = 2**17 - 2**10  # bytes of a value; Linux allows 128 KiB with the name
_PROXIES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_STORE = "PA_NPU_STORE"  # address of the run's store
_CONTAINER_PROGRAMS = ("docker", "podman")
# Defaults: docker and podman use the last of several equal options.
_DEFAULT_OPTIONS = ("--memory=4g", "--cpus=2", "--pids-limit=512")
_NETWORK = ("--network", "--net")
_SIGNAL = 128  # plus the signal's number: the exit code of a container that a signal killed
_NO_OUTPUT = "it wrote nothing"


class Programs:
    """Starts and ends agent programs. settings: the run's section `agent`.

    key: of the configuration, which says what the programs do, for messages.
    last_output: the end of what a program wrote last, in one line.
    """

    def __init__(self, settings: AgentConfig, sessions: Sessions, key: str = COMMAND_KEY) -> None:
        assert settings.command is not None
        self._containers = Containers(settings) if settings.container is not None else None
        try:
            parts = shlex.split(settings.command)
        except ValueError as error:
            raise ConfigError(
                f"agent.command: {settings.command!r:.80} cannot be read ({error}); correct its "
                "quotes"
            ) from None
        if self._containers is None:
            parts = [_absolute(part) for part in parts]
        self._command = parts
        self._max_bytes = settings.output_kib * 1024
        self._sessions = sessions
        self._key = key
        self.last_output = ""

    async def run(self, session: Session) -> None:
        """Runs one program for the session, until either has ended."""
        variables = {
            "OPENAI_BASE_URL": self._sessions.base_url(session),
            "OPENAI_API_KEY": self._sessions.derive_key(f"session:{session.id}"),
            "SESSION_URL": f"{self._sessions.url}/sessions/{session.id}",
        }
        # Anthropic's clients append /v1/messages
        variables["ANTHROPIC_BASE_URL"] = variables["SESSION_URL"]
        variables["ANTHROPIC_API_KEY"] = variables["OPENAI_API_KEY"]
        code = await self._run(variables, session)
        if session.outcome is None and code is not None:
            if code < 0:
                session.lose()
            else:
                session.end("done" if code == 0 else "failed")

    async def stay(self, number: int) -> None:
        """Keeps program `number` running, which does one task after another, until cancelled.

        Raises ConfigError if it ends _RESTARTS times without having done a session.
        """
        failures = 0
        while failures < _RESTARTS:
            variables = {
                "OPENAI_API_KEY": self._sessions.derive_key(f"program:{number}"),
                "PROGRAM": str(number),
            }
            code = await self._run(variables, None)
            was_useful = self._sessions.program_ended(str(number))
            failures = 0 if was_useful else failures + 1
            logger.warning(
                "%s: program %d ended (%s): %s",
                self._key,
                number,
                code,
                self.last_output or _NO_OUTPUT,
            )
        remedy = "correct it"
        if self._key == COMMAND_KEY:
            remedy += ", or remove agent.programs for a program of one session"
        raise ConfigError(
            f"{self._key}: program {number} ended {_RESTARTS} times without a session done, the "
            f"last time with exit code {code} ({self.last_output or _NO_OUTPUT}); {remedy}"
        )

    async def _run(self, variables: Mapping[str, str], session: Session | None) -> int | None:
        """Runs a program and returns its exit code, negative for a signal.

        Returns None if the session ended before the program.
        """
        with tempfile.TemporaryDirectory(
            prefix="pa_npu-agent-", ignore_cleanup_errors=True
        ) as directory:
            command = self._command
            mounts: dict[Path, str] = {}
            added = {"GATEWAY_URL": self._sessions.url, **self._proxy_exceptions(), **variables}
            if session is not None:
                task = json.dumps(session.task, ensure_ascii=False, default=str).encode()
                file = Path(directory) / _TASK_FILE
                file.write_bytes(task)
                fits = len(task) <= _LONGEST_VARIABLE
                if fits:
                    added["TASK"] = task.decode()
                if self._containers is None:
                    added["TASK_FILE"] = str(file)
                elif not fits:
                    added["TASK_FILE"] = f"/{_TASK_FILE}"
                    mounts[file] = added["TASK_FILE"]

            path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), os.getcwd())))
            env = {**self._inherited(), "PYTHONPATH": path, **added}
            if self._containers is not None:
                command, removal = self._containers.commands(command, added, mounts)
                env[keeper.LAST] = shlex.join(removal)
            process, lifeline = await start_kept(
                command,
                env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=directory,
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
                if not reading.done() or not reading.result():
                    return None
                code = await asyncio.wait_for(process.wait(), _KILL_S)
                return code if self._containers is None else self._containers.exit_code(code)
            finally:
                os.close(lifeline)
                await cancel(waiting)
                await _reap(process)

    def _inherited(self) -> dict[str, str]:
        """Returns this process's environment without secrets.

        Secrets are the keys of hubs, trackers and judges, and URLs with a password.
        """
        inherited = without_secrets(os.environ)
        inherited.pop(_STORE, None)
        return inherited

    def _proxy_exceptions(self) -> dict[str, str]:
        """Returns NO_PROXY, in both spellings, such that requests to the gateway use no proxy."""
        variables: dict[str, str] = {}
        if self._containers is not None and not any(os.environ.get(name) for name in _PROXIES):
            return variables  # a container inherits no variables, hence no proxy
        for name in ("NO_PROXY", "no_proxy"):
            hosts = [host.strip() for host in os.environ.get(name, "").split(",") if host.strip()]
            if hosts != ["*"]:
                hosts += _LOOPBACK
                gateway_host = urlsplit(self._sessions.url).hostname
                if gateway_host:
                    hosts.append(gateway_host)
            variables[name] = ",".join(dict.fromkeys(hosts))
        return variables

    async def _read(self, process: asyncio.subprocess.Process, session: Session | None) -> bool:
        """Reads a program's output. Returns True at its end, False at agent.output_kib."""
        assert process.stdout is not None
        num_bytes = 0
        last = b""
        while data := await process.stdout.read(65536):
            num_bytes += len(data)
            last = (last + data)[-4 * _SHOWN_OUTPUT :]
            line = " ".join(last.decode("utf-8", "replace").split())
            self.last_output = line[-_SHOWN_OUTPUT:]
            if session is not None and num_bytes > self._max_bytes:
                session.end("output")
                return False
        return True


def _absolute(part: str) -> str:
    """Returns a part of the command in a form that is valid in every directory.

    Files get their absolute path, and `python` becomes the run's interpreter.
    """
    if part == "python":
        return sys.executable
    return str(Path(part).absolute()) if Path(part).is_file() else part


async def _reap(process: asyncio.subprocess.Process) -> None:
    """Waits until a process whose lifeline is closed has ended. Drops its remaining output."""
    try:
        await asyncio.wait_for(process.communicate(), _KILL_S)
    except asyncio.TimeoutError:
        logger.warning("an agent's keeper %d has not ended within %g s", process.pid, _KILL_S)


class Containers:
    """Makes the commands of docker or podman that run a program in an image and clean up after it.

    The program gets the gateway's variables and none of the coordinator's. It shares the machine's
    network, because the gateway listens on loopback, unless agent.container names another network.
    It has no capabilities and cannot gain any.
    Raises ConfigError if neither docker nor podman is on PATH.
    """

    def __init__(self, settings: AgentConfig) -> None:
        assert settings.container is not None
        installed = (shutil.which(program) for program in _CONTAINER_PROGRAMS)
        self._program = next(filter(None, installed), None)
        if self._program is None:
            raise ConfigError(
                f"agent.container: {settings.container} needs docker or podman, and neither is on "
                "PATH; install one, or remove the key, so that programs run in processes"
            )
        *users_options, self._image = settings.container.split()
        self._options = list(_DEFAULT_OPTIONS)
        if not any(option.partition("=")[0] in _NETWORK for option in users_options):
            self._options.append("--network=host")
        self._options += users_options

    def commands(
        self, command: Sequence[str], variables: Iterable[str], mounts: Mapping[Path, str]
    ) -> tuple[list[str], list[str]]:
        """Returns the command that runs a program in a new container, and the one that removes it.

        Args:
            variables: names of the variables that the container inherits.
            mounts: files that the program may read, with their paths in the container.
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
        shared = [f"--env={variable}" for variable in variables]
        shared += [f"--volume={file}:{path}:ro" for file, path in mounts.items()]
        run = [self._program, "run", *fixed, *shared, *self._options, self._image, *command]
        removal = [self._program, "rm", "--force", name]
        return run, removal

    @staticmethod
    def exit_code(code: int) -> int:
        """Returns a program's exit code, negative for a signal, from that of its container."""
        return _SIGNAL - code if code > _SIGNAL else code

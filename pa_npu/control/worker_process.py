"""Runs users' code in a process of its own that exchanges JSON lines with this one.

    parent ──lifeline, requests──> keeper ──fork──> python -m MODULE ──fork──> whatever users' code starts
      ^──────────────── replies ───────────────────────────┘

The keeper (keeper.py) kills the process and all that it started when the process ends, when the
parent ends, and on `kill`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pa_npu
from pa_npu.control import keeper
from pa_npu.errors import ConfigError, DeadlineExceeded, PaNpuError

REAP_TIMEOUT_S = 5.0  # a killed process is gone within milliseconds
REPLY_LIMIT_BYTES = 64 << 20
KILLED_STARTS = 3  # so many killed starts in a row are attributed to the code that is loaded

log = logging.getLogger(__name__)


class WorkerProcess:
    """A running process. ready: its first reply; empty if it ended without one."""

    def __init__(self, process: asyncio.subprocess.Process, lifeline: int) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.ready: dict[str, Any] = {}
        self._process = process
        self._lifeline: int | None = lifeline
        self._stdin = process.stdin
        self._stdout = process.stdout

    @classmethod
    async def start(
        cls, arguments: Sequence[str], first: Mapping[str, Any] | None, startup_s: float
    ) -> WorkerProcess:
        """Starts a process and waits for its first reply. One that is killed first starts again.

        Args:
            arguments: a module of this package and its arguments.
            first: the message that it gets first; None sends nothing.
            startup_s: deadline of the first reply; raises DeadlineExceeded after that.
        """
        for number in range(1, KILLED_STARTS + 1):
            worker = cls(*await _start_module(*arguments))
            try:
                if first is not None:
                    worker.write(json_line(first))
                reply = await asyncio.wait_for(worker._stdout.readline(), startup_s)
                if number == KILLED_STARTS or reply or not await worker._was_killed():
                    worker.ready = json.loads(reply) if reply else {}
                    return worker
            except asyncio.TimeoutError:
                await worker.reap()
                raise DeadlineExceeded(
                    f"{arguments[0]} has not answered within {startup_s:.0f} s"
                ) from None
            except BaseException:
                await worker.reap()
                raise
            log.warning(
                "%s was killed while it began (%s); started again",
                arguments[0],
                await worker.reap(),
            )
        raise AssertionError("unreachable: the last start returns or raises")

    async def _was_killed(self) -> bool:
        """Returns whether somebody's signal ended the process, which has closed its output.

        SIGPROF is the end of processor time that the process itself has set.
        """
        with contextlib.suppress(asyncio.TimeoutError):
            code = await asyncio.wait_for(self._process.wait(), REAP_TIMEOUT_S)
            return code < 0 and code != -signal.SIGPROF
        return False

    @property
    def pid(self) -> int:
        """Process id of the keeper, whose descendants are the process and all that it started."""
        return self._process.pid

    def write(self, line: bytes) -> None:
        self._stdin.write(line)

    async def read(self) -> dict[str, Any] | None:
        """Returns the next reply; None if the process died or its output cannot be read."""
        try:
            line = await self._stdout.readline()
            return json.loads(line) if line else None
        except ValueError as error:
            log.warning("the output of a worker process cannot be read (%s); it is replaced", error)
            return None

    def kill(self) -> None:
        """Kills the process and all that it started."""
        lifeline = self._lifeline
        self._lifeline = None
        if lifeline is None:
            return
        os.close(lifeline)
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # wakes a stopped keeper; send_signal would take the exit code from the event loop
                os.kill(self._process.pid, signal.SIGCONT)

    async def reap(self) -> str:
        """Kills the process, waits for its end, and returns in words how it ended."""
        self.kill()
        self._stdin.close()
        try:
            returncode = await asyncio.wait_for(self._process.wait(), REAP_TIMEOUT_S)
        except asyncio.TimeoutError:
            return (
                f"process {self._process.pid} did not end within {REAP_TIMEOUT_S:.0f} s of "
                "being killed"
            )
        return f"exit code {returncode}" if returncode >= 0 else signal.Signals(-returncode).name


async def start_kept(
    command: Sequence[str], environment: Mapping[str, str], **options: Any
) -> tuple[asyncio.subprocess.Process, int]:
    """Starts a command under a keeper. Returns the keeper's process and its lifeline.

    The lifeline is a file descriptor; closing it kills the command and all that it started.
    options: of asyncio.create_subprocess_exec.
    """
    read_end, lifeline = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            keeper.__file__,
            str(read_end),
            "0",
            "",
            "--",
            *command,
            env=environment,
            pass_fds=(read_end,),
            start_new_session=True,  # a Ctrl-C in the terminal is for the parent only
            **options,
        )
    except BaseException:
        os.close(lifeline)
        raise
    finally:
        os.close(read_end)
    return process, lifeline


def run_trial(
    module: str, request: bytes, limit_s: float, subject: str, too_slow: str
) -> str | None:
    """Tries a user's code in a process of its own, because it may do anything.

    Returns in one line what is wrong with the code; None if nothing is.
    Raises ConfigError if the process does not answer.

    Args:
        module: run with python -m; it calls `serve`.
        request: the input of the process.
        limit_s: deadline of the answer.
        subject: names the key and the code in error messages.
        too_slow: rule and remedy for the error message if limit_s is reached.
    """
    output, code = asyncio.run(_run(module, request, limit_s))
    if code is None:
        raise ConfigError(f"{subject}: {too_slow}")
    try:
        problem: str | None = json.loads(output)["problem"]
    except (ValueError, LookupError, TypeError):
        raise ConfigError(
            f"{subject}: the process that tried it ended with {code}; correct what its output says"
        ) from None
    return problem


async def _run(module: str, request: bytes, limit_s: float) -> tuple[bytes, int | None]:
    """Returns a process's output for this request, and its exit code; None after limit_s."""
    process, lifeline = await _start_module(module)
    try:
        output, _ = await asyncio.wait_for(process.communicate(request), limit_s)
        return output, process.returncode
    except asyncio.TimeoutError:
        return b"", None
    finally:
        os.close(lifeline)
        await process.wait()


async def _start_module(*arguments: str) -> tuple[asyncio.subprocess.Process, int]:
    """Starts a module of this package under a keeper, with pipes to its input and output.

    arguments: the module and its arguments.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "limit": REPLY_LIMIT_BYTES}
    return await start_kept([sys.executable, "-m", *arguments], _environment(), **pipes)


def json_line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _environment() -> dict[str, str]:
    """Returns this process's environment, with this package importable in every directory."""
    package_root = str(Path(pa_npu.__file__).resolve().parents[1])
    search_path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), package_root)))
    return {**os.environ, "PYTHONPATH": search_path}


# The functions below run in the started process, which hides its pipes from users' code.


def private_pipes() -> tuple[Any, Any]:
    """Returns (input, output), and hides stdin and stdout from users' code and child processes."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies


def send(replies: Any, message: Mapping[str, Any]) -> None:
    """Writes one reply, a line of JSON."""
    replies.write(json_line(message))
    replies.flush()


def serve(attempt: Callable[[bytes], None]) -> NoReturn:
    """Answers one `run_trial` with {"problem": null or one line}, and ends the process.

    The line is the message of a PaNpuError that the attempt raises. What the user's code prints
    goes to stderr, and its threads do not delay the end.
    """
    requests, replies = private_pipes()
    problem = None
    try:
        attempt(requests.read())
    except PaNpuError as error:
        problem = str(error)
    send(replies, {"problem": problem})
    os._exit(0)

"""A process that runs users' code: JSON lines both ways, and an end that takes along all that it started.

    parent ──lifeline, requests──> keeper ──fork──> python -m MODULE ──fork──> whatever users' code starts
      ^──────────────── replies ───────────────────────────┘

Its keeper (keeper.py) kills all of it when the process ends, when this one does, and on `kill`.
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
KILLED_STARTS = 3  # in a row, before what is loaded is taken to be the cause

log = logging.getLogger(__name__)


class WorkerProcess:
    """A running process. ready: its first reply, empty where it ended before one."""

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
        """Return it with its first reply. One that is killed while it loads is started again.

        Args:
            arguments: a module of this package and what it is given.
            first: what it reads first, as a line of JSON; None where that is nothing.
            startup_s: until its first reply; raises DeadlineExceeded after that.
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
        """Whether a signal ended the process, which has closed its output."""
        with contextlib.suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(self._process.wait(), REAP_TIMEOUT_S) < 0
        return False

    @property
    def pid(self) -> int:
        """Of its keeper, below which all of it is."""
        return self._process.pid

    def write(self, line: bytes) -> None:
        self._stdin.write(line)

    async def read(self) -> dict[str, Any] | None:
        """Return the next reply; None when there will be no more, because the process died or its
        output makes no sense.
        """
        try:
            line = await self._stdout.readline()
            return json.loads(line) if line else None
        except ValueError as error:
            log.warning("the output of a worker process cannot be read (%s); it is replaced", error)
            return None

    def kill(self) -> None:
        """Kill the process and all that it started."""
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            os.close(lifeline)
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    # its keeper may have been stopped. Not by send_signal, which takes the exit
                    # code from the event loop
                    os.kill(self._process.pid, signal.SIGCONT)

    async def reap(self) -> str:
        """Kill, wait for the end, and say how the process ended."""
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
    """A keeper with this command, and its lifeline: the descriptor with whose end all of it ends.

    options: of asyncio.create_subprocess_exec.
    """
    theirs, lifeline = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            keeper.__file__,
            str(theirs),
            "0",
            "",
            "--",
            *command,
            env=environment,
            pass_fds=(theirs,),
            start_new_session=True,  # a Ctrl-C in the terminal is for the parent
            **options,
        )
    except BaseException:
        os.close(lifeline)
        raise
    finally:
        os.close(theirs)
    return process, lifeline


def run_trial(module: str, request: bytes, limit_s: float, what: str, too_slow: str) -> str | None:
    """Have a user's code tried in a process of its own, because it may do anything: what is wrong
    with it in one line, or None.

    The process is python -m `module`, which serves the request (`serve`).

    what: names key and code; too_slow: rule and remedy where the limit is reached. Raises
    ConfigError, beginning with `what`, where the process does not answer.
    """
    output, code = asyncio.run(_run(module, request, limit_s))
    if code is None:
        raise ConfigError(f"{what}: {too_slow}")
    try:
        problem: str | None = json.loads(output)["problem"]
    except (ValueError, LookupError, TypeError):
        raise ConfigError(
            f"{what}: the process that tried it ended with {code}; correct what its output says"
        ) from None
    return problem


async def _run(module: str, request: bytes, limit_s: float) -> tuple[bytes, int | None]:
    """Return what a process wrote that was given this request, and its exit code; None where the
    limit was reached.
    """
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
    """A module of this package and what it is given, kept, with pipes to its input and from its
    output.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "limit": REPLY_LIMIT_BYTES}
    return await start_kept([sys.executable, "-m", *arguments], _environment(), **pipes)


def json_line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _environment() -> dict[str, str]:
    """Return ours, with this package importable wherever the working directory is."""
    package_root = str(Path(pa_npu.__file__).resolve().parents[1])
    search_path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), package_root)))
    return {**os.environ, "PYTHONPATH": search_path}


# The process itself: it keeps its pipes from users' code.


def private_pipes() -> tuple[Any, Any]:
    """(input, output): takes stdin and stdout away from everything that runs in this process later,
    children included.
    """
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies


def send(replies: Any, message: Mapping[str, Any]) -> None:
    """One reply, a line of JSON."""
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


def serve(attempt: Callable[[bytes], None]) -> NoReturn:
    """Answer one `run_trial`: {"problem": null | one line}, which a PaNpuError of the attempt says.

    It is the process's whole life. What the user's code prints goes to stderr, and its threads do
    not keep anybody waiting.
    """
    requests, replies = private_pipes()
    problem = None
    try:
        attempt(requests.read())
    except PaNpuError as error:
        problem = str(error)
    send(replies, {"problem": problem})
    os._exit(0)

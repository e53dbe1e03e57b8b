"""Processes that a benchmark starts: engines and runs, ended with everything in them, and why they failed, read from their logs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_LONGEST_REASON = 300  # characters

# What ranks, engines' processes and loggers put in front of a line; indentation behind it stays.
_IN_FRONT = re.compile(
    r"^(?:\[rank\d+\]: ?|\([\w-]+ pid=\d+\) ?|(?:INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d "
    r"\[[^\]]*\] ?)*"
)
_ERROR = re.compile(r"^(?:failed: .|[\w.]*(?:Error|Exception)\b:? *\S)")
# These only say that another process has failed, which has said why.
_OF_ANOTHER = re.compile(r"ChildFailedError|See root cause above")
_WARNING = re.compile(r"Warning\b|^W\d{4} |^\[W\d|^WARNING")


def end_on_sigterm() -> None:
    """SIGTERM ends this program as an exception does, so that it ends what it has started; a second
    one is not heeded.
    """

    def end(number: int, _: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


@contextlib.contextmanager
def started(
    command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Yields a process with a group of its own, which is ended with everything in it: interrupted
    first, so that it can clean up.
    """
    with log.open("w") as file:
        process = subprocess.Popen(
            list(command),
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def serve(process: subprocess.Popen[bytes], urls: Sequence[str], within_s: float) -> bool:
    """Returns whether all these answer in time; waits, unless the process ends before."""
    deadline = time.monotonic() + within_s
    while not all(map(healthy, urls)):
        if process.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def reason_of(log: Path) -> str:
    """Returns why the program that wrote this log has failed.

    That is the exception of its last traceback that is not about another process, else the last line
    that names an error, else the last one that is no warning. What a program prints while it ends
    comes after all these.
    """
    lines = [
        _IN_FRONT.sub("", line.rstrip()) for line in log.read_text(errors="replace").splitlines()
    ]
    lines = [line for line in lines if line.strip()]
    raised = _raised(lines)
    others = [line.strip() for line in lines]
    for candidates in (
        [line for line in raised if not _OF_ANOTHER.search(line)],
        [line for line in others if _ERROR.match(line) and not _OF_ANOTHER.search(line)],
        raised,
        [line for line in others if not _WARNING.search(line)],
        others,
    ):
        if candidates:
            return candidates[-1][:_LONGEST_REASON]
    return "nothing was written"


def _raised(lines: Sequence[str]) -> list[str]:
    """Returns the lines that end tracebacks."""
    raised = []
    inside = False
    for line in lines:
        if line.startswith("Traceback (most recent call last)"):
            inside = True
        elif inside and not line[0].isspace():
            raised.append(line)
            inside = False
    return raised

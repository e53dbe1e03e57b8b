"""Running a rank's write in the background: a forked process with a deadline, or in place for a synchronous save."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_REAP_TIMEOUT_S = 5.0  # a killed process is gone within milliseconds


class WriteFailed(Exception):
    """This rank's files could not be written; the message says why."""


class Writer(Protocol):
    def poll(self) -> list[Any] | None:
        """The result when the write is done, None while it runs. Raises WriteFailed."""

    def cancel(self) -> None:
        """Stop, if it still runs; nothing is written afterwards."""


class InPlace:
    """A write that happens when it is first asked for."""

    def __init__(self, write: Callable[[], list[Any]]) -> None:
        self._write = write

    def poll(self) -> list[Any]:
        try:
            return self._write()
        except Exception as error:  # OSError, and whatever torch.save makes of one
            raise WriteFailed(root_cause(error)) from error

    def cancel(self) -> None:
        """Nothing runs."""


class Forked:
    """A write in a forked process, which has this one's memory as it was: training may change the weights meanwhile.

    It dies with this process, so that no writer of a killed run interferes with the next one.
    Raises WriteFailed when it cannot be started.
    """

    def __init__(self, write: Callable[[], list[Any]], timeout_s: float) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe(duplex=False)
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._process = context.Process(
            target=_child, args=(write, theirs, os.getpid()), name="checkpoint-writer", daemon=True
        )
        try:
            self._process.start()
        except OSError as error:
            raise WriteFailed(f"its writer process cannot be started ({error.strerror})") from error
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def poll(self) -> list[Any] | None:
        if self._connection.poll():
            return self._result()
        if time.monotonic() > self._deadline:
            raise WriteFailed(
                f"its writer process {self.pid} has not finished within {self._timeout_s:g} s (checkpoint.timeout_s)"
            )
        return None

    def cancel(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join(_REAP_TIMEOUT_S)
        self._connection.close()

    def _result(self) -> list[Any]:
        try:
            written, reason = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(_REAP_TIMEOUT_S)
            raise WriteFailed(f"its writer process {self.pid} ended with exit code {self._process.exitcode}") from None
        self.cancel()
        if reason is not None:
            raise WriteFailed(reason)
        return list(written)


def root_cause(error: BaseException) -> str:
    """The operating system's word for it where there is one below torch's."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror + (f": {cause.filename}" if cause.filename else "")
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _child(write: Callable[[], list[Any]], connection: Connection, parent: int) -> None:
    """Only reads memory and writes files: no collective, no device call, no thread pool of the parent's survives a fork."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    gc.disable()  # a collected tensor of the parent's would be freed on its device
    try:
        result: tuple[list[Any] | None, str | None] = (write(), None)
    except Exception as error:  # handed over and raised there
        result = (None, root_cause(error))
    connection.send(result)
    connection.close()

"""Runs a rank's write in the background: a forked process with a deadline."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import sys
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_WRITTEN = b"written"
_REAP_TIMEOUT_S = 5.0  # a killed process is gone within milliseconds, unless its disk hangs
_REASON_BYTES = 4000  # less than a pipe holds, so that the writer never waits for its reader


class WriteFailed(Exception):
    """This rank's files could not be written; the message states the reason."""


class Forked:
    """A write in a forked process.

    The process has this one's memory as it was, so training may change the weights meanwhile. It
    dies with this process, so that no writer of a killed run interferes with the next one. Raises
    WriteFailed if it cannot be started.
    """

    def __init__(self, write: Callable[[], None], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._ended = False
        parent = os.getpid()
        try:
            self._read_end, write_end = os.pipe()
            self.pid = os.fork()
        except OSError as error:
            raise WriteFailed(f"its writer process cannot be started ({error.strerror})") from error
        if self.pid == 0:
            _child(write, write_end, parent)
        os.close(write_end)

    def poll(self) -> bool:
        """Returns whether the write is done. Raises WriteFailed."""
        if self._ended:
            return True
        # select.select takes no descriptor beyond 1,023, which a trainer may exceed.
        end = select.poll()
        end.register(self._read_end, select.POLLIN)
        readable = end.poll(0)
        if readable:
            word = os.read(self._read_end, _REASON_BYTES)
            status = self._reap()
            if word == _WRITTEN:
                return True
            raise WriteFailed(
                word.decode(errors="replace")
                or f"its writer process {self.pid} {_in_words(status)}"
            )
        if time.monotonic() > self._deadline:
            raise WriteFailed(
                f"its writer process {self.pid} has not finished within {self._timeout_s:g} s "
                "(trainer.wait_timeout_s)"
            )
        return False

    def cancel(self) -> None:
        """Stops the write, if it still runs; nothing is written afterwards."""
        if not self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._reap()

    def _reap(self) -> int | None:
        """Returns the exit status of a process that has closed its pipe or was killed.

        Returns None if the kernel does not end it.
        """
        os.close(self._read_end)
        self._ended = True
        deadline = time.monotonic() + _REAP_TIMEOUT_S
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return status
            time.sleep(0.002)
        return None


def root_cause(error: BaseException) -> str:
    """Returns the operating system's reason below torch's error, if there is one."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            if not cause.filename:
                return cause.strerror
            return f"{cause.strerror}: {cause.filename}"
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _child(write: Callable[[], None], write_end: int, parent: int) -> None:
    """Runs the write in the child process, and ends it.

    It only reads memory and writes files: no collective, device call or thread pool of the parent
    survives a fork.
    """
    word = b""
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        gc.disable()  # a collected tensor of the parent's would be freed on its device
        if os.getppid() == parent:
            write()
            word = _WRITTEN
    except BaseException as error:
        # Raised by the parent in `poll`; nothing of the parent's stack may go on in the child.
        word = root_cause(error).encode()[:_REASON_BYTES]
    finally:
        with contextlib.suppress(OSError):
            os.write(write_end, word)
        os._exit(0 if word == _WRITTEN else 1)


def _in_words(status: int | None) -> str:
    if status is None:
        return "has stopped, but does not end"
    if os.WIFSIGNALED(status):
        return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with {os.WEXITSTATUS(status)}"

r"""Compares expressions by math-verify, in a process that the system ends at a limit of CPU time.

    caller ──(response, reference)──> comparer ──verdict──> caller
                                         │ too long, or too much memory: the system ends it, and the
                                         │ verdict is "not equal"
    keeper of the comparer ──fork──> the next comparer, with math-verify loaded already

A comparison can take for ever inside one call of C (`\left(10^{10}\right)!`), which no exception
ends. The limit counts only the comparer's own processor time, so no verdict depends on how busy the
machine is.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import pa_npu
from pa_npu.config.sections.reward import COMPARED_CPU_S
from pa_npu.control.worker_process import private_pipes, send
from pa_npu.data.limits import memory_limit
from pa_npu.errors import PaNpuError

_MEMORY_BYTES = 2 << 30  # more than the process has when it starts to compare
_ATTEMPTS = 3  # at a comparison whose process somebody else has ended
_LONGEST_WAIT_S = 600.0  # for a process that has no processor, or was stopped
_ROOT = re.compile(r"(?<![²³⁴-⁹])√\s*(?:\(([^()]{1,200})\)|(\d{1,100}|[A-Za-z](?![A-Za-z])))")
_WARM_UP = (
    ("x+1", "1+x"),
    (r"\frac{\sqrt{3}}{2}", r"\sin 60^\circ"),
    (r"2 \le x < 3", "[2,3)"),
    (r"\{1, 2\}", r"x = 1 \text{ or } x = 2"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}"),
)
# time; memory, as GMP takes it; recursion in C
_TOO_MUCH = (signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV)


@lru_cache(maxsize=4096)
def equal_expressions(response: str, reference: str) -> bool:
    """Returns whether math-verify finds two expressions equal.

    Returns False for one that it cannot read, or not within its limits.
    """
    return _COMPARER.ask(_with_roots(response), _with_roots(reference))


def _with_roots(text: str) -> str:
    """Returns a formula with `√18` and `√(x+1)` as LaTeX, which math-verify reads."""
    return _ROOT.sub(lambda root: rf"\sqrt{{{root[1] or root[2]}}}", text)


def preload() -> None:
    """Starts the process, which takes seconds; otherwise the first comparison starts it."""
    _COMPARER.start()


class _Comparer:
    """The process and the requests to it, one at a time and from any thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        with self._lock:
            self._start()

    def ask(self, response: str, reference: str) -> bool:
        with self._lock:
            for _ in range(_ATTEMPTS):
                self._start()
                try:
                    reply = self._exchange(
                        {"response": response, "reference": reference, "cpu_s": COMPARED_CPU_S}
                    )
                except BaseException:  # its reply must not be taken for that to a later request
                    self._end()
                    raise
                if reply is None:
                    self._end()
                elif "equal" in reply:
                    return bool(reply["equal"])
                elif reply["signal"] in _TOO_MUCH:
                    return False
        raise PaNpuError(
            f"a comparison by math-verify was ended from outside {_ATTEMPTS} times; look at the "
            "machine's memory and its log"
        )

    def end(self) -> None:
        with self._lock:
            self._end()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        paths = [os.environ.get("PYTHONPATH"), str(Path(pa_npu.__file__).resolve().parents[1])]
        search_path = os.pathsep.join(path for path in paths if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pa_npu.rewards.comparer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": search_path, "PYTHONHASHSEED": "0"},
        )
        if self._read() is None:
            self._end()
            raise PaNpuError(
                "math-verify cannot be loaded in a process of its own; look at the output above"
            )

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the reply; None where the process is gone."""
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return None
        return self._read()

    def _read(self) -> dict[str, Any] | None:
        assert self._process is not None and self._process.stdout is not None
        output = select.poll()  # select.select takes no descriptor beyond 1,023
        output.register(self._process.stdout, select.POLLIN)
        line = self._process.stdout.readline() if output.poll(1000 * _LONGEST_WAIT_S) else b""
        return json.loads(line) if line.endswith(b"\n") else None

    def _end(self) -> None:
        process = self._process
        self._process = None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


_COMPARER = _Comparer()
atexit.register(_COMPARER.end)


# The process itself


def main() -> int:
    """Keeps one comparer after another, each with math-verify loaded, until its input ends."""
    requests, replies = private_pipes()
    _load()
    send(replies, {"ready": True})
    while True:
        comparer = os.fork()
        if comparer == 0:
            _compare_all(requests, replies)
            os._exit(0)
        _, status = os.waitpid(comparer, 0)
        if not os.WIFSIGNALED(status):
            return os.WEXITSTATUS(status)
        send(replies, {"signal": os.WTERMSIG(status)})


def _compare_all(requests: Any, replies: Any) -> None:
    """Answers requests until there are no more.

    The system ends the process if a request takes too long.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with memory_limit(_MEMORY_BYTES):
        while line := requests.readline():
            request = json.loads(line)
            signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
            try:
                equal = _are_equal(request["response"], request["reference"])
            except (MemoryError, RecursionError):
                equal = False
            signal.setitimer(signal.ITIMER_PROF, 0)
            send(replies, {"equal": equal})


def _load() -> None:
    """Imports math-verify and compares once, so that no request pays for its preparation."""
    # math-verify logs a traceback for each expression that it cannot read.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    for response, reference in _WARM_UP:
        _are_equal(f"\\boxed{{{response}}}", reference)


def _are_equal(response: str, reference: str) -> bool:
    """Returns whether a response equals a reference, by math-verify."""
    import math_verify

    expected = _parsed(f"\\boxed{{{reference}}}")
    return bool(expected) and bool(
        math_verify.verify(
            expected, _parsed(response), timeout_seconds=None, allow_set_relation_comp=True
        )
    )


@lru_cache(maxsize=4096)
def _parsed(text: str) -> list[Any]:
    import math_verify

    return math_verify.parse(text, parsing_timeout=None)


if __name__ == "__main__":
    sys.exit(main())

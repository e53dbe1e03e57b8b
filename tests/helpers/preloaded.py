"""Processes that need not import: each is a fork of one that has imported what trainers and coordinators do, and nothing else.

    python -m tests.helpers.preloaded     reads requests from its standard input and ends with it

Importing takes longer than what most tests let a rank or a coordinator compute. A fork inherits
modules: no threads, no groups, no random state that it does not seed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_LONGEST_WAIT_S = 3600.0  # poll takes milliseconds in 32 bits
MODULES = (
    "tests.helpers.megatron",  # first: it prepares Megatron
    "pa_npu.backends.megatron.backend",
    "pa_npu.checkpoints.saving",
    "pa_npu.config.load",
    "pa_npu.coordinator.main",
    "pa_npu.samples.rollout_buffer",
    "pa_npu.trainer.assemble",
    "pa_npu.trainer.loop",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
)


class Rank:
    """A started process, used as subprocess.Popen is."""

    def __init__(self, server: Server, pid: int) -> None:
        self.pid = pid
        self._server = server

    def poll(self) -> int | None:
        return self._server.code(self.pid, 0.0)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout_s: float | None = None) -> int:
        """The exit code, negative for a signal. Raises subprocess.TimeoutExpired."""
        code = self._server.code(self.pid, timeout_s)
        if code is None:
            raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout_s or 0.0)
        return code

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The process that forks, and what it says about its forks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.preloaded"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        atexit.register(self.close)
        self._codes: dict[int, int] = {}

    def start(self, module: str, argument: str, env: dict[str, str], log: Path) -> Rank:
        assert self._process.stdin is not None
        request = {"module": module, "argument": argument, "env": env, "log": str(log)}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        while "started" not in (output := self._read(120.0)):
            self._note(output)
        return Rank(self, output["started"])

    def code(self, pid: int, timeout_s: float | None) -> int | None:
        """The exit code of a fork; None if it still runs after the time."""
        deadline = time.monotonic() + (1e9 if timeout_s is None else timeout_s)
        while pid not in self._codes:
            if not (output := self._read(max(0.0, deadline - time.monotonic()))):
                return None
            self._note(output)
        return self._codes[pid]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    def _note(self, message: dict[str, int]) -> None:
        if message:
            self._codes[message["ended"]] = message["code"]

    def _read(self, timeout_s: float) -> dict[str, int]:
        """The next line, one write of the server's; {} if none comes in time."""
        output = self._process.stdout
        assert output is not None
        ready = select.poll()  # the test process may have more than 1,023 descriptors
        ready.register(output, select.POLLIN)
        if not ready.poll(1000 * min(timeout_s, _LONGEST_WAIT_S)):
            return {}
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(output.fileno(), 1)
            assert byte, "the process that forks ranks has ended; its error is above"
            line += byte
        message: dict[str, int] = json.loads(line)
        return message


@functools.cache
def _server() -> Server:
    return Server()


def start_rank(module: str, argument: str, env: dict[str, str], log: Path) -> Rank:
    """`python -m module argument` with its output in `log`, but for the imports."""
    return _server().start(module, argument, env, log)


def main() -> None:
    for module in MODULES:
        importlib.import_module(module)
    assert threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1, (
        "threads do not survive a fork"
    )
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    wake, wakened = os.pipe()
    os.set_blocking(wakened, False)
    signal.set_wakeup_fd(wakened)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: set[int] = set()
    requests = b""
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            for pid in list(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    running.discard(pid)
                    _answer(answers, ended=pid, code=os.waitstatus_to_exitcode(status))
        if 0 in ready:
            if not (read := os.read(0, 2**16)):
                break
            *lines, requests = (requests + read).split(b"\n")
            for line in lines:
                if not (pid := os.fork()):
                    _be_rank(json.loads(line))
                running.add(pid)
                _answer(answers, started=pid)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def _answer(answers: Any, **fields: int) -> None:
    answers.write(json.dumps(fields).encode() + b"\n")


def _be_rank(request: dict[str, Any]) -> None:
    """Never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(request["env"])
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.closerange(3, log)  # the pipe of the answers; others are the log alone
        sys.path[:0] = filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep))
        sys.argv = [request["module"], request["argument"]]
        importlib.import_module(request["module"]).main(request["argument"])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()

"""One reward worker process as its parent sees it: start, hand over, read, kill. And the check before a run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pa_npu
from pa_npu.config.schema import Config
from pa_npu.config.sections import RewardFunction
from pa_npu.errors import DataError, DeadlineExceeded
from pa_npu.rewards.functions import FunctionSpec, build_function, function_specs

STARTUP_TIMEOUT_S = 120.0  # importing math-verify and a user's module on a busy machine
REAP_TIMEOUT_S = 5.0  # a killed process is gone within milliseconds
REPLY_LIMIT_BYTES = 64 << 20

log = logging.getLogger(__name__)


class WorkerProcess:
    """A running pa_npu.rewards.worker whose functions are loaded, in a process group of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout

    @classmethod
    async def start(cls, specs: tuple[FunctionSpec, ...]) -> WorkerProcess:
        """Raises DataError where a function cannot be used, DeadlineExceeded where loading takes too long."""
        process = await asyncio.create_subprocess_exec(
            *_command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            limit=REPLY_LIMIT_BYTES,
            env=_environment(),
            start_new_session=True,  # so that what a reward function starts can be killed with it
        )
        worker = cls(process)
        try:
            worker.write(_first_line(specs))
            _check_first_reply(await asyncio.wait_for(worker._stdout.readline(), STARTUP_TIMEOUT_S))
        except asyncio.TimeoutError:
            await worker.reap()
            raise DeadlineExceeded(
                f"a reward worker did not load its functions within {STARTUP_TIMEOUT_S:.0f} s; make them import faster"
            ) from None
        except BaseException:
            await worker.reap()
            raise
        return worker

    def write(self, line: bytes) -> None:
        self._stdin.write(line)

    async def read(self) -> dict[str, Any] | None:
        """The next reply; None when there will be no more, because the process died or its output makes no sense."""
        try:
            line = await self._stdout.readline()
            return json.loads(line) if line else None
        except ValueError as error:
            log.warning("a reward worker's output cannot be read (%s); it is replaced", error)
            return None

    def kill(self) -> None:
        """Kills the process and what it started. Also for a dead one: its children may still run."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def reap(self) -> str:
        """Kills, waits for the end, and says how the process ended."""
        self.kill()
        self._stdin.close()
        try:
            returncode = await asyncio.wait_for(self._process.wait(), REAP_TIMEOUT_S)
        except asyncio.TimeoutError:
            return f"process {self._process.pid} did not end within {REAP_TIMEOUT_S:.0f} s of being killed"
        return f"exit code {returncode}" if returncode >= 0 else signal.Signals(-returncode).name


def check_reward_functions(config: Config) -> None:
    """Loads the reward functions as a worker will. Raises DataError where one cannot be used; call it before a run."""
    specs = reward_specs(config.reward.functions)
    own = tuple(spec for spec in specs if ":" in spec.name)
    for spec in specs:
        if spec not in own:
            build_function(spec)
    if not own:
        return
    names = ", ".join(spec.name for spec in own)
    try:
        finished = subprocess.run(
            _command(), input=_first_line(own), stdout=subprocess.PIPE, env=_environment(), timeout=STARTUP_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise DataError(
            f"reward.functions: importing {names} takes more than {STARTUP_TIMEOUT_S:.0f} s; make the import faster"
        ) from None
    _check_first_reply(finished.stdout.partition(b"\n")[0])


def reward_specs(functions: Iterable[RewardFunction]) -> tuple[FunctionSpec, ...]:
    return function_specs(functions)


def _command() -> list[str]:
    return [sys.executable, "-m", "pa_npu.rewards.worker", "--parent", str(os.getpid())]


def _environment() -> dict[str, str]:
    """Ours, with this package importable wherever the working directory is."""
    package_root = str(Path(pa_npu.__file__).parents[1])
    search_path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), package_root)))
    return {**os.environ, "PYTHONPATH": search_path}


def _first_line(specs: tuple[FunctionSpec, ...]) -> bytes:
    return json.dumps({"functions": [asdict(spec) for spec in specs]}).encode() + b"\n"


def _check_first_reply(line: bytes) -> None:
    if not line:
        raise DataError(
            "reward.functions: the reward worker died while loading them; correct what its output above says"
        )
    reply = json.loads(line)
    if "unusable" in reply:
        raise DataError(reply["unusable"])

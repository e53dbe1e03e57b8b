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
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pa_npu
from pa_npu.config.schema import Config
from pa_npu.config.sections import RewardFunction
from pa_npu.errors import DataError, DeadlineExceeded
from pa_npu.rewards.functions import FunctionSpec, build_function, function_specs
from pa_npu.rewards.types import RewardInput

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


def check_reward_functions(config: Config, sample: RewardInput | None = None) -> None:
    """Loads the reward functions as a worker will, and rewards one group with those of the user's. Call it before a run.

    sample: a group of the dataset; None only loads them. Raises UserError where one cannot be used.
    """
    specs = reward_specs(config.reward.functions)
    own = tuple(spec for spec in specs if ":" in spec.name)
    for spec in specs:
        if spec not in own:
            build_function(spec)
    if not own:
        return
    names = ", ".join(spec.name for spec in own)
    lines = [_first_line(own)] + ([group_line(0, sample)] if sample else [])
    limit_s = STARTUP_TIMEOUT_S + config.reward.timeout_s
    output = b""
    try:
        finished = subprocess.run(
            _command(), input=b"".join(lines), stdout=subprocess.PIPE, env=_environment(), timeout=limit_s
        )
        output = finished.stdout
    except subprocess.TimeoutExpired as expired:
        if not expired.stdout:
            raise DataError(
                f"reward.functions: importing {names} takes more than {limit_s:.0f} s; make the import faster"
            ) from None
        output = expired.stdout
    first, _, rest = output.partition(b"\n")
    _check_first_reply(first)
    if sample is None:
        return
    if not rest:
        raise DataError(
            f"reward.functions: {names} did not reward a group of the dataset: the worker died or took more than "
            f"{limit_s:.0f} s; correct what its output above says"
        )
    for label, error in json.loads(rest)["errors"].items():
        raise DataError(f"reward.functions: {label} fails for a group of the dataset: {error}; correct the function")


def sample_group(prompt: str, answer: str, row: Mapping[str, Any], size: int) -> RewardInput:
    """A made-up group to try reward functions on: every other response is right."""
    responses = [f"#### {answer}" if number % 2 == 0 else "I do not know." for number in range(size)]
    return RewardInput(prompt, answer, responses, [8] * size, row)


def group_line(identity: int, group: RewardInput) -> bytes:
    """A group as a worker reads it."""
    fields = {
        "prompt": group.prompt,
        "answer": group.answer,
        "responses": list(group.responses),
        "response_tokens": [int(length) for length in group.response_tokens],
        "row": dict(group.row),
    }
    return json.dumps({"id": identity, "group": fields}, default=str).encode() + b"\n"


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

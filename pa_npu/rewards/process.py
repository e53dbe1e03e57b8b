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
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pa_npu
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError, DataError, DeadlineExceeded
from pa_npu.rewards.functions import CONCURRENT, FunctionSpec, build_function, function_specs
from pa_npu.rewards.types import RewardInput

STARTUP_TIMEOUT_S = 120.0  # importing math-verify and a user's module on a busy machine
REAP_TIMEOUT_S = 5.0  # a killed process is gone within milliseconds
REPLY_LIMIT_BYTES = 64 << 20
KILLED_STARTS = 3  # in a row, before what is loaded is taken to be the cause

log = logging.getLogger(__name__)


class WorkerProcess:
    """A running worker whose functions are loaded, in a process group of its own. ready: its first reply."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.ready: dict[str, Any] = {}
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout

    @classmethod
    async def start(cls, first_line: bytes, module: str = "pa_npu.rewards.worker") -> WorkerProcess:
        """first_line: what the process of the module reads first. One that is killed while it loads is started again.

        Raises DataError where a function cannot be used, DeadlineExceeded where loading takes too long.
        """
        for number in range(1, KILLED_STARTS + 1):
            process = await asyncio.create_subprocess_exec(
                *_command(module),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                limit=REPLY_LIMIT_BYTES,
                env=_environment(),
                start_new_session=True,  # so that what a reward function starts can be killed with it
            )
            worker = cls(process)
            try:
                worker.write(first_line)
                reply = await asyncio.wait_for(worker._stdout.readline(), STARTUP_TIMEOUT_S)
                if number == KILLED_STARTS or reply or not await worker._was_killed():
                    worker.ready = _check_first_reply(reply)
                    return worker
            except asyncio.TimeoutError:
                await worker.reap()
                raise DeadlineExceeded(
                    f"a reward worker did not load its functions within {STARTUP_TIMEOUT_S:.0f} s; make them import faster"
                ) from None
            except BaseException:
                await worker.reap()
                raise
            log.warning(
                "a reward worker was killed while it loaded its functions (%s); started again", await worker.reap()
            )
        raise AssertionError("unreachable: the last start returns or raises")

    async def _was_killed(self) -> bool:
        """Of a process that has closed its output: whether a signal ended it."""
        with contextlib.suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(self._process.wait(), REAP_TIMEOUT_S) < 0
        return False

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


def check_reward_functions(config: Config, sample: RewardInput | None = None, ask_judge: bool = True) -> list[str]:
    """Loads the reward functions as the workers will, and rewards one group with the user's, the judge and the sandbox.

    Call it before a run; it returns the lines that the run begins with. sample: a group of the dataset; None only loads them.
    ask_judge: False sends the judge nothing. Raises UserError where one cannot be used.
    """
    specs = function_specs(config.reward, config.run.dir)
    own = tuple(spec for spec in specs if ":" in spec.name)
    for spec in specs:
        if spec not in own and spec.name not in CONCURRENT:
            build_function(spec)
    variable = config.reward.judge.api_key_variable
    if variable and not os.environ.get(variable):
        raise ConfigError(
            f"reward.judge.api_key_variable: {variable} is not set in the environment; export the judge's key in it"
        )
    concurrent: list[str] = []
    if own:
        concurrent = _try(config, "pa_npu.rewards.worker", first_line(own), own, sample)["concurrent"]
    waiting = tuple(
        spec
        for spec in specs
        if spec.label in concurrent or spec.name == "code" or (spec.name == "judge" and ask_judge and sample)
    )
    if waiting:
        line = concurrent_first_line(waiting, config.reward.timeout_s, trial=True)
        ready = _try(config, "pa_npu.rewards.concurrent_worker", line, waiting, sample)
        if ready["isolation"]:
            return [f"reward.code: programs of responses run at isolation {ready['isolation']}"]
    return []


def _try(
    config: Config, module: str, first: bytes, specs: tuple[FunctionSpec, ...], sample: RewardInput | None
) -> dict[str, Any]:
    """One start of a worker's process, with one group where there is one. Returns its first reply."""
    names = ", ".join(spec.name for spec in specs)
    lines = [first] + ([group_line(0, sample)] if sample else [])
    limit_s = STARTUP_TIMEOUT_S + config.reward.timeout_s
    if any(spec.name == "judge" for spec in specs):
        limit_s += config.reward.judge.attempts * config.reward.judge.timeout_s
    output = b""
    try:
        finished = subprocess.run(
            _command(module), input=b"".join(lines), stdout=subprocess.PIPE, env=_environment(), timeout=limit_s
        )
        output = finished.stdout
    except subprocess.TimeoutExpired as expired:
        if not expired.stdout:
            raise DataError(
                f"reward.functions: importing {names} takes more than {limit_s:.0f} s; make the import faster"
            ) from None
        output = expired.stdout
    head, *others = output.splitlines() or [b""]
    ready = _check_first_reply(head)
    if sample is None:
        return ready
    replies = [reply for reply in map(json.loads, others) if "id" in reply]
    if not replies:
        raise DataError(
            f"reward.functions: {names} did not reward a group of the dataset: the worker died or took more than "
            f"{limit_s:.0f} s; correct what its output above says"
        )
    if replies[0].get("fatal"):
        raise DataError(replies[0]["fatal"])
    for label, error in replies[0]["errors"].items():
        what = f"reward.judge.url: {config.reward.judge.url}" if label == "judge" else f"reward.functions: {label}"
        remedy = "let its server answer" if label == "judge" else "correct the function"
        raise DataError(f"{what} fails for a group of the dataset: {error}; {remedy}")
    return ready


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


def _command(module: str) -> list[str]:
    return [sys.executable, "-m", module, "--parent", str(os.getpid())]


def _environment() -> dict[str, str]:
    """Ours, with this package importable wherever the working directory is."""
    package_root = str(Path(pa_npu.__file__).parents[1])
    search_path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), package_root)))
    return {**os.environ, "PYTHONPATH": search_path}


def first_line(specs: tuple[FunctionSpec, ...]) -> bytes:
    """What pa_npu.rewards.worker reads first."""
    return json.dumps({"functions": [asdict(spec) for spec in specs]}).encode() + b"\n"


def concurrent_first_line(specs: tuple[FunctionSpec, ...], timeout_s: float, *, trial: bool) -> bytes:
    """What pa_npu.rewards.concurrent_worker reads first."""
    fields = {"functions": [asdict(spec) for spec in specs], "timeout_s": timeout_s, "trial": trial}
    return json.dumps(fields).encode() + b"\n"


def _check_first_reply(line: bytes) -> dict[str, Any]:
    if not line:
        raise DataError(
            "reward.functions: the reward worker died while loading them; correct what its output above says"
        )
    reply: dict[str, Any] = json.loads(line)
    if "unusable" in reply:
        raise DataError(reply["unusable"])
    return reply

"""Real launchers in tests: started in sessions of their own, looked into through /proc, and ended with all they started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pa_npu.control.keeper import descendants
from tests.helpers.processes import running
from tools import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
# part of the command line of an engine's HTTP server
ENGINE_SERVERS = {"vllm": "api_server", "transformers": "engines.transformers.server"}


class Launched:
    """A launcher in a session of its own, its output in a file."""

    def __init__(
        self,
        directory: Path,
        command: str,
        *arguments: str,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.output_file = directory / f"{command}.out"
        argv = [sys.executable, "-m", "pa_npu.launcher", command, *arguments]
        with self.output_file.open("wb") as file:
            self.popen = subprocess.Popen(
                argv,
                cwd=ROOT,
                env={**os.environ, **(variables or {})},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.seen: set[int] = set()

    @property
    def output(self) -> str:
        return self.output_file.read_text()

    def family(self) -> dict[int, str]:
        """Every process below the launcher, with its command line or name."""
        actual = {pid: command_line(pid) for pid in descendants(self.popen.pid)}
        self.seen |= actual.keys()
        return actual

    def wait_for(self, condition: Callable[[], bool], description: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.popen.poll() is None, (
                f"the launcher ended before {description}:\n{self.output}"
            )
            assert time.monotonic() < deadline, (
                f"{description}: not within {timeout_s} s\n{self.output}"
            )
            time.sleep(0.1)

    def assert_nothing_survives(self, timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while alive := {pid: command_line(pid) for pid in self.seen if running(pid)}:
            assert time.monotonic() < deadline, f"still running after {timeout_s} s: {alive}"
            time.sleep(0.05)

    def close(self) -> None:
        if self.popen.poll() is None:
            self.family()
            self.popen.kill()
            self.popen.wait()
        self.assert_nothing_survives()


def command_line(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()
        )
    except OSError:
        return ""


def environment(pid: int) -> str:
    """Reads the environment that a process was started with."""
    try:
        return (
            Path(f"/proc/{pid}/environ").read_bytes().replace(b"\0", b"\n").decode(errors="replace")
        )
    except OSError:
        return ""


def random_tiny(directory: Path, *options: str) -> Path:
    """Makes model/ with random weights, train.jsonl and test.jsonl in the directory, for
    `settings`.
    """
    arguments = [
        "--out",
        str(directory),
        "--random",
        "--train-questions",
        "64",
        "--test-questions",
        "8",
        *options,
    ]
    assert make_tiny_model.main(arguments) == 0
    return directory


def settings(tiny: Path, run_dir: Path, **others: object) -> list[str]:
    """Returns the arguments of a small run.

    It computes every group: a random model earns equal rewards in most of them. A transformers
    engine starts in seconds; a test of vLLM says rollout__backend="vllm".
    """
    keys: dict[str, object] = {
        "run.dir": run_dir,
        "run.device": "cpu",
        "model.path": tiny / "model",
        "model.dtype": "fp32",
        "data.train": tiny / "train.jsonl",
        "data.test": tiny / "test.jsonl",
        "data.max_prompt_tokens": 32,
        "rollout.backend": "transformers",
        "rollout.responses_per_prompt": 2,
        "rollout.max_response_tokens": 8,
        "rollout.max_num_batched_tokens": 4096,
        "rollout.kv_cache_gib": 0.125,
        "schedule.iterations": 2,
        "schedule.prompts_per_iteration": 4,
        "schedule.skip_zero_advantage": "false",
    } | {name.replace("__", "."): value for name, value in others.items()}
    return [f"{key}={value}" for key, value in keys.items()]


def find(run: Launched, name: str) -> int | None:
    """The process with this in its command line (vLLM renames the one that holds the model to
    EngineCore).
    """
    return next(
        (pid for pid, line in run.family().items() if name in line and "keeper.py" not in line),
        None,
    )

"""The path of a new user from a clone to the comparison of two runs, with the commands of the documents, timed.

    HYPOTHESIS_PROFILE=nightly python -m pytest -s tests/integration/test_new_user.py       prints the table of seconds

The environment is the one that the test runs in; PA_NPU_NEW_USER_INSTALLS=1 makes one in the clone,
as the first command does for users, which downloads some gigabytes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pa_npu.telemetry.progress import progress_line
from tests.helpers.documented_commands import documented

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 1500.0
INSTALLS = os.environ.get("PA_NPU_NEW_USER_INSTALLS") == "1"
FIRST = "bash launch/run_grpo_tiny.sh"
SYNC = "bash launch/run_grpo_tiny.sh schedule.iterations=5 schedule.stream=false run.dir=runs/sync"
VIEW = "pa-npu view runs/grpo_tiny"
REPORT = "pa-npu report runs/grpo_tiny runs/sync"
EVALUATE = (
    "pa-npu evaluate --model .cache/tiny/model --data sums=.cache/tiny/test.jsonl --device cpu "
    "model.dtype=fp32 rollout.kv_cache_gib=0.25 evaluate.samples=4"
)
DIFFERENCE = (
    "pa-npu evaluate --results runs/grpo_tiny/evaluations/version_000020.parquet --compare "
    "runs/grpo_tiny/evaluations/version_000000.parquet"
)
OWN = (
    "pa-npu run --config configs/grpo_tiny.yaml data.train=mine.csv data.question_column=sum "
    "data.answer_column=result schedule.iterations=2 schedule.prompts_per_iteration=16 "
    "schedule.compare_iterations=0 run.dir=runs/mine 'reward.functions=[{name: math}, {name: "
    '"my_rewards:brevity", weight: 0.1}]\''
)


@dataclass(frozen=True)
class Step:
    name: str
    seconds: float


class NewUser:
    """Types commands in a clone, and looks at the clock. lines: what the last one printed, with
    seconds since its start.
    """

    def __init__(self, directory: Path) -> None:
        self.home = directory / "pa_npu"
        self.steps: list[Step] = []
        self.lines: list[tuple[float, str]] = []
        programs = directory / "bin"
        programs.mkdir()
        program = programs / "pa-npu"  # what an installation puts there
        python = self.home / ".venv" / "bin" / "python" if INSTALLS else Path(sys.executable)
        program.write_text(f'#!/bin/sh\nexec {python} -m pa_npu.launcher "$@"\n')
        program.chmod(0o755)
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PA_NPU", "PYTEST"))
        }
        if not INSTALLS:
            environment |= {"PA_NPU_INSTALL": "0", "PA_NPU_VENV": sys.prefix}
        self.environment = environment | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.home),
            "COLUMNS": "80",
        }

    def took(self, name: str, seconds: float) -> None:
        self.steps.append(Step(name, seconds))
        print(f"{seconds:8.1f} s  {name}", flush=True)

    def types(
        self, command: str, until: Callable[[str], bool] | None = None
    ) -> subprocess.Popen[str]:
        """Runs it to its end, or to a line; the process, which in the latter case goes on."""
        start_s = time.monotonic()
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.home,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # as in a terminal, even where these tests run in a shell's background, which has
            # children ignore it
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert process.stdout is not None
        self.lines = []
        for line in process.stdout:
            self.lines.append((time.monotonic() - start_s, line.rstrip("\n")))
            assert self.lines[-1][0] < LIMIT_S, self.output
            if until is not None and until(line):
                return process
        assert process.wait(60) == 0, self.output
        return process

    def when(self, pattern: str) -> float:
        """Seconds from the command to the first line like this."""
        actual = [seconds for seconds, line in self.lines if re.search(pattern, line)]
        assert actual, f"no line like {pattern}:\n{self.output}"
        return actual[0]

    @property
    def output(self) -> str:
        return "\n".join(line for _, line in self.lines)


def iteration_line(total: int) -> str:
    """A pattern of the line that a run of so many iterations prints after its first."""
    return rf"^iteration +0 \( *1/{total}\) \|"


@pytest.mark.parametrize("total", [2, 20])
def test_the_lines_that_are_waited_for_are_those_that_runs_print(total: int) -> None:
    output = [
        progress_line({"iteration": done}, total, 1.0).removeprefix("| ") for done in range(2)
    ]
    assert [bool(re.search(iteration_line(total), line)) for line in output] == [True, False], (
        output
    )


@pytest.mark.nightly
def test_the_path_of_a_new_user(tmp_path: Path) -> None:
    shown = documented()
    for command in (FIRST, SYNC, VIEW, REPORT, EVALUATE, DIFFERENCE):
        assert command in shown, "this test types what the documents show"
    user = NewUser(tmp_path)

    start_s = time.monotonic()
    if shutil.which("git") and (ROOT / ".git").exists():
        subprocess.run(["git", "clone", "-q", str(ROOT), str(user.home)], check=True, timeout=120)
    else:
        shutil.copytree(ROOT, user.home, ignore=shutil.ignore_patterns(".*", "runs", "build"))
    user.took("clone", time.monotonic() - start_s)

    user.types(FIRST)
    user.took("first command: the first thing that it says", user.lines[0][0])
    user.took("... its checks are done, what is trained is said", user.when(r"^first prompt"))
    user.took("... the engine is up", user.when(r"engine-0 ready"))
    user.took("... the first line of training", user.when(iteration_line(20)))
    user.took("... the end", user.lines[-1][0])

    page = user.types(VIEW, until=lambda line: "http://" in line)
    try:
        url = re.search(r"http://\S+", user.output)
        assert url is not None
        with urllib.request.urlopen(url[0].rstrip(".,;"), timeout=30) as answer:
            assert answer.status == 200 and b"<html" in answer.read()
        user.took("the page is open", user.lines[-1][0])
    finally:
        os.killpg(page.pid, signal.SIGINT)
        page.wait(30)

    rows = [f"{a} + {b} = ?,{a + b}" for a in range(10, 50) for b in (7, 21)]
    (user.home / "mine.csv").write_text("sum,result\n" + "\n".join(rows) + "\n")
    (user.home / "my_rewards.py").write_text(
        "def brevity(group):\n    return [float(len(t) < 40) for t in group.responses]\n"
    )
    user.types(OWN)
    user.took("own data and own reward: the first line of training", user.when(iteration_line(2)))
    user.took("... the end", user.lines[-1][0])
    records = [
        json.loads(line)
        for line in (user.home / "runs/mine/metrics.jsonl").read_text().splitlines()
    ]
    assert [set(record["rewards"]) for record in records] == [{"math", "my_rewards:brevity"}] * 2

    user.types(SYNC)
    user.took("the synchronous baseline", user.lines[-1][0])
    user.types(REPORT)
    user.took("comparison of two runs", user.lines[-1][0])
    assert "grpo_tiny" in user.output and "sync" in user.output

    user.types(DIFFERENCE)
    user.took("what was learned, question by question", user.lines[-1][0])
    gained = re.search(r"greedy: \+(\d\.\d+) \(\+", user.output)
    assert gained is not None and float(gained[1]) > 0.3, user.output
    user.types(EVALUATE)
    user.took("evaluation without training", user.lines[-1][0])
    assert re.search(r"^sums pass@4: 0\.\d+", user.output, re.MULTILINE), user.output

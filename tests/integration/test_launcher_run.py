"""Real runs through the command line: a whole one, and ends that nobody asked for; nothing survives any of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pa_npu.launcher.keeper import descendants
from tests.helpers.sockets import listening, outside_loopback
from tools import make_tiny_model

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc"),
]

ROOT = Path(__file__).parents[2]
RUN_TIMEOUT_S = 400.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    arguments = ["--out", str(directory), "--random", "--train-questions", "64", "--test-questions", "8"]
    assert make_tiny_model.main(arguments) == 0
    return directory


class Launched:
    """A launcher in a session of its own, its output in a file."""

    def __init__(self, directory: Path, command: str, *arguments: str) -> None:
        self.output_file = directory / f"{command}.out"
        argv = [sys.executable, "-m", "pa_npu.launcher", command, *arguments]
        with self.output_file.open("wb") as file:
            self.popen = subprocess.Popen(argv, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        self.seen: set[int] = set()

    @property
    def output(self) -> str:
        return self.output_file.read_text()

    def family(self) -> dict[int, str]:
        """Every process below the launcher, with its command line or name."""
        found = {pid: command_line(pid) for pid in descendants(self.popen.pid)}
        self.seen |= found.keys()
        return found

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.popen.poll() is None, f"the launcher ended before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s\n{self.output}"
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
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def settings(tiny: Path, run_dir: Path, **others: object) -> list[str]:
    keys: dict[str, object] = {
        "run.dir": run_dir,
        "run.device": "cpu",
        "model.path": tiny / "model",
        "model.dtype": "fp32",
        "data.train": tiny / "train.jsonl",
        "data.test": tiny / "test.jsonl",
        "data.max_prompt_tokens": 32,
        "rollout.responses_per_prompt": 2,
        "rollout.max_response_tokens": 8,
        "rollout.max_num_batched_tokens": 4096,
        "rollout.kv_cache_gib": 0.125,
        "schedule.iterations": 2,
        "schedule.prompts_per_iteration": 4,
    } | {name.replace("__", "."): value for name, value in others.items()}
    return [f"{key}={value}" for key, value in keys.items()]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    launched: list[Launched] = []

    def start(command: str, *arguments: str) -> Launched:
        launched.append(Launched(tmp_path, command, *arguments))
        return launched[-1]

    yield start
    for item in launched:
        item.close()


def test_engines_serve_two_runs_and_leave_on_ctrl_c(
    launch: Callable[..., Launched], tiny: Path, tmp_path: Path
) -> None:
    """Whole runs, one after the other, on engines that outlive them; nobody listens but on loopback; the key stays secret."""
    sockets: dict[str, set[tuple[int, str, int]]] = {"engines": set(), "run": set()}
    exposed: dict[tuple[int, str, int], str] = {}

    def look(name: str, launched: Launched) -> None:
        family = launched.family() | {launched.popen.pid: "launcher"}
        found = listening(family)
        sockets[name] |= found
        exposed.update({socket: family[socket[0]] for socket in outside_loopback(found)})

    engines = launch("engines", *settings(tiny, tmp_path / "shared"))
    engines.wait_for(lambda: "engine-0 ready" in engines.output, "the engine is ready", RUN_TIMEOUT_S)
    attach = next(line for line in engines.output.splitlines() if "rollout.attach=" in line).split()[-2:]
    key = (tmp_path / "shared-engines" / "api_key").read_text().strip()
    for number in (1, 2):
        directory = tmp_path / f"run{number}"
        run = launch("run", *settings(tiny, directory), *attach)
        while run.popen.poll() is None:
            look("run", run)
            look("engines", engines)
            assert engines.popen.poll() is None, engines.output
            time.sleep(0.5)
        assert run.popen.returncode == 0, run.output
        run.assert_nothing_survives()
        records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        assert [record["iteration"] for record in records] == [0, 1]
        assert "iteration 1/2" in run.output and "iteration 2/2" in run.output and "TPSPD" in run.output
        names = {path.name for path in directory.iterdir()}
        assert {"config.yaml", "samples.jsonl", "timeline.json", "logs", "checkpoints", "hf"} <= names
        assert json.loads((directory / "timeline.json").read_text())["traceEvents"]
    assert len(sockets["engines"]) >= 1 and len({pid for pid, _, _ in sockets["run"]}) >= 2, sockets
    assert not exposed, f"listening beyond loopback: {exposed}"
    written = [
        path for path in tmp_path.rglob("*") if path.is_file() and path.suffix in (".log", ".out", ".yaml", ".jsonl")
    ]
    assert written and not [path for path in written if key in path.read_text(errors="replace")], (
        "keys are not for logs"
    )
    engines.family()
    began = time.monotonic()
    engines.popen.send_signal(signal.SIGINT)
    assert engines.popen.wait(15) == 128 + signal.SIGINT
    assert time.monotonic() - began < 10
    engines.assert_nothing_survives()
    assert not list(tmp_path.rglob("api_key"))


@pytest.mark.parametrize(
    ("victim", "started", "number", "code", "said"),
    [
        ("launcher", "EngineCore", signal.SIGKILL, -signal.SIGKILL, None),
        ("launcher", "trainer.main", signal.SIGTERM, 128 + signal.SIGTERM, "SIGTERM: stopping"),
        ("EngineCore", "EngineCore", signal.SIGKILL, 1, "failed: engine-0 ended"),
        ("trainer.main", "trainer.main", signal.SIGKILL, 1, "failed: trainer-0 ended: killed by SIGKILL"),
        (
            "rollout.coordinator",
            "rollout.coordinator",
            signal.SIGKILL,
            1,
            "failed: coordinator ended: killed by SIGKILL",
        ),
    ],
)
def test_an_end_while_starting_leaves_nothing(
    launch: Callable[..., Launched],
    tiny: Path,
    tmp_path: Path,
    victim: str,
    started: str,
    number: signal.Signals,
    code: int,
    said: str | None,
) -> None:
    """EngineCore, which vLLM starts in its own session, is the one that is easily left behind."""
    run = launch("run", *settings(tiny, tmp_path / "run"))
    run.wait_for(lambda: find(run, started) is not None, f"{started} has started", RUN_TIMEOUT_S)
    pid = run.popen.pid if victim == "launcher" else find(run, victim)
    began = time.monotonic()
    os.kill(pid or 0, number)
    assert run.popen.wait(30) == code, run.output
    run.assert_nothing_survives()
    assert time.monotonic() - began < (10 if victim == "launcher" else 30)
    assert said is None or said in run.output, run.output


def find(run: Launched, name: str) -> int | None:
    """The process with this in its command line (vLLM renames the one that holds the model to EngineCore)."""
    return next((pid for pid, line in run.family().items() if name in line and "keeper.py" not in line), None)

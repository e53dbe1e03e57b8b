"""Real runs through the command line: a whole one, and ends that nobody asked for; nothing survives any of them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.launched import Launched, environment, find, settings
from tests.helpers.sockets import listening, outside_loopback

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc"),
]

RUN_TIMEOUT_S = 400.0
END_TIMEOUT_S = 120.0  # a second or two where nothing else runs
PARTS = {
    "api_server": True,
    "coordinator.main": True,
    "trainer.main": False,
    "rewards.worker": False,
}  # know the key


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    launched: list[Launched] = []

    def start(command: str, *arguments: str) -> Launched:
        launched.append(Launched(tmp_path, command, *arguments))
        return launched[-1]

    yield start
    for item in launched:
        item.close()


@pytest.mark.nightly  # engines that join a run and leave it: test_elastic_engines.py
def test_engines_serve_two_runs_and_leave_on_ctrl_c(
    launch: Callable[..., Launched], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole runs, one after the other, on vLLM that outlives them; nobody listens but on loopback;
    the key stays secret.
    """
    sockets: dict[str, set[tuple[int, str, int]]] = {"engines": set(), "run": set()}
    exposed: dict[tuple[int, str, int], str] = {}
    knows_key: dict[str, bool] = {}  # by command line

    def look(name: str, launched: Launched) -> None:
        family = launched.family() | {launched.popen.pid: "launcher"}
        actual = listening(family)
        sockets[name] |= actual
        exposed.update({socket: family[socket[0]] for socket in outside_loopback(actual)})
        knows_key.update({line: key in environment(pid) for pid, line in launched.family().items()})

    engines = launch("engines", *settings(tiny, tmp_path / "shared", rollout__backend="vllm"))
    engines.wait_for(
        lambda: "engine-0 ready" in engines.output, "the engine is ready", RUN_TIMEOUT_S
    )
    attach = next(word for word in engines.output.split() if word.startswith("rollout.attach="))
    key = (tmp_path / "shared-engines" / "api_key").read_text().strip()
    monkeypatch.setenv("VLLM_API_KEY", key)
    for number in (1, 2):
        directory = tmp_path / f"run{number}"
        run = launch("run", *settings(tiny, directory, rollout__backend="vllm"), attach)
        while run.popen.poll() is None:
            look("run", run)
            look("engines", engines)
            assert engines.popen.poll() is None, engines.output
            time.sleep(0.5)
        assert run.popen.returncode == 0, run.output
        run.assert_nothing_survives()
        records = [
            json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()
        ]
        assert [record["iteration"] for record in records] == [0, 1]
        kinds = ("trainer_host", "engine_host", "coordinator")
        for record in records:
            assert all(record[f"memory_{kind}_bytes"] > 2**20 for kind in kinds), (
                "memory of every kind that is told"
            )
            assert record["memory_engine_host_bytes"] > 500 * 2**20, (
                "the server and what it started"
            )
        assert (
            "iteration 0 (1/2)" in run.output
            and "iteration 1 (2/2)" in run.output
            and "TPSPD" in run.output
        )
        names = {path.name for path in directory.iterdir()}
        assert {
            "config.yaml",
            "samples.jsonl",
            "timeline.json",
            "logs",
            "checkpoints",
            "hf",
        } <= names
        assert json.loads((directory / "timeline.json").read_text())["traceEvents"]
    assert len(sockets["engines"]) >= 1 and len({pid for pid, _, _ in sockets["run"]}) >= 2, sockets
    assert not exposed, f"listening beyond loopback: {exposed}"
    written = [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and path.suffix in (".log", ".out", ".yaml", ".jsonl")
    ]
    parts = {part: [knows for line, knows in knows_key.items() if part in line] for part in PARTS}
    assert {part: any(known) for part, known in parts.items() if known} == PARTS, (
        "only those that need the key have it"
    )
    assert written and not [path for path in written if key in path.read_text(errors="replace")], (
        "keys are not for logs"
    )
    engines.family()
    engines.popen.send_signal(signal.SIGINT)
    assert engines.popen.wait(END_TIMEOUT_S) == 128 + signal.SIGINT
    engines.assert_nothing_survives()
    assert not list(tmp_path.rglob("api_key"))


@pytest.mark.parametrize(
    ("backend", "victim", "started", "number", "code", "message"),
    [
        pytest.param(
            "vllm",
            "launcher",
            "EngineCore",
            signal.SIGKILL,
            -signal.SIGKILL,
            None,
            marks=pytest.mark.nightly,
        ),
        (
            "transformers",
            "launcher",
            "trainer.main",
            signal.SIGTERM,
            128 + signal.SIGTERM,
            "SIGTERM: stopping",
        ),
        pytest.param(
            "vllm",
            "EngineCore",
            "EngineCore",
            signal.SIGKILL,
            1,
            "failed: engine-0 ended",
            marks=pytest.mark.nightly,
        ),
        (
            "transformers",
            "trainer.main",
            "trainer.main",
            signal.SIGKILL,
            1,
            "failed: trainer-0 ended: killed by SIGKILL",
        ),
        pytest.param(
            "transformers",
            "coordinator.main",
            "coordinator.main",
            signal.SIGKILL,
            1,
            "failed: coordinator ended: killed by SIGKILL",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_an_end_while_starting_leaves_nothing(
    launch: Callable[..., Launched],
    tiny: Path,
    tmp_path: Path,
    backend: str,
    victim: str,
    started: str,
    number: signal.Signals,
    code: int,
    message: str | None,
) -> None:
    """EngineCore, which vLLM starts in its own session, is the one that is easily left behind."""
    run = launch("run", *settings(tiny, tmp_path / "run", rollout__backend=backend))
    run.wait_for(lambda: find(run, started) is not None, f"{started} has started", RUN_TIMEOUT_S)
    pid = run.popen.pid if victim == "launcher" else find(run, victim)
    os.kill(pid or 0, number)
    assert run.popen.wait(END_TIMEOUT_S) == code, run.output
    run.assert_nothing_survives()
    assert message is None or message in run.output, run.output

"""Engines that join a job and leave it by the command that users have; stand-ins in place of vLLM, all else real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pa_npu.control.keeper import descendants
from tests.helpers.coordinator_run import GROUPS, ROOT, WAIT_S, Run
from tests.helpers.launched import command_line, running
from tests.helpers.stand_in_engine import API_KEY, stand_in_engines
from tools.stand_in import Speed, write_interpreter

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc"),
]
ITERATIONS = 6


class Joiner:
    """`pa-npu join`, with its output in a file."""

    def __init__(self, run: Run, directory: Path, number: int, *options: str) -> None:
        interpreter = write_interpreter(directory / f"python-{number}", "--step-s", "0.02", "--vocab-size", "100")
        self.output_file = directory / f"joiner-{number}.out"
        address = f"127.0.0.1:{run.server.port}"
        argv = [
            sys.executable,
            "-m",
            "pa_npu.launcher",
            "join",
            address,
            "--python",
            str(interpreter),
            *options,
        ]
        with self.output_file.open("wb") as file:
            self.popen = subprocess.Popen(
                argv,
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
            )
        self.seen: dict[int, str] = {}

    @property
    def output(self) -> str:
        return self.output_file.read_text()

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert self.popen.poll() is None and time.monotonic() < deadline, f"{what}:\n{self.output}"
            time.sleep(0.05)

    def wait_joined(self) -> None:
        self.wait_for(lambda: "joined as engine" in self.output, "it joins")
        self.seen = {pid: command_line(pid) for pid in descendants(self.popen.pid)}

    def server(self) -> int:
        """The process of the stand-in, whose parent is the keeper."""
        (pid,) = [pid for pid, line in self.seen.items() if "stand_in.py" in line and "keeper" not in line]
        return pid

    def end(self) -> int:
        """The exit code, and nothing is left."""
        code = self.popen.wait(WAIT_S)
        left = {pid: line for pid, line in self.seen.items() if running(pid)}
        assert not left, f"still running: {left}"
        return code


@pytest.fixture
def started() -> Iterator[list[Any]]:
    things: list[Any] = []
    yield things
    for thing in things:
        process = thing.process if isinstance(thing, Run) else thing.popen
        process.kill()
        process.wait(10)


def begin(directory: Path, engines: list[Any], started: list[Any]) -> Run:
    data = {"train": str(directory / "train.jsonl"), "test": None, "max_prompt_tokens": 16}
    schedule = {"iterations": ITERATIONS, "prompts_per_iteration": GROUPS}
    run = Run(directory, engines, data=data, schedule=schedule)
    started.append(run)
    key_file = run.dir / "api_key"
    key_file.write_text(API_KEY + "\n")
    key_file.chmod(0o600)
    run.announce_weights()
    return run


def iterate(run: Run, version: int) -> dict[str, Any]:
    """The publish of a version, and its iteration, whole."""
    run.announce(version, {"loss": 0.0} if version else None)
    published = run.published(version)
    assert published["done"], published
    assert sorted(group.index for group in run.consume(version)) == list(range(GROUPS)), "I2"
    return published


def test_an_engine_joins_with_one_command_serves_from_the_next_publish_and_leaves_when_it_has_finished(
    tmp_path, started
):
    with stand_in_engines(1, Speed(step_s=0.02)) as engines:
        run = begin(tmp_path, engines, started)
        run.announce(0, None)
        assert run.published(0)["workers"] == 1
        assert engines[0].wait_for_request(lambda _: True, WAIT_S)
        engines[0].engine.speed = Speed(step_s=0.5)  # so that the iteration lasts until the other has joined
        joiner = Joiner(run, tmp_path, 0)
        started.append(joiner)
        joiner.wait_joined()
        engines[0].engine.speed = Speed(step_s=0.02)
        assert sorted(group.index for group in run.consume(0)) == list(range(GROUPS)), "I2"
        assert [API_KEY in line for line in joiner.seen.values()].count(True) == 0, "no key on a command line"
        assert iterate(run, 1)["workers"] == 2
        run.announce(2, {"loss": 0.0})
        assert run.published(2)["workers"] == 2
        seeds = len(engines[0].engine.requests)
        assert engines[0].wait_for_request(lambda request: len(engines[0].engine.requests) > seeds, WAIT_S)
        joiner.popen.send_signal(signal.SIGTERM)
        assert len(run.consume(2)) == GROUPS
        assert joiner.end() == 0, joiner.output
        assert "SIGTERM: leaving" in joiner.output and "has left after" in joiner.output
        assert API_KEY not in joiner.output
        logs = list((run.dir / "logs").glob("joined-127.0.0.1-*.log"))
        assert len(logs) == 2 and all(API_KEY not in log.read_text() for log in logs)
        assert iterate(run, 3)["workers"] == 1
        run.announce(4, {"loss": 0.0})
        run.published(4)
        run._wait_until(
            lambda: len(run.lines("metrics.jsonl")) == 4, "iteration 3 is recorded, which comes after the publish"
        )
        records = {record["iteration"]: record for record in run.lines("metrics.jsonl")}
        run.process.kill()
        output = run.end()
    assert "is lost" not in output, "what was in flight on it was finished"
    url = next(line for line in output.splitlines() if "has left" in line).split("engine ")[1].split()[0]
    assert records[1]["engines"][url]["requests"] >= GROUPS // 4, "it took its part"
    assert [records[i]["devices"] for i in range(4)] == [3, 4, 4, 3]


def test_an_engine_whose_server_dies_says_so_and_one_whose_run_ends_just_ends(tmp_path, started):
    with stand_in_engines(1, Speed(step_s=0.02)) as engines:
        run = begin(tmp_path, engines, started)
        run.announce(0, None)
        assert run.published(0)["workers"] == 1
        assert engines[0].wait_for_request(lambda _: True, WAIT_S)
        engines[0].engine.speed = Speed(step_s=0.5)  # so that the iteration lasts until the others have joined
        joiners = [Joiner(run, tmp_path, number) for number in range(2)]
        started += joiners
        for joiner in joiners:
            joiner.wait_joined()
        engines[0].engine.speed = Speed(step_s=0.02)
        run.consume(0)
        assert iterate(run, 1)["workers"] == 3
        run.announce(2, {"loss": 0.0})
        run.published(2)
        os.kill(joiners[0].server(), signal.SIGKILL)
        assert sorted(group.index for group in run.consume(2)) == list(range(GROUPS)), "others took its groups"
        assert joiners[0].end() == 1
        assert "server ended: killed by SIGKILL; last lines of" in joiners[0].output
        assert "stand-in engine ready" in joiners[0].output, "the log's last lines are shown"
        assert iterate(run, 3)["workers"] == 2
        run.process.kill()
        run.end()
        del run.server
        assert joiners[1].end() == 0
        assert "has ended; stopping http" in joiners[1].output, joiners[1].output
        assert "Traceback" not in joiners[0].output + joiners[1].output

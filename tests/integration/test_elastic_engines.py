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
from tests.helpers.coordinator_run import ROOT, WAIT_S, Run
from tests.helpers.launched import command_line
from tests.helpers.processes import running
from tests.helpers.stand_in_engine import API_KEY
from tools.stand_in import Speed, write_interpreter

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc"),
]


class Joiner:
    """`pa-npu join`, with its output in a file."""

    def __init__(self, run: Run, directory: Path, number: int, *options: str) -> None:
        interpreter = write_interpreter(
            directory / f"python-{number}", "--step-s", "0.01", "--vocab-size", "100"
        )
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

    def wait_for(self, condition: Callable[[], Any], description: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert self.popen.poll() is None and time.monotonic() < deadline, (
                f"{description}:\n{self.output}"
            )
            time.sleep(0.05)

    def wait_joined(self) -> None:
        self.wait_for(lambda: "joined as engine" in self.output, "it joins")
        self.seen = {pid: command_line(pid) for pid in descendants(self.popen.pid)}

    def server(self) -> int:
        """The process of the stand-in, whose parent is the keeper."""
        (pid,) = [
            pid for pid, line in self.seen.items() if "stand_in.py" in line and "keeper" not in line
        ]
        return pid

    def end(self) -> int:
        """The exit code, and nothing is left."""
        code = self.popen.wait(WAIT_S)
        left = {pid: line for pid, line in self.seen.items() if running(pid)}
        assert not left, f"still running: {left}"
        return code


@pytest.fixture
def join() -> Iterator[Callable[[Run, int], list[Joiner]]]:
    """Starts so many engines with the command, each once the one before has joined."""
    joiners: list[Joiner] = []

    def started(run: Run, number: int) -> list[Joiner]:
        joiners.extend(Joiner(run, run.directory, index) for index in range(number))
        for joiner in joiners:
            joiner.wait_joined()
        return joiners

    yield started
    for joiner in joiners:
        joiner.popen.kill()
        joiner.popen.wait(10)


def test_engines_join_with_one_command_and_leave_when_they_have_finished_die_or_end_with_the_run(
    start: Callable[..., Run], join: Callable[[Run, int], list[Joiner]]
) -> None:
    run = start(speed=Speed(step_s=0.01), schedule={"iterations": 6})
    (first,) = run.engines
    assert run.begin()["workers"] == 1
    run.wait_for_group()
    # so that the iteration lasts until the others have joined
    first.engine.speed = Speed(step_s=0.5)
    leaves, dies, stays = joiners = join(run, 3)
    first.engine.speed = Speed(step_s=0.01)
    run.consume(0)
    assert not any(API_KEY in line for joiner in joiners for line in joiner.seen.values()), (
        "no key on a command line"
    )
    assert run.publish(1)["workers"] == 4, "they serve from the next publish on"
    run.consume(1)

    assert run.publish(2)["workers"] == 4
    seeds = len(first.requests)
    assert first.wait_for_request(lambda request: len(first.requests) > seeds, WAIT_S)
    leaves.popen.send_signal(signal.SIGTERM)
    run.consume(2)
    assert leaves.end() == 0, leaves.output
    assert "SIGTERM: leaving" in leaves.output and "has left after" in leaves.output
    assert "is lost" not in run.output, "what was in flight on it was finished"

    assert run.publish(3)["workers"] == 3
    os.kill(dies.server(), signal.SIGKILL)
    assert dies.end() == 1
    run.consume(3)  # others take its groups
    assert "server ended: killed by SIGKILL; last lines of" in dies.output
    assert "stand-in engine ready" in dies.output, "the log's last lines are shown"

    assert run.publish(4)["workers"] == 2
    run.consume(4)
    run.publish(5)
    run.wait_until(
        lambda: len(run.records) == 5, "iteration 4 is recorded, which comes after the publish"
    )
    records = run.records
    run.process.kill()
    output = run.end()
    del run.server
    assert stays.end() == 0
    assert "has ended; stopping http" in stays.output, stays.output
    message = "".join(joiner.output for joiner in joiners)
    assert API_KEY not in message and "Traceback" not in message
    logs = list((run.dir / "logs").glob("joined-127.0.0.1-*.log"))
    assert len(logs) == 6 and all(API_KEY not in log.read_text() for log in logs)
    url = (
        next(line for line in output.splitlines() if "has left" in line)
        .split("engine ")[1]
        .split()[0]
    )
    assert records[1]["engines"][url]["requests"] > 0, "it took its part"
    assert [records[i]["devices"] for i in range(5)] == [3, 6, 6, 5, 4]

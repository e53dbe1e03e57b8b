"""Recovery with small fake commands under the real supervisor: what is started again, how often, and what never is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.roster import PREFIX, Roster
from pa_npu.launcher.process import recovery
from pa_npu.launcher.process.commands import Command, Startable
from pa_npu.launcher.process.console import Console
from pa_npu.launcher.process.process_tree import ProcessTree
from pa_npu.launcher.process.recovery import Attempt, Recovery, RestartBudget
from pa_npu.launcher.process.supervisor import Supervisor, stop_signals
from pa_npu.telemetry.timeline import Timeline

SERVES = "import time; time.sleep(60)"


@pytest.fixture(autouse=True)
def short_aftermath(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pa_npu.launcher.process.supervisor._AFTERMATH_S", 0.05)
    monkeypatch.setattr("pa_npu.launcher.process.recovery._LOOK_EVERY_S", 0.0)


def counted(file: Path, *codes: str) -> str:
    """A program that runs the n-th of `codes` at its n-th start, and the last one ever after."""
    return (
        f"import pathlib; file = pathlib.Path({str(file)!r}); number = len(file.read_text()) if "
        "file.exists() else 0\n"
        f"file.write_text('x' * (number + 1)); exec({list(codes)!r}[min(number, {len(codes) - 1})])"
    )


def url_of(engine: Startable) -> str:
    return f"http://127.0.0.1:{engine.name[-1]}"


class Supervised:
    """A run of fake commands. attempts: numbers of the attempts that were prepared."""

    def __init__(
        self,
        directory: Path,
        engine: str,
        worker: str,
        *others: str,
        restarts: int = 2,
        damaged: bool = False,
        extra: str | None = None,
    ):
        """others: further engines. damaged: the first attempt is given a damaged checkpoint. extra:
        an engine that comes later.
        """
        self.directory = directory
        self.attempts: list[int] = []
        config = Config.model_validate(
            {
                "model": {"path": "m"},
                "data": {"train": "t"},
                "run": {"restarts": restarts},
            }
        )
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        client = dist.TCPStore(
            "127.0.0.1", self.server.port, is_master=False, wait_for_workers=False
        )
        self.roster = Roster(StoreChannel(client, PREFIX), "")
        engines = [
            self._command(f"engine-{index}", code) for index, code in enumerate([engine, *others])
        ]
        for command in engines:
            self.roster.announce(url_of(command))
        logs = directory / "logs"
        with (
            Console(logs / "launcher.log") as console,
            stop_signals() as signals,
            ProcessTree(logs, 1.0, signals.insisted) as tree,
        ):
            recovery = Recovery(
                config,
                tree,
                console,
                self.roster,
                lambda number: self._attempt(worker, number),
                url_of,
                damaged=lambda number: damaged and number == 0,
            )
            if extra is not None:
                recovery.expect(self._command("engine-9", extra))
            supervisor = Supervisor(tree, console, Timeline(None, "launcher"), signals, recovery)
            first = self._attempt(worker, 0)
            self.code = supervisor.run(engines, first.commands, first.awaited)
        self.said = (logs / "launcher.log").read_text()

    def _attempt(self, worker: str, number: int) -> Attempt:
        self.attempts.append(number)
        return Attempt([self._command("trainer-0", worker)], [])

    def _command(self, name: str, code: str) -> Command:
        return Command(name, (sys.executable, "-S", "-u", "-c", code), dict(os.environ))

    @property
    def generation(self) -> int:
        return self.roster.entries()[0].generation


def test_a_killed_trainer_begins_another_attempt_and_the_engine_stays(tmp_path: Path) -> None:
    worker = counted(
        tmp_path / "starts", "import os; os.kill(os.getpid(), 9)", "raise SystemExit(1)", "pass"
    )
    run = Supervised(tmp_path, counted(tmp_path / "engine", SERVES), worker)
    assert run.code == 0, run.said
    assert run.attempts == [0, 1, 2]
    assert "trainer-0 ended: killed by SIGKILL; starting coordinator and trainers again" in run.said
    assert (tmp_path / "engine").read_text() == "x" and run.generation == 0


def test_attempts_are_counted_and_the_last_failure_ends_the_run(tmp_path: Path) -> None:
    run = Supervised(tmp_path, SERVES, "print('cause of death'); raise SystemExit(1)", restarts=1)
    assert run.code == 1 and run.attempts == [0, 1]
    assert "failed: trainer-0 ended: exit code 1" in run.said and "cause of death" in run.said


@pytest.mark.parametrize(("code", "expected"), [(2, 2), (3, 1)])
def test_bad_input_and_broken_invariants_are_never_tried_again(
    tmp_path: Path, code: int, expected: int
) -> None:
    run = Supervised(tmp_path, SERVES, f"raise SystemExit({code})")
    assert run.code == expected and run.attempts == [0]


@pytest.mark.parametrize(("code", "attempts"), [(2, [0, 1]), (3, [0])])
def test_bad_input_that_was_a_damaged_checkpoint_is_tried_once_more(
    tmp_path: Path, code: int, attempts: list[int]
) -> None:
    run = Supervised(tmp_path, SERVES, f"raise SystemExit({code})", damaged=True)
    assert run.code == (2 if code == 2 else 1) and run.attempts == attempts


def test_an_engine_that_ends_is_started_again_and_announced(tmp_path: Path) -> None:
    done = tmp_path / "engine"
    worker = (
        f"import time, pathlib\nwhile pathlib.Path({str(done)!r}).read_text() != 'xx': "
        "time.sleep(0.02)"
    )
    engine = counted(done, "import time; time.sleep(0.3); raise SystemExit(1)", SERVES)
    done.write_text("")
    run = Supervised(tmp_path, engine, worker)
    assert run.code == 0, run.said
    assert run.attempts == [0] and run.generation == 1
    assert "engine-0: exit code 1; started again (1 of run.restarts = 2)" in run.said


def test_an_engine_that_ends_too_often_ends_the_run(tmp_path: Path) -> None:
    run = Supervised(
        tmp_path, counted(tmp_path / "engine", "raise SystemExit(7)"), SERVES, restarts=1
    )
    assert run.code == 1
    assert "engine-0 ended 2 times within 3600 s (run.restarts), at last: exit code 7" in run.said


def test_an_engine_that_ends_while_its_device_trains_is_started_again_when_there_is_room(
    tmp_path: Path,
) -> None:
    done = tmp_path / "engine"
    done.write_text("")
    worker = (
        f"import time, pathlib\nwhile pathlib.Path({str(done)!r}).read_text() != 'xx': "
        "time.sleep(0.02)"
    )
    starts: list[str] = []

    def is_lent(self: Roster, index: int) -> bool:
        starts.append(done.read_text())
        return len(starts) <= 3

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Roster, "is_lent", is_lent)
        run = Supervised(tmp_path, counted(done, "raise SystemExit(1)", SERVES), worker)
    assert run.code == 0, run.said
    assert starts[:4] == ["x"] * 4, "not while a trainer has the device"
    assert run.generation == 1 and "exit code 1; started again (1 of run.restarts = 2)" in run.said


def test_the_first_start_of_an_engine_that_comes_later_is_no_restart(tmp_path: Path) -> None:
    there = tmp_path / "there"
    worker = (
        f"import time, pathlib\nwhile not pathlib.Path({str(there)!r}).exists(): time.sleep(0.02)"
    )
    extra = f"import time, pathlib; pathlib.Path({str(there)!r}).touch(); time.sleep(60)"
    run = Supervised(tmp_path, SERVES, worker, restarts=0, extra=extra)
    assert (
        run.code == 0
        and "engine-9: starting at http://127.0.0.1:9; it serves from a publish on" in run.said
    )


def test_a_hung_engine_is_killed_and_replaced_when_the_coordinator_asks(tmp_path: Path) -> None:
    """The fake engine ignores SIGTERM, as a stopped process does."""
    done = tmp_path / "engine"
    done.write_text("")
    hangs = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    worker = (
        f"import time, pathlib\nwhile pathlib.Path({str(done)!r}).read_text() != 'xx': "
        "time.sleep(0.02)"
    )
    ask = Roster.replacement_wanted

    def wanted(self: Roster, index: int, generation: int) -> str | None:
        if generation == 0 and done.read_text() == "x":
            self.ask_replacement(index, generation, "it did not generate a token when probed")
        return ask(self, index, generation)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Roster, "replacement_wanted", wanted)
        run = Supervised(tmp_path, counted(done, hangs, SERVES), worker)
    assert run.code == 0, run.said
    assert (
        run.generation == 1 and "it did not generate a token when probed; started again" in run.said
    )


def test_an_engine_that_keeps_dying_is_left_out_while_another_serves_and_tried_again_later(
    tmp_path: Path,
) -> None:
    """The test is the coordinator that lets it go, and sees it come back at a place of its own."""
    starts = tmp_path / "engine"
    starts.write_text("")
    engine = counted(starts, *["raise SystemExit(7)"] * 3, SERVES)
    worker = (
        f"import time, pathlib\nwhile pathlib.Path({str(starts)!r}).read_text() != 'xxxx': "
        "time.sleep(0.02)"
    )
    ask_leave = Roster.ask_leave

    def let_go(self: Roster, index: int) -> None:
        ask_leave(self, index)
        self.confirm_left(index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Roster, "ask_leave", let_go)
        patch.setattr(recovery, "RESTART_WINDOW_S", 1.0)
        run = Supervised(tmp_path, engine, worker, SERVES, restarts=1)
    assert run.code == 0, run.said
    assert (
        "engine-0 ended 2 times within 1 s (run.restarts), at last: exit code 7; the others serve"
        in run.said
    )
    assert "engine-0: starting at http://127.0.0.1:0" in run.said
    assert run.attempts == [0], "the run itself did not start again"
    assert 0 not in {entry.index for entry in run.roster.entries()}, "engine-0 left place 0"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_restarts_are_a_rate() -> None:
    clock = Clock()
    budget = RestartBudget(2, 60.0, clock=clock)
    assert [budget.allows() and budget.spend() for _ in range(3)] == [1, 2, False]
    clock.now = 59.0
    assert not budget.allows()
    clock.now = 60.0
    assert budget.allows() and budget.spend() == 1


def test_restarts_that_led_to_no_newer_checkpoint_count_for_ever() -> None:
    clock = Clock()
    checkpoint = [3]
    budget = RestartBudget(2, 60.0, lambda: checkpoint[0], clock)
    for _ in range(2):
        budget.spend()
        clock.now += 1000.0
    assert not budget.allows(), "it fails at the same place again and again"
    checkpoint[0] = 4
    assert budget.allows() and budget.spent() == 0
    assert not RestartBudget(0, 60.0).allows()

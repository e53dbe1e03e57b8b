"""The supervisor with small fake commands: readiness, relayed progress, failing fast, stopping on signals."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from pa_npu.control.channel import StoreChannel
from pa_npu.control.messages import EARLY_END
from pa_npu.launcher.process.commands import Command
from pa_npu.launcher.process.console import Console
from pa_npu.launcher.process.process_tree import ProcessTree
from pa_npu.launcher.process.processes import Awaited
from pa_npu.launcher.process.supervisor import EarlyEndRequest, Supervisor, stop_signals
from pa_npu.telemetry.records import JsonLines
from pa_npu.telemetry.run_end import RunEnd, read_end
from pa_npu.telemetry.timeline import Timeline


@pytest.fixture(autouse=True)
def short_aftermath(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pa_npu.launcher.process.supervisor._AFTERMATH_S", 0.05)


SLEEP = "import time; time.sleep(60)"


def supervise(
    directory: Path,
    codes: dict[str, str],
    awaited: list[Awaited] | None = None,
    meanwhile: Callable[[], None] = int,
    grace_s: float = 1.0,
    early_end: EarlyEndRequest | None = None,
) -> int:
    """Run fake commands under the real supervisor; returns its exit code."""
    commands = [
        Command(name, (sys.executable, "-S", "-u", "-c", code), dict(os.environ))
        for name, code in codes.items()
    ]
    logs = directory / "logs"
    with (
        Console(logs / "launcher.log") as console,
        stop_signals() as signals,
        ProcessTree(logs, grace_s, signals.insisted) as tree,
        Timeline.for_run(directory, "launcher") as timeline,
    ):
        supervisor = Supervisor(tree, console, timeline, signals, early_end=early_end)
        thread = threading.Thread(target=meanwhile, name="meanwhile")
        thread.start()
        engines = [command for command in commands if command.name.startswith("engine-")]
        code = supervisor.run(
            engines, [command for command in commands if command not in engines], awaited or []
        )
        thread.join(10)
        assert all(process.exit_code is not None for process in tree.processes)
    return code


def test_a_good_run_relays_progress_and_ends_engines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    coordinator = "print('log line'); print('| iteration 1/2'); print('| iteration 2/2')"
    assert (
        supervise(tmp_path, {"engine-0": SLEEP, "coordinator": coordinator, "trainer-0": "pass"})
        == 0
    )
    out = capsys.readouterr().out
    assert "iteration 1/2\n" in out and "iteration 2/2\n" in out
    assert "log line" not in out
    assert "iteration 2/2" in (tmp_path / "logs" / "launcher.log").read_text()


def recorded_end(directory: Path) -> RunEnd | None:
    return read_end(JsonLines(directory / "timeline" / "launcher.jsonl").read())


def test_a_run_records_how_it_ended_and_by_what(tmp_path: Path) -> None:
    done = tmp_path / "done"
    failed = tmp_path / "failed"
    stopped = tmp_path / "stopped"
    supervise(done, {"coordinator": "pass"})
    assert recorded_end(done) == RunEnd("finished")
    supervise(failed, {"coordinator": "print('the cause'); raise SystemExit(7)"})
    assert recorded_end(failed) == RunEnd(
        "failed", "coordinator ended: exit code 7", "coordinator", ("the cause",)
    )
    code = supervise(
        stopped, {"coordinator": SLEEP}, meanwhile=lambda: os.kill(os.getpid(), signal.SIGTERM)
    )
    assert code == 128 + signal.SIGTERM and recorded_end(stopped) == RunEnd("stopped", "SIGTERM")


def test_what_is_waited_for_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pa_npu.launcher.process.supervisor._WAITING_LINE_EVERY_S", 0.05)
    output = tmp_path / "logs" / "launcher.log"
    awaited = [Awaited("engine-0", lambda: "waiting for" in output.read_text(), 30.0, "engine-0")]
    assert supervise(tmp_path, {"engine-0": SLEEP, "coordinator": "pass"}, awaited) == 0
    assert "waiting for engine-0 (" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "code", "end", "expected"),
    [
        ("trainer-1", "raise SystemExit(7)", "exit code 7", 1),
        ("coordinator", "raise SystemExit(2)", "exit code 2", 2),
        ("engine-0", "import os; os.kill(os.getpid(), 9)", "killed by SIGKILL", 1),
    ],
)
def test_a_dead_process_ends_the_run_at_once_with_its_name_end_and_log(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    code: str,
    end: str,
    expected: int,
) -> None:
    codes = dict.fromkeys(("engine-0", "coordinator", "trainer-0", "trainer-1"), SLEEP) | {
        name: f"print('cause of death'); {code}"
    }
    start = time.monotonic()
    assert supervise(tmp_path, codes) == expected
    assert time.monotonic() - start < 50
    error = capsys.readouterr().err
    assert f"failed: {name} ended: {end}" in error
    assert "    cause of death" in error


def test_an_engine_that_ends_well_but_early_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert supervise(tmp_path, {"engine-0": "pass", "coordinator": SLEEP}) == 1
    assert "engine-0 ended: exit code 0" in capsys.readouterr().err


def test_a_process_that_never_becomes_ready_ends_the_run_by_its_deadline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    awaited = [Awaited("engine-0", lambda: False, 0.5, "engine-0")]
    codes = {"engine-0": "print('still loading'); " + SLEEP, "coordinator": SLEEP}
    assert supervise(tmp_path, codes, awaited) == 1
    error = capsys.readouterr().err
    assert (
        "engine-0 not ready after" in error
        and "run.startup_timeout_s" in error
        and "still loading" in error
    )


def test_ready_processes_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    polls = iter([True])
    awaited = [Awaited("trainers", lambda: next(polls), 30.0, "trainer-0")]
    assert (
        supervise(
            tmp_path, {"engine-0": SLEEP, "trainer-0": "import time; time.sleep(0.3)"}, awaited
        )
        == 0
    )
    assert "trainers ready after" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_stop_the_run_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    def interrupt() -> None:
        while not (tmp_path / "up").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    code = f"open({str(tmp_path / 'up')!r}, 'w').close(); {SLEEP}"
    start = time.monotonic()
    assert (
        supervise(tmp_path, {"engine-0": SLEEP, "coordinator": code}, meanwhile=interrupt)
        == 128 + number
    )
    assert time.monotonic() - start < 50


def test_a_second_signal_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    def interrupt_twice() -> None:
        while not (tmp_path / "up").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    deaf = (
        f"import signal; signal.signal(15, signal.SIG_IGN); open({str(tmp_path / 'up')!r}, "
        f"'w').close(); {SLEEP}"
    )
    start = time.monotonic()
    assert (
        supervise(tmp_path, {"engine-0": deaf}, [_never()], interrupt_twice, grace_s=60.0)
        == 128 + signal.SIGINT
    )
    assert time.monotonic() - start < 50


def _never() -> Awaited:
    return Awaited("engine-0", lambda: False, 60.0, "engine-0")


def test_a_process_that_the_machine_does_not_let_start_ends_the_run_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs" / "trainer-0.log").mkdir(parents=True)
    assert supervise(tmp_path, {"engine-0": SLEEP, "coordinator": SLEEP, "trainer-0": SLEEP}) == 1
    assert "failed: trainer-0 cannot be started: Is a directory (" in capsys.readouterr().err


class RequestInAFile(EarlyEndRequest):
    """A request that the fake trainer finds as a file, where real ones ask the store."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def make(self) -> None:
        super().make()
        self._file.touch()


def trainer_that_saves(directory: Path) -> str:
    return (
        f"import pathlib, time; asked = pathlib.Path({str(directory / 'asked')!r})\n"
        f"while not asked.exists(): time.sleep(0.01)\n"
        f"time.sleep(0.3); pathlib.Path({str(directory / 'saved')!r}).touch()"
    )


def interrupt_when(message: Path, times: int) -> Callable[[], None]:
    def interrupt() -> None:
        for number in range(times):
            word = "ready after" if number == 0 else "ends after this iteration"
            while word not in message.read_text():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

    return interrupt


def test_an_early_end_waits_for_the_trainers_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The coordinator, whose next iteration nobody trains, is stopped."""
    request = RequestInAFile(tmp_path / "asked")
    log = tmp_path / "logs" / "launcher.log"
    codes = {"engine-0": SLEEP, "coordinator": SLEEP, "trainer-0": trainer_that_saves(tmp_path)}
    awaited = [Awaited("trainers", lambda: True, 30.0, "trainer-0")]
    assert supervise(tmp_path, codes, awaited, interrupt_when(log, 1), early_end=request) == 0
    assert (tmp_path / "saved").exists()
    out = capsys.readouterr().out
    assert "SIGINT: the run ends after this iteration, with a checkpoint and an export" in out
    assert "the run has ended early, as asked" in out


def test_a_second_interrupt_stops_an_early_end(tmp_path: Path) -> None:
    request = RequestInAFile(tmp_path / "nobody looks")
    log = tmp_path / "logs" / "launcher.log"
    codes = {"engine-0": SLEEP, "coordinator": SLEEP, "trainer-0": SLEEP}
    awaited = [Awaited("trainers", lambda: True, 30.0, "trainer-0")]
    assert (
        supervise(tmp_path, codes, awaited, interrupt_when(log, 2), early_end=request)
        == 128 + signal.SIGINT
    )


def test_an_interrupt_before_anything_trains_stops_the_run(tmp_path: Path) -> None:
    request = RequestInAFile(tmp_path / "asked")

    def interrupt() -> None:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    codes = {"engine-0": SLEEP, "coordinator": SLEEP, "trainer-0": SLEEP}
    assert (
        supervise(tmp_path, codes, [_never()], interrupt, early_end=request) == 128 + signal.SIGINT
    )
    assert not request.is_made


def test_a_new_attempt_hears_of_an_early_end_that_was_asked_of_the_one_before() -> None:
    store = dist.HashStore()
    first = StoreChannel(store, "pa/0/")
    second = StoreChannel(store, "pa/1/")
    request = EarlyEndRequest()
    request.attempt_begins(first)
    assert not EARLY_END.exists(first)
    request.make()
    request.attempt_begins(second)
    assert EARLY_END.exists(first) and EARLY_END.exists(second)

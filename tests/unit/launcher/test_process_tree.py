"""The process tree: exit codes pass through, nothing outlives its command, the keeper or the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pa_npu.control import keeper
from pa_npu.launcher.process.commands import Command
from pa_npu.launcher.process.process_tree import MarkedLines, ProcessTree, TreeProcess
from tests.helpers.processes import running

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="parent-death signals and reapers are Linux calls"
)

# A command with a child in the same group and a grandchild in a session of its own; each writes its
# pid, then sleeps.
FAMILY = """
import os, signal, sys, time
for depth in range(2):
    if os.fork() == 0:
        if depth:
            os.setsid()
        break
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(os.path.join(sys.argv[1], str(os.getpid())), "w").close()
time.sleep(60)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[ProcessTree]:
    with ProcessTree(tmp_path / "logs", grace_s=1.0) as tree:
        yield tree
    assert tree.kill_strays() == [], "a process survived the tree"


def wait_until(condition: Callable[[], bool], description: str, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {description}"
        time.sleep(0.01)


def start(
    tree: ProcessTree,
    name: str,
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> TreeProcess:
    return tree.launch(Command(name, tuple(argv), {**os.environ, **(env or {})}, **options))


def start_family(
    tree: ProcessTree, directory: Path, *arguments: str
) -> tuple[TreeProcess, list[int]]:
    directory.mkdir()
    process = start(
        tree, "family", [sys.executable, "-S", "-c", FAMILY, str(directory), *arguments]
    )
    wait_until(lambda: len(list(directory.iterdir())) == 3, "three members")
    return process, [int(file.name) for file in directory.iterdir()]


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if running(pid)]


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def test_exit_codes_and_signals_pass_through(tree: ProcessTree) -> None:
    commands = {
        "fine": python("pass"),
        "three": python("raise SystemExit(3)"),
        "killed": python("import os; os.kill(os.getpid(), 9)"),
        "crash": python("import os; os.kill(os.getpid(), 11)"),
        "absent": ["/nowhere/command"],
    }
    processes = {name: start(tree, name, argv) for name, argv in commands.items()}
    for process in processes.values():
        process.popen.wait(10)
    ends = {name: process.describe_end() for name, process in processes.items()}
    assert ends == {
        "fine": "exit code 0",
        "three": "exit code 3",
        "killed": "killed by SIGKILL",
        "crash": "killed by SIGSEGV",
        "absent": "exit code 127",
    }
    assert "No such file" in processes["absent"].last_lines(1)[0]
    assert {process.name for process in tree.ended()[:2]} == {"killed", "crash"}, (
        "signals come first"
    )


def test_output_goes_to_the_log_and_marked_lines_are_found(tree: ProcessTree) -> None:
    code = (
        "import sys; print('| one'); print('two'); sys.stderr.write('three\\n'); print('| "
        "four', end='')"
    )
    process = start(tree, "talker", python(code))
    marked = MarkedLines(process.log, "| ")
    process.popen.wait(10)
    assert process.last_lines(2) == ["two", "| four"] or "three" in process.last_lines(2)
    assert marked.new() == ["one"], "an incomplete line must wait for its end"
    with process.log.open("a") as file:
        file.write("!\n| five\n")
    assert marked.new() == ["four!", "five"]


def logged_and_ended(tree: ProcessTree, code: str, stdout: str = "&1") -> TreeProcess:
    """A process that sets up its log, runs `code` and has ended."""
    code = (
        "import logging, os; from pa_npu.telemetry.logs import setup_logging; "
        f"setup_logging('it'); {code}"
    )
    argv = ["sh", "-c", f'exec "$0" -c "$1" >{stdout} 2>&1', sys.executable, code]
    process = start(tree, "it", argv, {"PYTHONPATH": str(ROOT)})
    process.popen.wait(60)
    return process


def test_the_last_error_is_known_where_no_disk_has_room_for_the_log(tree: ProcessTree) -> None:
    code = "logging.error('the first'); logging.error('the reason'); raise SystemExit(3)"
    process = logged_and_ended(tree, code, stdout="/dev/full")
    assert [line.rpartition(": ")[2] for line in process.last_lines(3)] == ["the reason"]


def test_the_last_error_is_said_once_where_the_log_has_it(tree: ProcessTree) -> None:
    process = logged_and_ended(
        tree, "logging.error('the reason'); logging.warning('and more'); raise SystemExit(3)"
    )
    assert [line.rpartition(": ")[2] for line in process.last_lines(3)] == [
        "the reason",
        "and more",
    ]


def test_an_error_that_a_process_survived_is_not_its_last_line(tree: ProcessTree) -> None:
    """It is far back in its log when a signal ends the process."""
    code = (
        "logging.error('long ago'); print('x' * 100_000); print('at work', flush=True); "
        "os.kill(os.getpid(), 9)"
    )
    assert logged_and_ended(tree, code).last_lines(1) == ["at work"]


def test_cores_are_pinned(tree: ProcessTree) -> None:
    core = max(os.sched_getaffinity(0))
    process = start(
        tree,
        "pinned",
        python("import os; print(os.sched_getaffinity(0))"),
        os.environ,
        cores=(core,),
    )
    process.popen.wait(10)
    assert process.last_lines(1) == [f"{{{core}}}"]


def test_stop_ends_a_family_that_ignores_sigterm_after_the_grace(
    tree: ProcessTree, tmp_path: Path
) -> None:
    process, pids = start_family(tree, tmp_path / "pids", "deaf")
    start = time.monotonic()
    tree.stop()
    assert alive(pids) == []
    assert 0.9 < time.monotonic() - start < 20
    assert process.describe_end() == "killed by SIGKILL"


def test_stop_lets_a_command_clean_up(tree: ProcessTree, tmp_path: Path) -> None:
    marker = tmp_path / "cleaned"
    code = f"""
        import signal, sys, time
        def leave(*_):
            open({str(marker)!r}, "w").close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        print("up", flush=True)
        time.sleep(60)
    """
    process = start(tree, "polite", python(textwrap.dedent(code)))
    wait_until(lambda: process.last_lines(1) == ["up"], "the handler is there")
    tree.stop()
    assert marker.exists()
    assert process.describe_end() == "exit code 0"


def test_a_dead_command_takes_its_children_and_their_sessions_along(
    tree: ProcessTree, tmp_path: Path
) -> None:
    process, pids = start_family(tree, tmp_path / "pids")
    command = min(pids)
    os.kill(command, signal.SIGKILL)
    process.popen.wait(10)
    assert process.describe_end() == "killed by SIGKILL"
    assert alive(pids) == []


@pytest.mark.parametrize("end", ["it is stopped", "it dies", "it is killed with its keeper"])
def test_a_command_that_wants_a_directory_of_its_own_has_one_for_as_long_as_it_runs(
    tree: ProcessTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    named = tmp_path / "named"
    code = "import os, tempfile, time; assert tempfile.gettempdir() == os.environ['HERE']; "
    code += f"open({str(named)!r}, 'w').write(os.environ['HERE']); time.sleep(60)"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    process = start(tree, "busy", python(code), os.environ, scratch_env="HERE", own_tmpdir=True)
    wait_until(lambda: named.exists() and named.read_text() != "", "it has started")
    directory = Path(named.read_text())
    assert directory.parent == tmp_path and directory.is_dir()
    (directory / "file").touch()
    if end == "it is stopped":
        process.popen.terminate()
    elif end == "it dies":
        os.kill(keeper.descendants(process.popen.pid)[0], signal.SIGKILL)
    else:
        tree.kill_one(process)
    process.popen.wait(10)
    assert not directory.exists()


def test_a_killed_keeper_leaves_nothing(tree: ProcessTree, tmp_path: Path) -> None:
    process, pids = start_family(tree, tmp_path / "pids")
    process.popen.kill()
    process.popen.wait(10)
    wait_until(lambda: min(pids) not in alive(pids), "the kernel kills the command with its keeper")
    tree.kill_strays()
    assert alive(pids) == []


def test_other_children_of_this_process_are_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE
    ) as another:
        with ProcessTree(tmp_path, grace_s=0.1) as tree:
            start(tree, "sleeper", python("import time; time.sleep(60)"))
        assert another.poll() is None
        another.kill()


@pytest.mark.parametrize(
    "stopped", [False, True], ids=["all work", "keeper and command are stopped"]
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_launcher_leaves_nothing(
    tmp_path: Path, number: signal.Signals, stopped: bool
) -> None:
    (tmp_path / "pids").mkdir()
    code = f"""
        import os, sys, time
        from pathlib import Path
        from pa_npu.launcher.process.commands import Command
        from pa_npu.launcher.process.process_tree import ProcessTree
        tree = ProcessTree(Path({str(tmp_path)!r}), 1.0)
        argv = (sys.executable, "-S", "-c", {FAMILY!r}, {str(tmp_path / "pids")!r}, "deaf")
        tree.launch(Command("family", argv, dict(os.environ)))
        time.sleep(60)
    """
    launcher = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    wait_until(
        lambda: len(list((tmp_path / "pids").iterdir())) == 3, "three members", timeout_s=60.0
    )
    pids = [int(file.name) for file in (tmp_path / "pids").iterdir()]
    assert len(alive(pids)) == 3
    (keeper_pid,) = set(keeper.descendants(launcher.pid)) - set(pids)
    for pid in (keeper_pid, min(pids)) if stopped else ():
        os.kill(pid, signal.SIGSTOP)
    launcher.send_signal(number)
    launcher.wait(10)
    try:
        wait_until(lambda: not alive([*pids, keeper_pid]), "the keeper ends the family, and itself")
    finally:
        for pid in alive([*pids, keeper_pid]):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("code", "expected"), [("pass", 0), ("raise SystemExit(7)", 7), ("os.kill(os.getpid(), 9)", -9)]
)
def test_a_stopped_keeper_does_not_hide_its_commands_end(
    tmp_path: Path, code: str, expected: int
) -> None:
    """The keeper is stopped while its command works; the command's own end comes out, and nothing
    is left.
    """
    go = tmp_path / "go"
    program = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n{code}"
    with ProcessTree(tmp_path / "logs", 1.0) as tree:
        process = start(tree, "trainer-0", [sys.executable, "-S", "-c", program])
        wait_until(
            lambda: keeper.descendants(process.popen.pid) != [],
            "the keeper has started its command",
        )
        os.kill(process.popen.pid, signal.SIGSTOP)
        go.touch()
        wait_until(
            lambda: process.exit_code is not None,
            "the launcher would wait for ever",
            timeout_s=20.0,
        )
        assert process.exit_code == expected
        assert process.describe_end() == (
            "killed by SIGKILL" if expected < 0 else f"exit code {expected}"
        )
        assert tree.ended() == [process]

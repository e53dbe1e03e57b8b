"""Whatever stands where a command expects a file: one line and an exit code, within seconds, never a traceback or a hang."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pa_npu.config.plain_file import open_plain, read_plain
from pa_npu.launcher import cli
from pa_npu.launcher.cli import main
from tests.helpers.finished_run import make_run

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
HUGE = "9" * 4000


def _directory(path: Path) -> None:
    path.mkdir()


def _content(text: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(text)

    return write


def _bytes(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 9)


KINDS: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a device without end": lambda path: path.symlink_to("/dev/zero"),
    "a device that waits": lambda path: path.symlink_to("/dev/tty"),
    "a directory": _directory,
    "a link to nothing": lambda path: path.symlink_to("/nowhere"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a Git LFS pointer": _content(LFS),
    "bytes": _bytes,
    "nesting": _content("[" * 100_000),
    "a list": _content("[1, 2]\n"),
    "a text": _content('"text"\n'),
    "huge numbers": _content(
        f'{{"iteration": 0, "version": 0, "iteration_s": 1e999, "start": {HUGE}, "devices": '
        f'{HUGE[:300]}, "time": -1e308}}\n'
        f'{{"iteration": {HUGE}}}\n{{"iteration": 2147483648, "name": "publish", "end": 1e308, '
        f'"start": -1e308}}\n'
    ),
    "wrong types": _content(
        '{"iteration": 0, "version": [], "iteration_s": {"a": [1]}, "devices": "x", "name": {}, '
        '"lane": 3, "start": 1.5, "end": "x", "args": 3, "process": [], "responses": [7], '
        '"engines": 3, "rewards": [1], "test": {"a": {"b": "c"}}}\n'
    ),
    "a mapping of wrong types": _content(
        "run: {device: [x]}\ntelemetry: {warmup_iterations: .inf}\nrollout: 3\n"
    ),
    "a date that is none": _content("run: 2024-99-99\n"),
}
FILES = (
    ("metrics.jsonl",),
    (
        "config.yaml",
        "evaluations.jsonl",
        "samples.jsonl",
        "runs_on.json",
        "logs",
        "timeline",
        "samples",
    ),
    (
        "logs/coordinator.log",
        "timeline/coordinator.jsonl",
        "timeline/launcher.jsonl",
        "samples/iteration_000000.parquet",
    ),
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("met") / "run")


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    def too_late(*_: object) -> None:
        raise AssertionError("a command waits for what it met")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def one_line_or_done(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs the command; what it said on stderr, which is one line if it failed."""
    capsys.readouterr()
    code = main(arguments)
    error = capsys.readouterr().err
    assert code in (0, 2), error
    assert code == 0 or (
        error.startswith("error: ") and error.count("\n") == 1 and len(error) < 2000
    ), error
    return error


@pytest.mark.parametrize("kind", KINDS)
def test_view_and_report_of_a_run_with_any_file_of_another_kind(
    capsys: pytest.CaptureFixture[str], finished: Path, tmp_path: Path, kind: str
) -> None:
    for names in FILES:
        run = tmp_path / "run"
        shutil.copytree(finished, run)
        for met in (run / name for name in names):
            if met.is_dir():
                shutil.rmtree(met)
            met.unlink(missing_ok=True)
            KINDS[kind](met)
        page = tmp_path / "page.html"
        one_line_or_done(capsys, "view", str(run), "--export", str(page))
        error = one_line_or_done(capsys, "report", str(run), "--json")
        if names == ("metrics.jsonl",):
            assert str(run) in error, f"{kind} was read as records"
        shutil.rmtree(run)


# runs commands as a user without root's rights, who reads what all may read; what both need is
# imported before
AS_ANOTHER = """
import contextlib, io, json, os, sys
from pa_npu.launcher.cli import main

def said(command):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as error:
        return main(command), error.getvalue()

first, commands = json.load(sys.stdin)
assert [said(command) for command in first] == [(0, "")] * len(first), [said(command) for command in first]
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(4321)
    os.setuid(4321)
json.dump([said(command) for command in commands], sys.stdout)
"""


@pytest.fixture
def for_all() -> Iterator[Path]:
    """A directory that every user may write to; pytest's own lie in one that is root's, and closed
    again by every pytest.
    """
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o777)
        yield Path(directory)


def test_view_and_report_of_a_run_with_files_and_folders_that_one_may_not_read(
    finished: Path, for_all: Path
) -> None:
    signal.alarm(150)  # of many commands together
    runs = {}
    commands = []
    for name in ("readable", ".", *(name for names in FILES for name in names)):
        run = for_all / f"run {len(runs)}"
        shutil.copytree(finished, run)
        for path in run.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        run.chmod(0o755)
        if name != "readable":
            (run / name).parent.mkdir(exist_ok=True)
            if name != ".":
                (run / name).touch()
            (run / name).chmod(0)
        runs[name] = run
        commands += [
            ["view", str(run), "--export", str(for_all / f"{len(runs)}.html")],
            ["report", str(run), "--json"],
        ]
    done = subprocess.run(
        [sys.executable, "-c", AS_ANOTHER],
        input=json.dumps(
            [[[*commands[0][:3], str(for_all / "first.html")], commands[1]], commands]
        ),
        capture_output=True,
        text=True,
        timeout=140,
        env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[3])},
    )
    for run in runs.values():  # so that they can be removed
        for path in (run, *(run / name for names in FILES for name in names)):
            if path.exists():
                path.chmod(0o755)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    refused = set()
    for number, (name, run) in enumerate(runs.items()):
        for command, (code, error) in zip(("view", "report"), outcomes[2 * number :], strict=False):
            if code != 0:
                assert code == 2 and error.startswith(f"error: {run}") and error.count("\n") == 1, (
                    command,
                    name,
                    error,
                )
                refused.add((command, name))
    assert refused == {("report", name) for name in (".", "metrics.jsonl", "config.yaml")} | {
        ("view", ".")
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", [["report"], ["view", "--export", "page.html"]])
def test_anything_else_in_place_of_a_run(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    command: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    KINDS[kind](tmp_path / "met")
    error = one_line_or_done(capsys, *command, str(tmp_path / "met"))
    assert str(tmp_path / "met") in error


def test_only_regular_files_of_bounded_size_are_read(tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(b"12345")
    assert read_plain(tmp_path / "good", 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_plain(tmp_path / "good", 4)
    for kind, reason in (
        ("a pipe", "regular"),
        ("a directory", "director"),
        ("a Git LFS pointer", "git lfs pull"),
    ):
        KINDS[kind](tmp_path / kind)
        with pytest.raises(OSError, match=reason):
            open_plain(tmp_path / kind)


def test_a_working_directory_that_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    script = (
        "import os, sys; os.chdir(sys.argv[1]); os.rmdir(sys.argv[1])\n"
        "from pa_npu.launcher.cli import main\nsys.exit(main(sys.argv[2:]))"
    )
    root = str(Path(cli.__file__).parents[3])
    for command in (["plan", "model.path=m", "data.train=t"], ["report", "x"]):
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "gone"), *command],
            capture_output=True,
            text=True,
            timeout=100,
            env={**os.environ, "PYTHONPATH": root},
        )
        assert done.returncode == 2 and "Traceback" not in done.stderr, (command, done.stderr)
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, (
            command,
            done.stderr,
        )
        (tmp_path / "gone").mkdir()


def test_what_the_system_refuses_is_one_line_and_what_we_did_not_expect_is_not_hidden(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def met(error: BaseException) -> int:
        def fail(*_: object) -> int:
            raise error

        monkeypatch.setattr("pa_npu.launcher.subcommands.export", fail)
        return main(["export", "--checkpoint", "x", "--output", "y"])

    assert met(PermissionError(13, "Permission denied", "/some\n/file")) == 2
    assert capsys.readouterr().err.startswith("error: /some\\n/file: Permission denied; ")
    with pytest.raises(ZeroDivisionError):
        met(ZeroDivisionError())


@pytest.mark.parametrize("answers", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", None])
def test_join_at_a_silent_or_foreign_server_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, answers: bytes | None
) -> None:
    """answers: of the server; None accepts and says nothing."""
    monkeypatch.setattr("pa_npu.launcher.join._CONNECT_TIMEOUT_S", 2.0)
    monkeypatch.setattr("pa_npu.launcher.join._STORE_TIMEOUT_S", 4.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept: list[socket.socket] = []

        def serve() -> None:
            try:
                while True:
                    connection, _ = listener.accept()
                    kept.append(connection)
                    if answers is not None:
                        connection.sendall(answers)
                        connection.close()
            except OSError:
                return

        thread = threading.Thread(target=serve, name="foreign server", daemon=True)
        thread.start()
        start_s = time.monotonic()
        error = one_line_or_done(capsys, "join", f"127.0.0.1:{listener.getsockname()[1]}")
        assert "no run of pa_npu answers there" in error and time.monotonic() - start_s < 20
        listener.shutdown(socket.SHUT_RDWR)
        for connection in kept:
            connection.close()

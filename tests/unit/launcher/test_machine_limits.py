"""Limits of the machine are said in one line with the remedy before anything starts, and raised where that is allowed."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.control.scratch import short_directories
from pa_npu.launcher import machine_limits
from pa_npu.launcher.machine_limits import limit_problems

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="limits and control groups of Linux"
)
Usage = namedtuple("Usage", "total used free")


def make(tmp_path: Path) -> Config:
    tree: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"train": "t"},
        "run": {"dir": str(tmp_path / "a" / "run")},
        "rollout": {"engines": 4, "max_num_seqs": 256},
    }
    return Config.model_validate(tree)


@pytest.mark.parametrize(("waiting", "is_said"), [(3.9, False), (9.2, True)])
def test_a_machine_that_others_kept_busy_is_said_after_the_run(
    waiting: float, is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, waiting, 99.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    note = machine_limits.busy_note()
    assert bool(note) is is_said
    if note:
        assert "9 processes wanted its 2 cores at once" in note


@pytest.mark.parametrize(
    ("hard", "message"), [(700, "a process may open 700 here, and the run needs 1536"), (4096, "")]
)
def test_open_files_are_raised_where_allowed_and_else_refused(
    tmp_path: Path, hard: int, message: str
) -> None:
    """In a process of its own, because a limit once lowered stays so."""
    code = (
        "import resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))\n"
        "from tests.unit.launcher.test_machine_limits import make\n"
        "from pathlib import Path\n"
        "from pa_npu.launcher.machine_limits import limit_problems\n"
        f"print(list(limit_problems(make(Path({str(tmp_path)!r})), 1)), "
        "resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        (message in done.stdout and "ulimit -n 1536" in done.stdout)
        if message
        else done.stdout.split() == ["[]", "1536"]
    )


def test_a_full_or_missing_temporary_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(tmp_path)
    assert list(limit_problems(config, 2)) == []
    here = Path(tempfile.gettempdir())

    def usage(path: Path) -> Usage:
        return Usage(1, 1, 2**20) if Path(path) == here else Usage(1, 0, 2**40)

    monkeypatch.setattr(machine_limits.shutil, "disk_usage", usage)
    assert list(limit_problems(config, 2)) == [
        f"TMPDIR: {here} has 1 MiB free, less than 64; make room, or name another directory in "
        "TMPDIR"
    ]

    def full() -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(machine_limits.tempfile, "gettempdir", full)
    (line,) = limit_problems(config, 2)
    assert line.startswith(
        "TMPDIR: no temporary directory can be written (No space left on device); make room"
    )


def test_a_full_disk_of_the_run_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory itself need not exist yet."""
    monkeypatch.setattr(
        machine_limits.shutil,
        "disk_usage",
        lambda path: Usage(1, 1, 0 if Path(path) == tmp_path else 2**40),
    )
    (line,) = limit_problems(make(tmp_path), 2)
    assert (
        line
        == f"run.dir: {tmp_path} has 0 MiB free, less than 16; choose another run.dir, or make room"
    )


def test_the_control_groups_limit_of_processes_counts_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {"pids.max": 1000, "pids.current": 800}
    monkeypatch.setattr(machine_limits, "_number", lambda file: numbers[file.name])
    assert list(limit_problems(make(tmp_path), 1)) == []
    (line,) = limit_problems(make(tmp_path), 2)
    assert line.startswith(
        "processes: 200 more may start in this control group (pids.max 1000), and the run needs up "
        "to 256"
    )


def test_sockets_of_engines_go_into_a_short_directory_whatever_tmpdir_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    places = list(short_directories())
    assert places and str(long) not in places
    with (
        socket.socket(socket.AF_UNIX) as server,
        tempfile.TemporaryDirectory(prefix="pa-", dir=places[0]) as scratch,
    ):
        server.bind(f"{scratch}/{uuid.uuid4()}")
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    assert next(short_directories()) == "/tmp", "a control: a short TMPDIR is taken"


def test_a_long_tmpdir_is_one_line_where_no_short_directory_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr("pa_npu.control.scratch._SHORT", ())
    config = load_config([], ["model.path=m", "data.train=t", f"run.dir={tmp_path}"])
    (line,) = list(limit_problems(config, 1))
    assert line.startswith(f"TMPDIR: {long} has ") and "name a shorter directory" in line

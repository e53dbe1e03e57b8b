"""Programs in cells of the sandbox, by the user who runs them and by what the kernel offers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pa_npu.rewards import sandbox
from pa_npu.rewards.sandbox import CellLimits, ProgramOutcome
from pa_npu.rewards.sandbox_jails import JAILS

LIMITS = CellLimits(wall_s=20.0, cpu_s=10, memory_bytes=512 << 20)


async def run(program: str, stdin: bytes = b"", limits: CellLimits = LIMITS) -> ProgramOutcome:
    return await sandbox.run(["{files}/program.py"], stdin, limits, {"program.py": program})


def alive(mark: str) -> int:
    actual = 0
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                actual += mark.encode() in (directory / "cmdline").read_bytes()
            except OSError:
                continue
    return actual


_UNSHARED = "namespaces of its own"
_JAILS = ("bubblewrap", "nsjail")
# who runs it, without what, and the level that comes of it; the first is the user of these tests,
# whoever that is
CELLS: dict[str, tuple[int | None, tuple[str, ...], str, str]] = {
    "root": (0, _JAILS, "namespaces", _UNSHARED),
    "root with bubblewrap": (0, (), "namespaces", "bubblewrap"),
    "root with nsjail": (0, ("bubblewrap",), "namespaces", "nsjail"),
    "root of a container": (0, (*_JAILS, "sys_admin"), "namespaces", _UNSHARED),
    "root of a container with bubblewrap": (
        0,
        ("sys_admin", "setfcap"),
        "namespaces",
        "bubblewrap",
    ),
    "root of a container with nsjail": (
        0,
        ("bubblewrap", "sys_admin", "setfcap"),
        "namespaces",
        "nsjail",
    ),
    "root who may map nobody": (0, (*_JAILS, "sys_admin", "setfcap"), "files", "Landlock"),
    "a user": (4321, _JAILS, "namespaces", _UNSHARED),
    "a user with bubblewrap": (4321, (), "namespaces", "bubblewrap"),
    "a user with nsjail": (4321, ("bubblewrap",), "namespaces", "nsjail"),
    "a user without namespaces": (4321, ("namespaces", *_JAILS), "files", "Landlock"),
    "a user without anything": (
        4321,
        ("namespaces", *_JAILS, "landlock"),
        "limits",
        "limits of processes alone",
    ),
}
CARRIED = ["a user", "a user with bubblewrap", "a user with nsjail"]


def readable_python() -> str:
    """An interpreter that every user may start; root's own may lie where only root looks."""
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        with contextlib.suppress(OSError):
            asks = [python, "-c", "import sys; assert sys.version_info >= (3, 10)"]
            if subprocess.run(asks, capture_output=True, user=4321, check=False).returncode == 0:
                return python
    pytest.skip("no interpreter here is readable for all")


def cell(kind: str, program: str, **limits: Any) -> dict[str, Any]:
    """The outcome of a program, run by this kind of user."""
    user, without, _, _ = CELLS[kind]
    if os.geteuid() != 0 and user in (0, None):
        pytest.skip("needs root")
    python = sys.executable
    if user or not set(_JAILS) <= set(without):
        if os.geteuid() == 0:
            python = readable_python()
        else:
            user = None
    request = {
        "without": without,
        "user": user or None,
        "landlock": limits.pop("landlock", sandbox._LANDLOCK_VERSION),
        "limits": {"wall_s": 60.0, "memory_bytes": 512 << 20, **limits},
    }
    helper = Path(__file__).with_name("cell.py")
    done = subprocess.run(
        [python, helper, json.dumps(request)],
        input=program,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def level_here(kind: str, actual: dict[str, Any]) -> str:
    """The level that was reached; skips where this system is poorer than the case wants."""
    _, _, level, by = CELLS[kind]
    if "failed" in actual or actual["level"] != level or by not in actual["isolation"]:
        if by in _JAILS and shutil.which(JAILS[by][0]) is None:
            pytest.skip(f"no {by} here")
        if (
            level == "namespaces"
            and subprocess.run(
                ["unshare", "-Ur", "true"], capture_output=True, check=False
            ).returncode
        ):
            pytest.skip("this system gives users no namespaces")
        pytest.fail(f"{actual} instead of {level} by {by}")
    return level


ALONE = "a user without namespaces"


def open_to_all(directory: Path) -> None:
    for path in (directory, *directory.parents[:-2]):
        path.chmod(0o777 if path == directory else 0o755)

"""Runs a program that nobody has read: under limits, in an empty directory, without network, keys, or files but its own.

Each run is a cell (sandbox_child.py). What isolates it depends on the system and has a level:
"namespaces" (by bubblewrap or nsjail where one is there and works, else by the cell itself),
"files" (Landlock and a filter of system calls), or "limits" alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pa_npu.errors import PaNpuError
from pa_npu.rewards.sandbox_jails import JAILS, remove_workplaces

_CHILD = Path(__file__).with_name("sandbox_child.py")
_GRACE_S = 5.0  # a killed cell is gone within milliseconds
_SET_UP_S = 20.0  # for a cell to begin on a machine that is busy; not part of the program's time
_READ_BYTES = 1 << 16
# ids that nobody has; one for each cell, because processes are counted by user
_FIRST_USER = 1_000_000_000
_cells = itertools.count(os.getpid() * 1000 % _FIRST_USER)
_JAIL_TRIAL_S = 10.0
_JAIL_PATH = "/usr/bin:/usr/local/bin:/bin"
_LANDLOCK_VERSION = 6  # the newest of the kernel's interface that is used
# for what a cell has left on disk: its files are counted, so that it is done within a second
_REMOVAL_S = 60.0

_MOVED = "pa_npu-removed-"

logger = logging.getLogger(__name__)

# Beside the interpreter and its packages: what they, and the programs that a program may start, are
# linked with.
_SYSTEM = (
    *(
        "/bin",
        "/sbin",
        "/lib",
        "/lib32",
        "/lib64",
        "/usr/bin",
        "/usr/lib",
        "/usr/lib32",
        "/usr/lib64",
        "/usr/share/zoneinfo",
    ),
    *("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"),
)
Level = Literal["limits", "files", "namespaces"]
LEVELS: tuple[Level, ...] = ("limits", "files", "namespaces")


@dataclass(frozen=True)
class Limits:
    """wall_s: of the clock; cpu_s: whole seconds of processor time, of each process. require: the
    least level of isolation.

    memory_bytes: address space of each process, and what all of them hold. files_bytes: of one
    file, and of all of them.
    num_files: files and directories. output_bytes: of standard output, and of errors.
    """

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_bytes: int = 1 << 30
    files_bytes: int = 16 << 20
    num_files: int = 1000
    output_bytes: int = 1 << 16
    processes: int = 32
    open_files: int = 64
    require: Level = "limits"


@dataclass(frozen=True)
class Outcome:
    """How a program ended. ended: by itself, at the wall clock, or because it wrote too much. code:
    128 + n for signal n.

    level: of its isolation; isolation: the same in words, with the reason where it is not the
    highest.
    """

    ended: Literal["itself", "timeout", "output"]
    code: int | None
    stdout: bytes
    stderr: bytes
    level: Level
    isolation: str


class SandboxFailed(PaNpuError):
    """No program was run: the fault is the system's, not the program's."""


async def run(
    arguments: Sequence[str], stdin: bytes, limits: Limits, files: Mapping[str, str]
) -> Outcome:
    """This Python, isolated (-I), with these arguments, in an empty directory.

    files: written before, to be read at the paths that begin with "{files}/" in the arguments;
    "{packages}" is where this environment's packages are. Raises SandboxFailed where nothing could
    be run.
    """
    jail, user = _jail(), _unused_user(next(_cells) % _FIRST_USER)
    parent = os.path.realpath(tempfile.mkdtemp(prefix="pa_npu-cell-"))
    try:
        directory, given, root = (Path(parent) / name for name in ("work", "given", "root"))
        for path in (directory, given, root):
            path.mkdir()
        for name, text in files.items():
            (given / name).write_text(text, encoding="utf-8", errors="replace")
        # another user's, where we are root
        for path in (Path(parent), directory, given, root):
            path.chmod(0o755)
        directory.chmod(0o777)
        python, packages, shown = _shown()
        words = {"{files}": str(given), "{packages}": os.pathsep.join(packages)}
        wanted: dict[str, object] = {
            "directory": str(directory),
            "given": str(given),
            "root": str(root),
            "shown": shown,
            "user": user,
            "jail": jail,
            "landlock": _LANDLOCK_VERSION,
            "inside": False,
            **asdict(limits),
            "python": python,
            "arguments": ["-I", *(_replaced(part, words) for part in arguments)],
        }
        return await _run(wanted, stdin, limits, Path(parent))
    finally:
        # also where this task is cancelled: the thread goes on
        await asyncio.shield(asyncio.to_thread(_remove, parent))
        if jail is not None:
            remove_workplaces(jail[0], user)


def _remove(parent: str) -> None:
    """Removes a cell's directory, however deep or full it is; one that cannot be removed is a
    warning, and costs no verdict.
    """
    try:
        remove_tree(parent, time.monotonic() + _REMOVAL_S)
    except OSError as error:
        logger.warning("reward.code: %s of a cell stays behind (%s); remove it", parent, error)


def remove_tree(directory: str, deadline_s: float) -> None:
    """Removes a directory with all that is in it.

    Directories inside are moved up to the top before they are emptied, so that none lies deeper
    than a path can say, and no depth needs a stack or a descriptor. deadline_s: on the monotonic
    clock. Raises OSError, TimeoutError past the deadline.
    """
    top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        moved = itertools.count()
        waiting = [f"{_MOVED}{next(moved)}"]
        os.mkdir(waiting[0], dir_fd=top)
        for name in os.listdir(top):
            if name != waiting[0]:
                os.rename(name, f"{waiting[0]}/{name}", src_dir_fd=top, dst_dir_fd=top)
        while waiting:
            name = waiting.pop()
            waiting += _emptied(top, name, moved, deadline_s)
            os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(directory)


def _emptied(top: int, name: str, moved: Iterator[int], deadline_s: float) -> list[str]:
    """Removes the files of one directory, and moves its directories to the top; returns the names
    that they have there.
    """
    # another user's, who has left it open, or is there no more
    with contextlib.suppress(PermissionError):
        os.chmod(name, 0o700, dir_fd=top)
    directory = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    names = []
    try:
        with os.scandir(directory) as entries:
            inside = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for entry_name, is_directory in inside:
            if time.monotonic() > deadline_s:
                raise TimeoutError("its files take too long to remove")
            if not is_directory:
                os.unlink(entry_name, dir_fd=directory)
                continue
            names.append(f"{_MOVED}{next(moved)}")
            with contextlib.suppress(PermissionError):  # who moves a directory writes to it
                os.chmod(entry_name, 0o700, dir_fd=directory)
            os.rename(entry_name, names[-1], src_dir_fd=directory, dst_dir_fd=top)
    finally:
        os.close(directory)
    return names


def _replaced(text: str, words: Mapping[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(word, value)
    return text


@functools.cache
def _shown() -> tuple[str, list[str], list[str]]:
    """(interpreter, directories of packages, what programs may see).

    The interpreter is the one below a virtual environment.
    """
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    packages = sorted(
        {os.path.realpath(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}
    )
    prefix = os.path.realpath(sys.base_prefix)
    found = [*_SYSTEM, os.path.dirname(python), f"{prefix}/lib", f"{prefix}/lib64", *packages]
    shown: list[str] = []
    for path in filter(os.path.lexists, found):
        if not any(
            path == other or path.startswith(f"{other}/")
            for other in shown
            if not os.path.islink(other)
        ):
            shown.append(path)
    return python, packages, shown


def _unused_user(cell: int) -> int | None:
    """An id that no user of this machine has, or of this container, for root's programs; None where
    programs stay who they are.
    """
    if os.geteuid() != 0:
        return None
    lines = [
        list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()
    ]
    first, count = max(
        ((first, count) for first, _, count in lines), key=lambda found: found[1], default=(0, 1)
    )
    if first + count > 2 * _FIRST_USER:
        return _FIRST_USER + cell
    return first + count - 1 - cell % 1000 if count > 2000 else None


@functools.cache
def _jail() -> tuple[str, str] | None:
    """Returns name and file of the first program of JAILS that can carry a cell, else None.

    It is tried with all that a cell shows, as the user that a cell has: root's cells have one that
    nobody else has, who can often not read what lies below /root.
    """
    user = _unused_user(next(_cells) % _FIRST_USER)
    if os.geteuid() == 0 and user is None:
        return None
    for name, (file, _) in JAILS.items():
        program = shutil.which(file, path=_JAIL_PATH)
        if program is not None and _carries_a_cell(name, program, user):
            return name, program
    return None


def _carries_a_cell(name: str, program: str, user: int | None) -> bool:
    """Returns whether a jail starts this Python, with what a cell shows, as this user."""
    python, _, shown = _shown()
    parent = os.path.realpath(tempfile.mkdtemp(prefix="pa_npu-cell-"))
    try:
        os.chmod(parent, 0o755)
        cell: dict[str, Any] = {"shown": shown, "given": str(_CHILD.parent), "directory": parent}
        cell |= {"files_bytes": Limits.files_bytes, "num_files": Limits.num_files}
        command = [*JAILS[name][1](program, cell, (), None), "--", python, "-I", "-c", ""]
        as_user: dict[str, Any] = (
            {} if user is None else {"user": user, "group": user, "extra_groups": []}
        )
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_JAIL_TRIAL_S,
            cwd="/",
            **as_user,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    finally:
        os.rmdir(parent)
        remove_workplaces(name, user)
    return done.returncode == 0


async def _run(wanted: dict[str, object], stdin: bytes, limits: Limits, parent: Path) -> Outcome:
    """Standard streams are files of ours: nobody has to read them for a program to go on, and what
    it wrote is there in the end.
    """
    given, outputs = parent / "stdin", [parent / "stdout", parent / "stderr"]
    given.write_bytes(stdin)
    reading, writing = os.pipe()
    try:
        with (
            given.open("rb") as source,
            outputs[0].open("wb") as output,
            outputs[1].open("wb") as errors,
        ):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                str(_CHILD),
                json.dumps(wanted),
                str(writing),
                stdin=source,
                stdout=output,
                stderr=errors,
                pass_fds=(writing,),
                env={},
                start_new_session=True,
            )
    except OSError as error:
        os.close(reading)
        raise SandboxFailed(f"the sandbox cannot start a process ({error.strerror})") from None
    finally:
        os.close(writing)
    ended: Literal["itself", "timeout", "output"] = "itself"
    try:
        level, isolation = await _isolation(reading, process, outputs[1])
        if LEVELS.index(level) < LEVELS.index(limits.require):
            raise SandboxFailed(
                f"reward.code.require: {limits.require}, but this system gives {isolation}; allow "
                "that, or require less"
            )
        try:
            await asyncio.wait_for(process.wait(), limits.wall_s)
        except asyncio.TimeoutError:
            ended = "timeout"
    finally:
        os.close(reading)
        # it kills all of the program, and then ends; only where it does not, it is killed itself
        for end in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(end)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), _GRACE_S)
                break
    stdout, stderr = (_beginning(file, limits.output_bytes + 1) for file in outputs)
    if max(len(stdout), len(stderr)) > limits.output_bytes:
        ended = "output"
    code = process.returncode if ended == "itself" else None
    return Outcome(
        ended, code, stdout[: limits.output_bytes], stderr[: limits.output_bytes], level, isolation
    )


async def _isolation(
    report: int, process: asyncio.subprocess.Process, errors: Path
) -> tuple[Level, str]:
    """Reads the cell's level of isolation, and its words for it, before it begins."""
    try:
        line = await asyncio.wait_for(asyncio.to_thread(os.read, report, _READ_BYTES), _SET_UP_S)
    except asyncio.TimeoutError:
        process.kill()  # the thread ends with the pipe
        raise SandboxFailed(f"the sandbox was not set up within {_SET_UP_S:.0f} s") from None
    if not line:
        said = _beginning(errors, 1000).decode(errors="replace").strip()
        raise SandboxFailed(f"the sandbox did not begin: {said or 'it ended'}")
    found = json.loads(line)
    if "failed" in found:
        raise SandboxFailed(f"the sandbox failed: {found['failed']}")
    level: Level = found["level"]
    refused = f"; no namespaces: {found['refused']}" if found["refused"] else ""
    return level, f"level {level} ({found['by']}{refused})"


def _beginning(file: Path, most: int) -> bytes:
    with file.open("rb") as found:
        return found.read(most)

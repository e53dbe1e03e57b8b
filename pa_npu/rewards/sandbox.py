"""Runs a program that nobody has read: limited, in an empty directory, without network and keys.

Each run is a cell (sandbox_child.py). Its isolation depends on the system and has a level:
"namespaces" (by bubblewrap or nsjail if one is installed and works, else by the cell itself),
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
_SET_UP_S = 20.0  # for a cell to begin on a busy machine; not part of the program's time
_READ_BYTES = 1 << 16
# ids that nobody has; one for each cell, because processes are counted by user
_FIRST_USER = 1_000_000_000
_cells = itertools.count(os.getpid() * 1000 % _FIRST_USER)
_JAIL_TRIAL_S = 10.0
_JAIL_PATH = "/usr/bin:/usr/local/bin:/bin"
_LANDLOCK_VERSION = 6  # the newest of the kernel's interface that is used
# For removing a cell's files, whose number is limited: it takes less than a second.
_REMOVAL_S = 60.0

_MOVED = "pa_npu-removed-"

logger = logging.getLogger(__name__)

# Beside the interpreter and its packages, what these and other programs are linked with.
_SYSTEM = (
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
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/localtime",
)
Level = Literal["limits", "files", "namespaces"]
LEVELS: tuple[Level, ...] = ("limits", "files", "namespaces")


@dataclass(frozen=True)
class CellLimits:
    """Limits of a program.

    wall_s: of the clock.
    cpu_s: whole seconds of processor time, of each process.
    memory_bytes: address space of each process, and memory of all together.
    files_bytes: of one file, and of all together.
    num_files: files and directories.
    output_bytes: of standard output, and of standard error.
    require: the lowest level of isolation that is allowed.
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
class ProgramOutcome:
    """The end of a program.

    ended: by itself, at the limit of the clock, or because it wrote too much.
    code: its status, 128 + n for signal n; None unless it ended by itself.
    level: of its isolation.
    isolation: the same in words, with the reason if it is not the highest.
    """

    ended: Literal["itself", "timeout", "output"]
    code: int | None
    stdout: bytes
    stderr: bytes
    level: Level
    isolation: str


class SandboxFailed(PaNpuError):
    """Raised if no program ran: the fault is the system's, not the program's."""


async def run(
    arguments: Sequence[str], stdin: bytes, limits: CellLimits, files: Mapping[str, str]
) -> ProgramOutcome:
    """Runs this Python, isolated (-I), with these arguments, in an empty directory.

    Args:
        arguments: paths that begin with "{files}/" name a file of `files`; "{packages}" stands for
            the directories of this environment's packages.
        stdin: standard input of the program.
        limits: of its time, memory, files and output.
        files: texts by name, which the program can read.

    Raises SandboxFailed if nothing could be run.
    """
    jail = _jail()
    user = _unused_user(next(_cells) % _FIRST_USER)
    parent = os.path.realpath(tempfile.mkdtemp(prefix="pa_npu-cell-"))
    try:
        directory = Path(parent) / "work"
        program_files = Path(parent) / "given"
        root = Path(parent) / "root"
        for path in (directory, program_files, root):
            path.mkdir()
        for name, text in files.items():
            (program_files / name).write_text(text, encoding="utf-8", errors="replace")
        # If we are root, the program runs as another user.
        for path in (Path(parent), directory, program_files, root):
            path.chmod(0o755)
        directory.chmod(0o777)
        python, packages, shown = _shown()
        words = {"{files}": str(program_files), "{packages}": os.pathsep.join(packages)}
        cell: dict[str, object] = {
            "directory": str(directory),
            "program_files": str(program_files),
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
        return await _run(cell, stdin, limits, Path(parent))
    finally:
        # Also if this task is cancelled: the thread runs to its end.
        await asyncio.shield(asyncio.to_thread(_remove, parent))
        if jail is not None:
            remove_workplaces(jail[0], user)


def _remove(parent: str) -> None:
    """Removes a cell's directory, however deep or full it is.

    One that cannot be removed is a warning and costs no verdict.
    """
    try:
        remove_tree(parent, time.monotonic() + _REMOVAL_S)
    except OSError as error:
        logger.warning("reward.code: %s of a cell stays behind (%s); remove it", parent, error)


def remove_tree(directory: str, deadline_s: float) -> None:
    """Removes a directory with all that is in it.

    Directories inside are moved to the top before they are emptied. So none is deeper than a path
    can name, and no depth needs a stack or a descriptor.

    `deadline_s`: on the monotonic clock. Raises OSError; TimeoutError past the deadline.
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
    """Removes the files of one directory and moves its directories to the top.

    Returns the names of these directories there.
    """
    # The directory may be another user's who left it open.
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
    """Returns the interpreter, the directories of packages, and all paths that programs may see.

    The interpreter is the one below a virtual environment.
    """
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    packages = sorted(
        {os.path.realpath(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}
    )
    prefix = os.path.realpath(sys.base_prefix)
    paths = [*_SYSTEM, os.path.dirname(python), f"{prefix}/lib", f"{prefix}/lib64", *packages]
    shown: list[str] = []
    for path in filter(os.path.lexists, paths):
        directories = [directory for directory in shown if not os.path.islink(directory)]
        if not any(path == outer or path.startswith(f"{outer}/") for outer in directories):
            shown.append(path)
    return python, packages, shown


def _unused_user(cell: int) -> int | None:
    """Returns an id for root's programs that no user of this machine or container has.

    Returns None if programs keep the user that this process has.
    """
    if os.geteuid() != 0:
        return None
    first = 0
    count = 1
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        range_first, _, range_count = map(int, line.split())
        if range_count > count:
            first = range_first
            count = range_count
    if first + count > 2 * _FIRST_USER:
        return _FIRST_USER + cell
    if count > 2000:
        return first + count - 1 - cell % 1000
    return None


@functools.cache
def _jail() -> tuple[str, str] | None:
    """Returns name and file of the first program of JAILS that can carry a cell; None if none can.

    Each is tried with all that a cell shows, as a user that nobody else has: root's cells run as
    such a user, who can often not read what lies below /root.
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
        cell: dict[str, Any] = {
            "shown": shown,
            "program_files": str(_CHILD.parent),
            "directory": parent,
            "files_bytes": CellLimits.files_bytes,
            "num_files": CellLimits.num_files,
        }
        command = [*JAILS[name][1](program, cell, (), None), "--", python, "-I", "-c", ""]
        as_user: dict[str, Any] = {}
        if user is not None:
            as_user = {"user": user, "group": user, "extra_groups": []}
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


async def _run(
    cell: dict[str, object], stdin: bytes, limits: CellLimits, parent: Path
) -> ProgramOutcome:
    """Runs a cell, and ends it at its limits.

    The program's standard streams are files: nobody has to read them for it to go on, and what it
    wrote is there in the end.
    """
    stdin_file = parent / "stdin"
    stdout_file = parent / "stdout"
    stderr_file = parent / "stderr"
    stdin_file.write_bytes(stdin)
    reading, writing = os.pipe()
    try:
        with (
            stdin_file.open("rb") as source,
            stdout_file.open("wb") as output,
            stderr_file.open("wb") as errors,
        ):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                str(_CHILD),
                json.dumps(cell),
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
        level, isolation = await _isolation(reading, process, stderr_file)
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
        # The signal lets it kill all of the program and end; if it does not, it is killed.
        for end in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(end)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), _GRACE_S)
                break
    stdout = _beginning(stdout_file, limits.output_bytes + 1)
    stderr = _beginning(stderr_file, limits.output_bytes + 1)
    if max(len(stdout), len(stderr)) > limits.output_bytes:
        ended = "output"
    return ProgramOutcome(
        ended=ended,
        code=process.returncode if ended == "itself" else None,
        stdout=stdout[: limits.output_bytes],
        stderr=stderr[: limits.output_bytes],
        level=level,
        isolation=isolation,
    )


async def _isolation(
    report: int, process: asyncio.subprocess.Process, errors: Path
) -> tuple[Level, str]:
    """Reads the cell's level of isolation, and its description, before the program begins."""
    try:
        line = await asyncio.wait_for(asyncio.to_thread(os.read, report, _READ_BYTES), _SET_UP_S)
    except asyncio.TimeoutError:
        process.kill()  # the thread ends with the pipe
        raise SandboxFailed(f"the sandbox was not set up within {_SET_UP_S:.0f} s") from None
    if not line:
        message = _beginning(errors, 1000).decode(errors="replace").strip()
        raise SandboxFailed(f"the sandbox did not begin: {message or 'it ended'}")
    report_line = json.loads(line)
    if "failed" in report_line:
        raise SandboxFailed(f"the sandbox failed: {report_line['failed']}")
    level: Level = report_line["level"]
    refused = ""
    if report_line["refused"]:
        refused = f"; no namespaces: {report_line['refused']}"
    return level, f"level {level} ({report_line['by']}{refused})"


def _beginning(path: Path, max_bytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(max_bytes)

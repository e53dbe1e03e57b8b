"""Checks the machine's limits before a run's processes start on it: open files, processes, room for temporary files.
Says after a run whether other programs kept the machine's cores busy.

Without these a run ends minutes later in a traceback of whichever process asks first. A limit that
this process may raise by itself is raised, for all that it starts.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pa_npu.config.schema import Config
from pa_npu.config.words import counted
from pa_npu.control.scratch import LONGEST_DIRECTORY_BYTES, short_directories
from pa_npu.errors import UserError

_MIB = 2**20
# Generous: libraries, logs and caches of a process with torch and vLLM, before it opens
# connections.
_FILES_OF_A_PROCESS = 512
# Generous: torch's and gloo's pools, vLLM's worker processes, the HTTP server.
_THREADS_OF_A_PROCESS = 128
# Sockets, lock files and small sources that engines compile.
_TEMPORARY_BYTES = 64 * _MIB
# A run that has the machine for itself keeps about one process a core busy.
_BUSY_PER_CORE = 2.5
_RUN_DIR_BYTES = 16 * _MIB


def check_limits(config: Config, num_processes: int) -> None:
    """Raises UserError with the first limit of this machine that is too low for `num_processes` of
    the run, and the remedy.
    """
    for problem in limit_problems(config, num_processes):
        raise UserError(problem)


def limit_problems(config: Config, num_processes: int) -> Iterator[str]:
    """Yields one line per limit that is too low."""
    yield from _open_files(config)
    yield from _processes(num_processes)
    yield from _temporary_directory()
    yield from _room(
        _existing(Path(config.run.dir)),
        _RUN_DIR_BYTES,
        "run.dir",
        "choose another run.dir, or make room",
    )


def busy_note() -> str | None:
    """Returns a note if more programs wanted the cores in the last minutes than a run's processes;
    None otherwise.

    To be called when a run has ended, whose processes count among these minutes.
    """
    _, waiting, _ = os.getloadavg()  # the mean of five minutes
    cores = len(os.sched_getaffinity(0))
    if waiting < _BUSY_PER_CORE * cores:
        return None
    return (
        f"Note: other programs kept this machine busy: {waiting:.0f} processes wanted its "
        f"{counted(cores, 'core')} at once (mean of the last five minutes). Seconds and what "
        "overlap gained are those of a busy machine."
    )


def _open_files(config: Config) -> Iterator[str]:
    """Checks open files: the coordinator has a connection per sequence in flight; a rank has
    several to each of its peers.
    """
    rollout = config.rollout
    sequences = (rollout.max_engines or rollout.engines) * rollout.max_num_seqs
    needed = _FILES_OF_A_PROCESS + max(sequences, 4 * config.trainer.devices)
    if hard := _too_low(resource.RLIMIT_NOFILE, needed):
        yield (
            f"open files: a process may open {hard} here, and the run needs {needed} "
            f"(rollout.max_num_seqs x engines, and peers); raise the limit (ulimit -n {needed}, "
            "LimitNOFILE of systemd, --ulimit nofile of a container)"
        )


def _too_low(kind: int, needed: int) -> str | None:
    """Returns the limit, where it is too low and this process may not raise it."""
    soft, hard = resource.getrlimit(kind)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    if hard != resource.RLIM_INFINITY and hard < needed:
        return str(hard)
    resource.setrlimit(kind, (needed, hard))
    return None


def _processes(num_processes: int) -> Iterator[str]:
    """Checks the number of processes against the user's limit, which does not bind root, and the
    control group's, which does.
    """
    needed = num_processes * _THREADS_OF_A_PROCESS
    group = Path("/sys/fs/cgroup")
    limit = _number(group / "pids.max")
    now = _number(group / "pids.current")
    if limit is not None and now is not None and limit - now < needed:
        yield (
            f"processes: {limit - now} more may start in this control group (pids.max {limit}), and "
            f"the run needs up to {needed}, threads included; raise it (--pids-limit of a "
            "container, TasksMax of systemd)"
        )
    if os.geteuid() != 0 and (hard := _too_low(resource.RLIMIT_NPROC, needed)):
        yield (
            f"processes: this user may have {hard}, and the run needs up to {needed}, threads "
            f"included; raise it (ulimit -u {needed})"
        )


def _temporary_directory() -> Iterator[str]:
    remedy = "make room, or name another directory in TMPDIR"
    try:
        directory = Path(tempfile.gettempdir())
        with tempfile.TemporaryFile() as probe:
            probe.write(b"x")
    except OSError as error:
        yield f"TMPDIR: no temporary directory can be written ({error.strerror or error}); {remedy}"
        return
    yield from _room(directory, _TEMPORARY_BYTES, "TMPDIR", remedy)
    if not list(short_directories()):
        yield (
            f"TMPDIR: {directory} has {len(os.fsencode(directory))} bytes, and no socket fits "
            f"behind more than {LONGEST_DIRECTORY_BYTES}; name a shorter directory in TMPDIR, or "
            "let /tmp be written"
        )


def _room(directory: Path, needed: int, name: str, remedy: str) -> Iterator[str]:
    """Bytes, and files where the file system counts them."""
    try:
        free = shutil.disk_usage(directory).free
        files = os.statvfs(directory)
    except OSError as error:
        yield f"{name}: {directory} cannot be used ({error.strerror}); {remedy}"
        return
    if free < needed:
        yield (
            f"{name}: {directory} has {free / _MIB:.0f} MiB free, less than {needed / _MIB:.0f}; "
            f"{remedy}"
        )
    elif files.f_files and files.f_favail < 1000:
        yield f"{name}: {directory} has room for {files.f_favail} more files only; {remedy}"


def _existing(directory: Path) -> Path:
    return next(
        path for path in (directory.absolute(), *directory.absolute().parents) if path.exists()
    )


def _number(file: Path) -> int | None:
    """Reads a number from a file of the control group; None for "max", and if there is no file."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None

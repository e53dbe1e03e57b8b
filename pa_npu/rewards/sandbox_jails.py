"""Command lines of the programs that can carry a cell: bubblewrap and nsjail.

Imports the standard library alone. Both make the same cell: namespaces, a root with what is shown
(read-only), devices, processes, and a small directory to write to. They start the cell
(sandbox_child.py) again, inside.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

USER_INSIDE = 1000
DEVICES = ("null", "zero", "full", "random", "urandom")
_SHARED_MEMORY_BYTES = 1 << 20


def bubblewrap_command(
    program: str, cell: Mapping[str, Any], files: Sequence[str], report: int | None
) -> list[str]:
    """Returns the command line up to the program that it starts.

    That program inherits every descriptor that may be inherited.

    Args:
        program: bubblewrap's path.
        cell: `shown`, `program_files` and `directory`, paths; files_bytes.
        files: further files that are shown.
        report: a descriptor that the program inside needs.
    """
    command = [program, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    command += ["--uid", str(USER_INSIDE), "--gid", str(USER_INSIDE)]
    command += ["--proc", "/proc", "--dev", "/dev"]
    for path in (*cell["shown"], cell["program_files"], *files):
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind", path, path]
    command += ["--perms", "1777", "--size", str(cell["files_bytes"]), "--tmpfs", cell["directory"]]
    command += ["--perms", "1777", "--size", str(_SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"]
    for path in ("/dev", "/"):  # without the file systems below them
        command += ["--remount-ro", path]
    return command


def nsjail_command(
    program: str, cell: Mapping[str, Any], files: Sequence[str], report: int | None
) -> list[str]:
    """Returns nsjail's command line; see bubblewrap_command.

    nsjail's limits are left out: the cell sets its own, inside.
    """
    command = [program, "--mode", "o", "--really_quiet", "--time_limit", "0", "--disable_rlimits"]
    command += ["--nice_level", "0", "--iface_no_lo", "--cwd", "/"]
    command += ["--user", str(USER_INSIDE), "--group", str(USER_INSIDE)]
    for path in (*cell["shown"], cell["program_files"], *files):
        if os.path.islink(path):
            command += ["--symlink", f"{os.readlink(path)}:{path}"]
        else:
            command += ["--bindmount_ro", path]
    for name in DEVICES:
        command += ["--bindmount", f"/dev/{name}"]
    size = f"size={cell['files_bytes']},nr_inodes={cell['num_files'] + 1}"
    command += ["--mount", f"none:{cell['directory']}:tmpfs:{size},mode=1777"]
    command += ["--mount", f"none:/dev/shm:tmpfs:size={_SHARED_MEMORY_BYTES},mode=1777"]
    if report is not None:
        command += ["--pass_fd", str(report)]
    return command


# By name: the program's file, and its command line. The first one that works here carries the cell.
JAILS = {"bubblewrap": ("bwrap", bubblewrap_command), "nsjail": ("nsjail", nsjail_command)}


def remove_workplaces(name: str, user: int | None) -> None:
    """Removes the empty directories that nsjail leaves for each user that it ran something as.

    `user`: one whom a single cell had. None keeps the directories, since other cells of the same
    user may be about to mount there.
    """
    if name != "nsjail" or user is None:
        return
    for place in ("/tmp", "/dev/shm"):
        for purpose in ("root", "tmp"):
            with contextlib.suppress(OSError):
                os.rmdir(f"{place}/nsjail.{user}.{purpose}")

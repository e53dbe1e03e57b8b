"""Measures what the processes of a cell hold: memory, buffers of the kernel, and files.

Imports the standard library alone. The kernel's own limits are by process and by file. These
meters are read many times a second, and a cell that holds too much is killed (sandbox_child.py).
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence

_PIPE_BYTES = 64 << 10  # a pipe's capacity, which a cell's filter does not let grow
_LAST_MESSAGE_BYTES = 64 << 10  # a socket's last message may begin below its limit and end above
# by process: buffers of all its descriptors, where they cannot be looked at
_UNREADABLE_BYTES = 64 * (256 << 10)
_BLOCK_BYTES = 512


def memory_of(pids: Sequence[int], limit_bytes: int) -> int:
    """Returns the bytes that these processes hold together.

    They are private and shared memory, and buffers of sockets and pipes. A page that several
    processes map counts once for each. Only if the sum is beyond the limit, pages count by shares,
    if these can be read.
    """
    buffers = buffers_of(pids)
    names = (b"RssAnon:", b"RssShmem:")
    resident = sum(_kib(f"/proc/{pid}/status", names) or 0 for pid in pids) << 10
    if buffers + resident <= limit_bytes:
        return buffers + resident
    shares = [_kib(f"/proc/{pid}/smaps_rollup", (b"Pss_Anon:", b"Pss_Shmem:")) for pid in pids]
    if None in shares:
        return buffers + resident
    return buffers + (sum(share or 0 for share in shares) << 10)


def buffers_of(pids: Sequence[int]) -> int:
    """Returns the bytes that the sockets and pipes of these processes can hold.

    No process shows how full they are.
    """
    sockets: set[str] = set()
    pipes: set[str] = set()
    unreadable = 0
    for pid in pids:
        links = _descriptors(pid)
        if links is None:
            unreadable += 1
            continue
        sockets |= {link for _, link in links if link.startswith("socket:")}
        pipes |= {link for _, link in links if link.startswith("pipe:")}
    total = len(pipes) * _PIPE_BYTES + unreadable * _UNREADABLE_BYTES
    if sockets:
        total += len(sockets) * (_socket_bytes() + _LAST_MESSAGE_BYTES)
    return total


def files_of(pids: Sequence[int], directory: str, max_files: int) -> tuple[int, int]:
    """Returns the bytes on disk, and the number, of a cell's files and directories.

    They are those in `directory`, and removed ones that are still open. Stops after max_files. A
    directory that cannot be read counts as more than that.
    """
    total = 0
    number = 0
    waiting = [directory]
    while waiting and number <= max_files:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    number += 1
                    if number > max_files:
                        break
                    with contextlib.suppress(FileNotFoundError):
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
                        else:
                            total += entry.stat(follow_symlinks=False).st_blocks * _BLOCK_BYTES
        except FileNotFoundError:
            continue
        except OSError:  # no right to look, or deeper than a path can say
            return total, max_files + 1
    removed: dict[object, int] = {}
    for pid in pids:
        removed |= _removed_files(pid, directory)
    return total + sum(removed.values()), number + len(removed)


def files_inside(pids: Sequence[int], directory: str) -> int:
    """Returns the number of files in `directory` as these processes see it.

    Returns 0 unless it is a file system of their own.
    """
    outside = os.stat(directory).st_dev
    for pid in reversed(pids):
        path = f"/proc/{pid}/root{directory}"
        with contextlib.suppress(OSError):
            if os.stat(path).st_dev != outside:
                system = os.statvfs(path)
                return system.f_files - system.f_ffree
    return 0


def _removed_files(pid: int, directory: str) -> dict[object, int]:
    """Returns the bytes of removed files that a process has open or maps, by file."""
    opened: dict[object, int] = {}
    begin = f"{directory}/"
    for number, link in _descriptors(pid) or ():
        if link.startswith(begin) and link.endswith(" (deleted)"):
            with contextlib.suppress(OSError):
                status = os.stat(f"/proc/{pid}/fd/{number}")
                if stat.S_ISREG(status.st_mode):
                    opened[status.st_ino] = status.st_blocks * _BLOCK_BYTES
    mapped: dict[object, int] = {}
    with (
        contextlib.suppress(OSError),
        open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as lines,
    ):
        for line in lines:
            if not line.endswith(" (deleted)\n") or begin not in line:
                continue
            addresses, _, _, _, inode, _ = line.split(maxsplit=5)
            first, _, last = addresses.partition("-")
            mapped[int(inode)] = mapped.get(int(inode), 0) + int(last, 16) - int(first, 16)
    return mapped | opened


def _descriptors(pid: int) -> list[tuple[str, str]] | None:
    """Returns (number, target) of a process's descriptors; None if nobody may look."""
    links = []
    try:
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                links.append((number, os.readlink(f"/proc/{pid}/fd/{number}")))
    except PermissionError:
        return None
    except OSError:  # it has ended
        return []
    return links


def _socket_bytes() -> int:
    """Returns the bytes that a socket's sender may leave unread.

    Of a pair of UNIX sockets only the sender's limit counts.
    """
    try:
        with open("/proc/sys/net/core/wmem_default", "rb") as file:
            return int(file.read())
    except (OSError, ValueError):  # a container may hide it
        return 212_992


def _kib(file: str, names: Sequence[bytes]) -> int | None:
    try:
        with open(file, "rb") as lines:
            return sum(int(line.split()[1]) for line in lines if line.startswith(tuple(names)))
    except PermissionError:
        return None
    except OSError:  # it has ended
        return 0

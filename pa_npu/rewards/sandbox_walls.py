"""The walls of a cell: a root of its own, no capabilities, Landlock, a filter of system calls. Imports the standard library alone.

Numbers are those of the kernel's headers (linux/mount.h, landlock.h, seccomp.h, and the tables of system calls of both machines).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Sequence
from typing import Any

NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (1 << bit for bit in (17, 25, 26, 27, 28, 29, 30))
_EVERY_NAMESPACE = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_MNT_DETACH, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY, _ATTR_NOSUID = 2, -100, 0x8000, 1, 2
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_SET_SECCOMP = 24, 38, 47, 22
_MOUNT_SETATTR, _LANDLOCK = 442, (444, 445, 446)  # the same on every machine, as are all from 424 on
_DEVICES = ("null", "zero", "full", "random", "urandom")
_CAPABILITIES_VERSION = 0x20080522

# (x86_64, aarch64). What a program needs to leave its cell, to reach another's memory, or to hold memory that no process shows.
_REFUSED = {
    **{"mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "setns": (308, 268)},
    **{"unshare": (272, 97), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271)},
    **{"memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "keyctl": (250, 219)},
    **{"add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280), "perf_event_open": (298, 241)},
    **{"userfaultfd": (323, 282), "open_by_handle_at": (304, 265), "pidfd_getfd": (438, 438), "kcmp": (312, 272)},
    **{"kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273)},
    **{f"mount API {number}": (number, number) for number in (428, 429, 430, 431, 432, 433, 442, 467)},
}
# programs find these missing and take the older call
_MISSING = {"clone3": (435, 435), **{f"io_uring {number}": (number, number) for number in (425, 426, 427)}}
_MACHINES = {
    "x86_64": (0, 0xC000003E, 56, 41),
    "aarch64": (1, 0xC00000B7, 220, 198),
}  # column, audit number, clone, socket
_X32 = 0x40000000
_EPERM, _ENOSYS = 1, 38

libc = ctypes.CDLL(None, use_errno=True)


def call(function: Any, *arguments: Any) -> None:
    """Raises OSError where a call of the C library does not return 0."""
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def own_root(root: str, directory: str, shown: Sequence[str], files_bytes: int) -> None:
    """A root that holds `shown` (read-only), devices, this namespace's processes, and a small `directory` to write to.

    root: an empty directory. Everything else of the machine's files is detached from this mount namespace.
    """
    flags = _MS_NOSUID | _MS_NODEV
    call(libc.mount, b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    call(libc.mount, b"none", os.fsencode(root), b"tmpfs", flags, b"size=1m,mode=0755")
    for path in (*shown, *(f"/dev/{name}" for name in _DEVICES)):
        _show(root, path)
    for place in ("/proc", "/dev/shm", directory):
        os.makedirs(root + place, exist_ok=True)
    with contextlib.suppress(OSError):  # inside a container that hides parts of it there is nothing of it then
        call(libc.mount, b"proc", os.fsencode(f"{root}/proc"), b"proc", flags | _MS_NOEXEC, None)
    attributes = struct.pack("=4Q", _ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
    call(
        libc.syscall,
        *(_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(root), _AT_RECURSIVE, attributes),
        ctypes.c_size_t(len(attributes)),
    )
    size = f"size={files_bytes},mode=1777".encode()
    call(libc.mount, b"none", os.fsencode(root + directory), b"tmpfs", flags, size)
    call(libc.mount, b"none", os.fsencode(f"{root}/dev/shm"), b"tmpfs", flags | _MS_NOEXEC, b"size=1m,mode=1777")
    os.chdir(root)
    call(
        libc.syscall, {"x86_64": 155}.get(os.uname().machine, 41), b".", b"."
    )  # pivot_root: the old root comes to lie above
    call(libc.umount2, b".", _MNT_DETACH)
    os.chdir("/")


def _show(root: str, path: str) -> None:
    target = root + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    call(libc.mount, os.fsencode(path), os.fsencode(target), None, _MS_BIND | _MS_REC, None)


def drop_bounding_set() -> None:
    """No program that is started from here on can have a capability, whatever its user or its file says."""
    capability = 0
    while libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    libc.prctl(_PR_CAP_AMBIENT, 4, 0, 0, 0)


def drop_capabilities() -> None:
    """This process's own, and what set-user-id files could bring."""
    call(libc.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call(libc.capset, struct.pack("=Ii", _CAPABILITIES_VERSION, 0), bytes(24))


def only_files(readable: Sequence[str], writable: str) -> bool:
    """Whether Landlock now refuses all other files to this process and its children (linux/landlock.h)."""
    create, add_rule, restrict = _LANDLOCK
    version = libc.syscall(create, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    bits = 13 + min(version - 1, 2) + (version >= 5)  # refer, truncate, and ioctl of devices came later
    every = (1 << bits) - 1
    execute, write, read, read_directory = (1 << bit for bit in range(4))
    of_files = (execute | write | read | 1 << 14 | 1 << 15) & every
    signals_and_sockets = 3 if version >= 6 else 0
    attributes = struct.pack("=3Q", every, 3 if version >= 4 else 0, signals_and_sockets)
    attributes = attributes[: 24 if version >= 6 else 16 if version >= 4 else 8]
    ruleset = libc.syscall(create, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        return False
    rules = [(path, execute | read | read_directory) for path in readable]
    rules += [(writable, every & ~(1 << 6 | 1 << 11)), *((f"/dev/{name}", read | write) for name in _DEVICES)]
    try:
        for path, access in rules:
            with contextlib.suppress(FileNotFoundError):
                beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
                rule = struct.pack("=Qi", access if os.path.isdir(path) else access & of_files, beneath)
                call(libc.syscall, add_rule, ruleset, 1, rule, 0)
                os.close(beneath)
        call(libc.syscall, restrict, ruleset, 0)
    except OSError:
        return False
    finally:
        os.close(ruleset)
    return True


def filter_of_calls(*, sockets: bool) -> bytes:
    """Refuses system calls by which a program could leave its cell, and sockets unless `sockets`. Empty on an unknown machine."""
    if os.uname().machine not in _MACHINES:
        return b""
    column, machine, clone, socket = _MACHINES[os.uname().machine]
    refused = [numbers[column] for numbers in _REFUSED.values()] + ([] if sockets else [socket])
    return b"".join(_filter(machine, clone, refused, [numbers[column] for numbers in _MISSING.values()]))


def apply_filter(program: bytes) -> bool:
    """Whether it holds from here on, for this process and its children."""
    data = ctypes.create_string_buffer(program)
    head = struct.pack("@HP", len(program) // 8, ctypes.addressof(data))
    return bool(program and libc.prctl(_PR_SET_SECCOMP, 2, head, 0, 0) == 0)


def _filter(machine: int, clone: int, refused: Sequence[int], missing: Sequence[int]) -> list[bytes]:
    """The filter in classic BPF, over struct seccomp_data: number at 0, machine at 4, the first argument at 16."""
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, error = 0x7FFF0000, 0x80000000, 0x00050000

    def step(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
        return struct.pack("=HBBI", code, then, otherwise, value)

    steps = [step(load, 4), step(equal, machine, 1), step(give, kill), step(load, 0)]
    steps += [step(at_least, _X32, 0, 1), step(give, error | _ENOSYS)]
    for numbers, answer in ((refused, _EPERM), (missing, _ENOSYS)):
        for number in numbers:
            steps += [step(equal, number, 0, 1), step(give, error | answer)]
    steps += [
        step(equal, clone, 0, 3),
        step(load, 16),
        step(any_bit, _EVERY_NAMESPACE, 0, 1),
        step(give, error | _EPERM),
    ]
    return [*steps, step(give, allow)]


def memory_of(pids: Sequence[int], limit_bytes: int) -> int:
    """Bytes that these processes hold together in memory of their own and memory that they share.

    Pages that several map count once for each, unless that is more than the limit: then by shares, where these can be read.
    """
    total = sum(_kib(f"/proc/{pid}/status", (b"RssAnon:", b"RssShmem:")) or 0 for pid in pids) << 10
    if total <= limit_bytes:
        return total
    shares = [_kib(f"/proc/{pid}/smaps_rollup", (b"Pss_Anon:", b"Pss_Shmem:")) for pid in pids]
    return total if None in shares else sum(share or 0 for share in shares) << 10


def _kib(file: str, names: Sequence[bytes]) -> int | None:
    try:
        with open(file, "rb") as lines:
            return sum(int(line.split()[1]) for line in lines if line.startswith(tuple(names)))
    except PermissionError:
        return None
    except OSError:  # it has ended
        return 0

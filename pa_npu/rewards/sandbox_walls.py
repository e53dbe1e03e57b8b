"""The walls of a cell: a root, no capabilities, Landlock, and a filter of system calls.

Imports the standard library alone. Numbers are those of the kernel's headers (linux/mount.h,
landlock.h, seccomp.h, and the tables of system calls of both machines).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    1 << bit for bit in (17, 25, 26, 27, 28, 29, 30)
)
_EVERY_NAMESPACE = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_MNT_DETACH, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY, _ATTR_NOSUID = 2, -100, 0x8000, 1, 2
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_SET_SECCOMP = 24, 38, 47, 22
# the same on every machine, as are all from 424 on
_MOUNT_SETATTR, _LANDLOCK = 442, (444, 445, 446)
_DEVICES = ("null", "zero", "full", "random", "urandom")
_CAPABILITIES_VERSION = 0x20080522

_Numbers = tuple[int | None, int | None]
"""A system call's number on x86_64 and on aarch64; None where the machine has no such call."""


def _numbered(*numbers: int) -> dict[str, _Numbers]:
    """Returns calls whose number is the same on every machine."""
    return {f"call {number}": (number, number) for number in numbers}


# A program needs these to leave its cell, to reach another process, or to hold memory that no
# process shows.
_REFUSED: dict[str, _Numbers] = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "setns": (308, 268),
    "unshare": (272, 97),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "keyctl": (250, 219),
    "ioprio_set": (251, 30),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "open_by_handle_at": (304, 265),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    # queues, semaphores and memory that outlive a process: System V's and POSIX's
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    # a descriptor or a page inside a socket or a pipe is in no process that could be counted
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    "vmsplice": (278, 75),
    "tee": (276, 77),
    "splice": (275, 76),
    # the mount API
    **_numbered(428, 429, 430, 431, 432, 433, 442, 467),
}
# Landlock does not refuse these on the files of others (its documentation, "Current limitations").
# They are refused only if the cell has no root of its own.
_REFUSED_ON_FILES: dict[str, _Numbers] = {
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    **_numbered(463, 466, 469),  # setxattrat, removexattrat, file_setattr
}
# These return 0 without an effect, so that programs go on: shutil.copy and tar set modes and times.
_IGNORED_ON_FILES: dict[str, _Numbers] = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
}
_TRUNCATE = {"truncate": (76, 45)}  # Landlock refuses it from version 3 on
_SIGNAL_OF_ANY = {"pidfd_send_signal": (424, 424)}
_SIGNALS = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}
_OF_ITSELF = {  # their first argument is a process, 0 for the calling one
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
}
_SETPRIORITY = (141, 140)
_FCNTL = (72, 25)
_IOCTL = (16, 29)
_PRCTL = (157, 167)
_SETSOCKOPT = (54, 208)
_SOL_SOCKET, _BUFFER_SIZES = 1, (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, and both of them with FORCE
# an owner gets signals
_F_SETPIPE_SZ, _SET_OWNER, _SET_OWNER_BY_IOCTL = 1031, (8, 15), (0x8901, 0x8902)
# programs find these missing and take the older call
_MISSING: dict[str, _Numbers] = {"clone3": (435, 435), **_numbered(425, 426, 427)}  # io_uring
_MACHINES = {
    "x86_64": (0, 0xC000003E, 56, 41),
    "aarch64": (1, 0xC00000B7, 220, 198),
}  # column, audit number, clone, socket
_X32 = 0x40000000
_EPERM, _ENOSYS = 1, 38
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _GIVE = 0x20, 0x15, 0x35, 0x45, 0x06  # steps of a filter
# a filter's answers; with error 0 a call returns 0, undone
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_REFUSE = _ERROR | _EPERM
_PR_SET_DUMPABLE = 4
_LANDLOCK_TRUNCATES, _LANDLOCK_SCOPES_SIGNALS = 3, 6  # from these versions on

libc = ctypes.CDLL(None, use_errno=True)


def call(function: Any, *arguments: Any) -> None:
    """Calls a function of the C library; raises OSError if it does not return 0."""
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def make_root(
    *, root: str, directory: str, shown: Sequence[str], files_bytes: int, num_files: int
) -> None:
    """Makes and enters a root; detaches all other files from this mount namespace.

    The root holds `shown` (read-only), devices, this namespace's processes, and a small directory
    to write to.

    Args:
        root: an empty directory.
        directory: path of the directory to write to.
        shown: paths of files and directories.
        files_bytes: size of `directory`.
        num_files: files and directories that it can hold.
    """
    flags = _MS_NOSUID | _MS_NODEV
    call(libc.mount, b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    call(libc.mount, b"none", os.fsencode(root), b"tmpfs", flags, b"size=1m,mode=0755")
    for path in (*shown, *(f"/dev/{name}" for name in _DEVICES)):
        _show(root, path)
    for place in ("/proc", "/dev/shm", directory):
        os.makedirs(root + place, exist_ok=True)
    # Inside a container that hides parts of /proc the mount is refused; /proc is empty then.
    with contextlib.suppress(OSError):
        call(libc.mount, b"proc", os.fsencode(f"{root}/proc"), b"proc", flags | _MS_NOEXEC, None)
    attributes = struct.pack("=4Q", _ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
    call(
        libc.syscall,
        _MOUNT_SETATTR,
        _AT_FDCWD,
        os.fsencode(root),
        _AT_RECURSIVE,
        attributes,
        ctypes.c_size_t(len(attributes)),
    )
    size = f"size={files_bytes},nr_inodes={num_files + 1},mode=1777".encode()
    call(libc.mount, b"none", os.fsencode(root + directory), b"tmpfs", flags, size)
    call(
        libc.mount,
        b"none",
        os.fsencode(f"{root}/dev/shm"),
        b"tmpfs",
        flags | _MS_NOEXEC,
        b"size=1m,nr_inodes=256,mode=1777",
    )
    os.chdir(root)
    # pivot_root: the old root comes to lie above the new one
    call(libc.syscall, {"x86_64": 155}.get(os.uname().machine, 41), b".", b".")
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
    """Ensures that no program started from now on has a capability, whatever its user or file."""
    capability = 0
    while libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    libc.prctl(_PR_CAP_AMBIENT, 4, 0, 0, 0)


def drop_capabilities() -> None:
    """Drops this process's capabilities, and those that set-user-id files could bring."""
    call(libc.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call(libc.capset, struct.pack("=Ii", _CAPABILITIES_VERSION, 0), bytes(24))


def landlock_version(newest: int) -> int:
    """Returns the version of Landlock's interface to use, at most `newest`; below 1 if none."""
    return min(int(libc.syscall(_LANDLOCK[0], None, ctypes.c_size_t(0), 1)), newest)


def only_files(readable: Sequence[str], writable: str, version: int) -> bool:
    """Lets Landlock refuse all other files to this process and its children (linux/landlock.h).

    Returns whether it does. `version`: of Landlock's interface, from landlock_version.
    """
    create, add_rule, restrict = _LANDLOCK
    if version < 1:
        return False
    # refer, truncate, and ioctl of devices came later
    bits = 13 + min(version - 1, 2) + (version >= 5)
    every = (1 << bits) - 1
    execute = 1 << 0
    write = 1 << 1
    read = 1 << 2
    read_directory = 1 << 3
    of_files = (execute | write | read | 1 << 14 | 1 << 15) & every
    signals_and_sockets = 3 if version >= 6 else 0
    attributes = struct.pack("=3Q", every, 3 if version >= 4 else 0, signals_and_sockets)
    if version < 4:
        attributes = attributes[:8]
    elif version < 6:
        attributes = attributes[:16]
    ruleset = libc.syscall(create, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        return False
    rules = [(path, execute | read | read_directory) for path in readable]
    rules.append((writable, every & ~(1 << 6 | 1 << 11)))
    rules += [(f"/dev/{name}", read | write) for name in _DEVICES]
    try:
        for path, access in rules:
            with contextlib.suppress(FileNotFoundError):
                beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
                if not os.path.isdir(path):
                    access &= of_files
                rule = struct.pack("=Qi", access, beneath)
                call(libc.syscall, add_rule, ruleset, 1, rule, 0)
                os.close(beneath)
        call(libc.syscall, restrict, ruleset, 0)
    except OSError:
        return False
    finally:
        os.close(ruleset)
    return True


def filter_of_calls(*, namespaces: bool, landlock: int = 0, alone: bool = False) -> bytes:
    """Returns a filter in classic BPF that refuses the ways out of a cell.

    Returns no bytes on an unknown machine.

    Args:
        namespaces: whether files, processes and network of others are out of sight. If not, also
            refuses sockets, signals to other processes, and changes of modes, times, owners and
            attributes of files, as far as Landlock does not.
        landlock: version of Landlock in force.
        alone: whether no other process has the program's user, so that its signals reach nobody.
    """
    if os.uname().machine not in _MACHINES:
        return b""
    column, machine, clone, socket = _MACHINES[os.uname().machine]

    def numbers(calls: Mapping[str, _Numbers]) -> list[int]:
        columns = [pair[column] for pair in calls.values()]
        return [number for number in columns if number is not None]

    answers = dict.fromkeys(numbers(_REFUSED), _REFUSE)
    answers |= dict.fromkeys(numbers(_MISSING), _ERROR | _ENOSYS)
    rules = [_Rule(number, ((0, (0,)),), _ALLOW, _REFUSE) for number in numbers(_OF_ITSELF)]
    rules.append(_Rule(_SETPRIORITY[column], ((0, (0,)), (1, (0,))), _ALLOW, _REFUSE))
    rules.append(_Rule(_PRCTL[column], ((0, (_PR_SET_DUMPABLE,)),), _REFUSE, _ALLOW))
    rules.append(
        _Rule(_SETSOCKOPT[column], ((1, (_SOL_SOCKET,)), (2, _BUFFER_SIZES)), _REFUSE, _ALLOW)
    )
    commands: tuple[int, ...] = (_F_SETPIPE_SZ,)
    if not namespaces:
        answers |= dict.fromkeys([socket, *numbers(_REFUSED_ON_FILES)], _REFUSE)
        answers |= dict.fromkeys(numbers(_IGNORED_ON_FILES), _ERROR)
        if landlock < _LANDLOCK_TRUNCATES:
            answers |= dict.fromkeys(numbers(_TRUNCATE), _REFUSE)
        if landlock < _LANDLOCK_SCOPES_SIGNALS and not alone:
            answers |= dict.fromkeys(numbers(_SIGNAL_OF_ANY), _REFUSE)
            rules += [
                _Rule(number, ((0, (0, os.getpid())),), _ALLOW, _REFUSE)
                for number in numbers(_SIGNALS)
            ]
            rules.append(_Rule(_IOCTL[column], ((1, _SET_OWNER_BY_IOCTL),), _REFUSE, _ALLOW))
            commands += _SET_OWNER
    rules.append(_Rule(_FCNTL[column], ((1, commands),), _REFUSE, _ALLOW))
    return b"".join(_filter(machine, clone, answers, rules))


def apply_filter(program: bytes) -> bool:
    """Applies a filter to this process and its children; returns whether it is in force."""
    data = ctypes.create_string_buffer(program)
    head = struct.pack("@HP", len(program) // 8, ctypes.addressof(data))
    return bool(program and libc.prctl(_PR_SET_SECCOMP, 2, head, 0, 0) == 0)


@dataclass(frozen=True)
class _Rule:
    """Answers one system call by its arguments.

    The answer is `matched` if each argument (by its index) has one of its values.
    """

    number: int
    arguments: tuple[tuple[int, tuple[int, ...]], ...]
    matched: int
    otherwise: int


def _step(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("=HBBI", code, then, otherwise, value)


def _filter(
    machine: int, clone: int, answers: Mapping[int, int], rules: Sequence[_Rule]
) -> list[bytes]:
    """Returns the steps of a filter over struct seccomp_data.

    There the number of the call is at 0, the machine at 4, and lower halves of arguments from 16 on.
    """
    steps = [_step(_LOAD, 4), _step(_EQUAL, machine, 1), _step(_GIVE, _KILL), _step(_LOAD, 0)]
    steps += [_step(_AT_LEAST, _X32, 0, 1), _step(_GIVE, _ERROR | _ENOSYS)]
    for number, answer in answers.items():
        steps += [_step(_EQUAL, number, 0, 1), _step(_GIVE, answer)]
    for rule in rules:
        body = _rule_steps(rule)
        steps += [_step(_EQUAL, rule.number, 0, len(body)), *body]
    steps += [
        _step(_EQUAL, clone, 0, 3),
        _step(_LOAD, 16),
        _step(_ANY_BIT, _EVERY_NAMESPACE, 0, 1),
        _step(_GIVE, _REFUSE),
    ]
    return [*steps, _step(_GIVE, _ALLOW)]


def _rule_steps(rule: _Rule) -> list[bytes]:
    steps = []
    for argument, values in rule.arguments:
        steps.append(_step(_LOAD, 16 + 8 * argument))
        for number, value in enumerate(values):
            steps.append(_step(_EQUAL, value & 0xFFFFFFFF, len(values) - number))
        steps.append(_step(_GIVE, rule.otherwise))
    return [*steps, _step(_GIVE, rule.matched)]

"""The cell of one program: namespaces, limits and an empty directory, then the program. Imports the standard library alone.

    python -I sandbox_child.py LIMITS REPORT      limits as JSON; a descriptor. The program's own pipes are this process's

    this process: unshares, forks, waits, and ends with the program's status; kills what is left of it
      └─ first process of a new PID namespace: mounts, and reaps; with it everything of the program ends
           └─ the program, without rights, under its limits

Where the system grants no namespaces the program runs under its limits alone, and this process kills its orphans. One JSON line is
written: {"isolated": [...], "refused": reason | null}, to REPORT, before the program begins.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = (
    0x00020000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_SET_PDEATHSIG = 36, 38, 1
_FIRST_USER = 1_000_000_000  # ids that nobody has; one for each cell, because processes are counted by user
_libc = ctypes.CDLL(None, use_errno=True)


class _EndNow(BaseException):
    """This cell is to end: its time is over, or who watches it is gone."""


def _on_end(*_: object) -> NoReturn:
    raise _EndNow


class _Attributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def main() -> NoReturn:
    limits, report = json.loads(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGTERM, _on_end)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    was_root = os.geteuid() == 0
    isolated, refused, as_root = _unshare(was_root)
    first = os.fork()
    if first != 0:
        os.close(report)
    else:
        _first_process(limits, report, isolated, refused, as_root)
    try:
        status = _wait_for(first)
    except _EndNow:
        status = signal.SIGKILL
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _kill_orphans()
    if os.WIFSIGNALED(status):
        os._exit(128 + os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _unshare(was_root: bool) -> tuple[list[str], str | None, bool]:
    """What is isolated, why not more, and whether the program may be given a user id of its own."""
    wanted = _CLONE_NEWNET | _CLONE_NEWPID | _CLONE_NEWNS | _CLONE_NEWIPC
    everything = ["network", "processes", "files"]
    uid, gid = os.geteuid(), os.getegid()
    if was_root and _libc.unshare(wanted) == 0:
        return everything, None, True
    if _libc.unshare(_CLONE_NEWUSER | wanted) != 0:
        return [], os.strerror(ctypes.get_errno()), was_root
    try:
        for file, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{file}", "w") as target:
                target.write(text)
    except OSError as error:
        return ["network", "processes"], str(error), False
    return everything, None, False


def _first_process(
    limits: Mapping[str, Any], report: int, isolated: list[str], refused: str | None, as_root: bool
) -> NoReturn:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    python = limits["python"]
    try:
        if "files" in isolated:
            try:
                _mounts(limits)
                python = limits["copied_python"] if as_root else python
            except OSError as error:
                isolated, refused = [what for what in isolated if what != "files"], str(error)
        os.write(report, json.dumps({"isolated": isolated, "refused": refused}).encode() + b"\n")
        os.close(report)
        if limits["required"] and refused is not None:
            os._exit(125)
        program = os.fork()
        if program == 0:
            _become_the_program(limits, python, as_root, "processes" in isolated)
        for descriptor in (0, 1, 2):
            os.close(descriptor)
        status = _wait_for(program)
        os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
    except BaseException as error:
        print(f"the sandbox failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(126)


def _mounts(limits: Mapping[str, Any]) -> None:
    """Everything read-only, but for a small empty file system at the program's directory; /proc shows its own processes only."""
    directory = limits["directory"]
    _call(_libc.mount, b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    size = f"size={limits['files_bytes']},mode=1777".encode()
    flags = _MS_NOSUID | _MS_NODEV
    try:
        _call(_libc.mount, b"proc", b"/proc", b"proc", flags | _MS_NOEXEC, None)
    except OSError:  # inside a container that hides parts of it: nothing of it then
        _call(_libc.mount, b"none", b"/proc", b"tmpfs", flags | _MS_NOEXEC, b"size=4096")
    for source, target in limits["binds"]:
        _call(_libc.mount, os.fsencode(source), os.fsencode(target), None, _MS_BIND | _MS_REC, None)
    attributes = _Attributes(set=_MOUNT_ATTR_RDONLY)
    _call(
        _libc.syscall,
        *(_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, ctypes.byref(attributes)),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    _call(_libc.mount, b"none", os.fsencode(directory), b"tmpfs", flags, size)
    if os.path.isdir("/dev/shm"):
        _call(_libc.mount, b"none", b"/dev/shm", b"tmpfs", flags, b"size=4096")


def _become_the_program(limits: Mapping[str, Any], python: str, as_root: bool, own_count: bool) -> NoReturn:
    os.setsid()
    os.chdir(limits["directory"])
    if as_root:
        user = _FIRST_USER + limits["cell"]
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for name, value in (
        ("CPU", limits["cpu_s"]),
        ("AS", limits["memory_bytes"]),
        ("FSIZE", limits["files_bytes"]),
        ("NPROC", limits["processes"] + (0 if as_root or own_count else _processes_of_this_user())),
        ("NOFILE", limits["open_files"]),
        ("CORE", 0),
    ):
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": limits["directory"], "TMPDIR": limits["directory"]}
    environment |= {
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        os.execve(python, [python, *limits["arguments"]], environment)
    except OSError as error:
        print(f"the sandbox failed: {python}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(126)


def _processes_of_this_user() -> int:
    """The kernel counts a user's processes and threads, all of them where there is no namespace of their own."""
    found, user = 0, os.getuid()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == user:
                found += len(os.listdir(f"/proc/{name}/task"))
    return found


def _wait_for(child: int) -> int:
    """The status of this child; others that end meanwhile are reaped."""
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            return 0
        if pid == child:
            return status


def _kill_orphans() -> None:
    """What the program has left behind where it had no PID namespace: this process is its reaper."""
    while True:
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                children = [int(pid) for pid in file.read().split()]
        except OSError:
            return
        if not children:
            return
        for child in children:  # all, before any is waited for: they may go on to fork
            _ignoring(lambda child=child: os.kill(child, signal.SIGKILL))  # type: ignore[misc]
        for child in children:
            _ignoring(lambda child=child: os.waitpid(child, 0))  # type: ignore[misc]


def _ignoring(action: Callable[[], object]) -> None:
    with contextlib.suppress(OSError):
        action()


def _call(function: Any, *arguments: Any) -> None:
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    main()

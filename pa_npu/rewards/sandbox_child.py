"""The cell of one program: makes namespaces, limits and a root, then becomes the program.

Imports the standard library alone.

    python -I sandbox_child.py LIMITS REPORT

    LIMITS   the cell's description as JSON (sandbox.py)
    REPORT   a descriptor, to which one JSON line is written before the program begins:
             {"level", "by", "refused": reason | null}, or {"failed": reason}

The program's standard streams are this process's. The processes of a cell:

    this process: makes namespaces, forks, measures what the cell holds, kills the rest of the
    │             program in the end, and ends with the program's status
    └─ first process of a new PID namespace (or a jail's): makes the root, and reaps; all of the
       │                                               program ends with it
       └─ the program, as a user that nobody is, without capabilities, behind filters and limits

There are three levels: "namespaces" (all of that), "files" (only Landlock and the filter of system
calls keep the program from network and files), and "limits" (neither).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(__file__))  # -I leaves it out
import sandbox_jails as jails
import sandbox_meters as meters
import sandbox_walls as walls

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_USER_INSIDE = jails.USER_INSIDE
_LOOK_EVERY_S = 0.02
_FAILED = 126
_PROCESSES_ADDED = 4  # by this file and a jail
_FILES = ("sandbox_child.py", "sandbox_jails.py", "sandbox_meters.py", "sandbox_walls.py")
_USERS_COUNTED_BY_NAMESPACE = (5, 14)  # from this kernel on
LEVELS = ("limits", "files", "namespaces")


class _EndNow(BaseException):
    """This cell has to end: its time is over, or its keeper is gone."""


def _on_end(*_: object) -> NoReturn:
    raise _EndNow


def main() -> NoReturn:
    limits = json.loads(sys.argv[1])
    report = int(sys.argv[2])
    os.set_inheritable(report, False)
    if limits["inside"]:
        _guarded(report, lambda: _inside_a_jail(limits, report))
    signal.signal(signal.SIGTERM, _on_end)
    # Blocked, so that its delivery ends the pause between two measurements of the cell.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    walls.libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    walls.libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    limits["user_processes"] = _processes_of_this_user()
    _raise_open_files()
    if limits["jail"]:
        first = os.fork()
        if first == 0:
            _guarded(report, lambda: _become_the_jail(limits, report))
    else:
        user, refused = _namespaces(limits["user"])
        first = os.fork()
        if first == 0:
            _guarded(report, lambda: _first_process(limits, report, user, refused))
    os.close(report)
    try:
        status = _watch(first, limits)
    except _EndNow:
        status = signal.SIGKILL
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _kill_all()
    os._exit(_exit_status(status))


def _exit_status(status: int) -> int:
    """Returns a status of os.wait as a shell has it: 128 + n for signal n."""
    if os.WIFSIGNALED(status):
        return 128 + os.WTERMSIG(status)
    return os.WEXITSTATUS(status)


def _guarded(report: int, action: Callable[[], object]) -> NoReturn:
    """Runs an action, reports what it raises, and ends this process."""
    try:
        action()
    except BaseException as error:
        line = json.dumps({"failed": f"{type(error).__name__}: {error}"})
        # Where the report has been made already, it was the program that failed.
        with contextlib.suppress(OSError):
            os.write(report, line.encode() + b"\n")
    os._exit(_FAILED)


def _namespaces(unused_user: int | None) -> tuple[int | None, str | None]:
    """Makes the namespaces of the cell.

    Returns the user that the program has to become, if another, and the reason why there are no
    namespaces, if there are none. `unused_user`: an id that nobody has, if this process may become
    another user.
    """
    wanted = walls.NEWNET | walls.NEWPID | walls.NEWIPC | walls.NEWUTS
    if (
        os.geteuid() == 0
        and unused_user is not None
        and walls.libc.unshare(wanted | walls.NEWNS) == 0
    ):
        return unused_user, None
    pid = os.getpid()
    uid = os.geteuid()
    gid = os.getegid()
    begin, begins = os.pipe()
    helper = os.fork()
    if helper == 0:  # only a process outside may give the namespace a second user
        os.close(begins)
        if os.read(begin, 1) and unused_user is not None:
            with contextlib.suppress(OSError):
                _map(
                    pid,
                    users=f"0 {uid} 1\n{_USER_INSIDE} {unused_user} 1",
                    groups=f"0 {gid} 1\n{_USER_INSIDE} {unused_user} 1",
                )
                os._exit(0)
        os._exit(1)
    made = walls.libc.unshare(walls.NEWUSER | wanted) == 0
    refused = None if made else os.strerror(ctypes.get_errno())
    if made:
        os.write(begins, b"x")
    os.close(begins)
    os.close(begin)
    has_second = os.waitpid(helper, 0)[1] == 0
    if has_second or not made:
        return (_USER_INSIDE if has_second else unused_user), refused
    try:
        _map(pid, users=f"{_USER_INSIDE} {uid} 1", groups=f"{_USER_INSIDE} {gid} 1")
    except OSError as error:
        return None, str(error)
    return None, None


def _map(pid: int, users: str, groups: str) -> None:
    files = [("uid_map", users), ("gid_map", groups)]
    if "\n" not in groups:
        # A process that may not become another group may not leave one either.
        files.insert(1, ("setgroups", "deny"))
    for name, text in files:
        with open(f"/proc/{pid}/{name}", "w") as file:
            file.write(text)


def _first_process(
    limits: Mapping[str, Any], report: int, user: int | None, refused: str | None
) -> NoReturn:
    walls.libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    by = None
    if refused is None:
        try:
            walls.call(walls.libc.unshare, walls.NEWNS)
            shown = [*limits["shown"], limits["program_files"]]
            walls.make_root(
                root=limits["root"],
                directory=limits["directory"],
                shown=shown,
                files_bytes=limits["files_bytes"],
                num_files=limits["num_files"],
            )
            by = "namespaces of its own"
        except OSError as error:
            refused = str(error)
    program = os.fork()
    if program == 0:
        _guarded(report, lambda: _become_the_program(limits, report, by, user, refused))
    _reap_until(program, report)


def _reap_until(program: int, report: int) -> NoReturn:
    """Reaps whatever ends in a PID namespace, as its first process; ends as the program does."""
    # The program may read or trace nothing of this process.
    walls.libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    walls.drop_bounding_set()
    walls.drop_capabilities()
    os.close(report)
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    while True:
        pid, status = os.wait()
        if pid == program:
            os._exit(_exit_status(status))


def _become_the_jail(limits: Mapping[str, Any], report: int) -> NoReturn:
    """Becomes bubblewrap or nsjail, which starts this file again, inside.

    Root becomes a user that nobody is before.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    walls.libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.set_inheritable(report, True)
    here = os.path.dirname(os.path.realpath(__file__))
    files = [os.path.join(here, name) for name in _FILES]
    name, program = limits["jail"]
    command = jails.JAILS[name][1](program, limits, files, report)
    calls = walls.filter_of_calls(namespaces=True)
    if name == "bubblewrap" and calls:  # for bubblewrap's own process in there too
        reading, writing = os.pipe()
        os.write(writing, calls)
        os.close(writing)
        os.set_inheritable(reading, True)
        command += ["--seccomp", str(reading)]
    inside = json.dumps({**limits, "inside": True})
    if limits["user"] is not None:
        os.setgroups([])
        os.setresgid(limits["user"], limits["user"], limits["user"])
        os.setresuid(limits["user"], limits["user"], limits["user"])
        # Becoming another user has cleared it.
        walls.libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.execv(program, [*command, "--", limits["python"], "-I", files[0], inside, str(report)])


def _inside_a_jail(limits: Mapping[str, Any], report: int) -> None:
    """Becomes the program.

    nsjail, unlike bubblewrap, puts no first process into the namespace: this process is one then.
    """
    name = limits["jail"][0]
    if os.getpid() == 1:
        program = os.fork()
        if program != 0:
            _reap_until(program, report)
    _become_the_program(limits, report, by=name, user=None, refused=None)


def _become_the_program(
    limits: Mapping[str, Any], report: int, by: str | None, user: int | None, refused: str | None
) -> None:
    """Enters the walls and limits, and becomes the program.

    `by`: the name of what made namespaces and a root; None if nothing did. `user`: the user to
    become; None keeps the present one. `refused`: why there are no namespaces.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    directory = limits["directory"]
    python = limits["python"]
    if not limits["inside"]:
        os.setsid()
    os.chdir(directory)
    release = tuple(map(int, os.uname().release.split("-")[0].split(".")[:2]))
    alone = user is not None or (by is not None and release >= _USERS_COUNTED_BY_NAMESPACE)
    _set_limits(limits, 0 if alone else limits["user_processes"])
    walls.drop_bounding_set()
    if user is not None and (by is not None or _all_may_read(python)):
        with contextlib.suppress(PermissionError):
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
    walls.drop_capabilities()
    landlock = walls.landlock_version(limits["landlock"])
    readable = [*limits["shown"], limits["program_files"]]
    behind = by is not None or walls.only_files(readable, directory, landlock)
    alone = os.geteuid() == limits["user"]
    filtered = walls.apply_filter(
        walls.filter_of_calls(namespaces=by is not None, landlock=landlock, alone=alone)
    )
    has_walls = behind and filtered
    if not has_walls:
        level = "limits"
    elif by is None:
        level = "files"
    else:
        level = "namespaces"
    if not has_walls and os.geteuid() == 0:
        raise PermissionError(f"programs would run as root here ({refused}); run as another user")
    if not os.access(python, os.X_OK):
        raise PermissionError(f"{python} cannot be read by the user of programs")
    if by is None:
        by = "limits of processes alone"
        if has_walls:
            by = f"Landlock {landlock} and a filter of system calls"
    report_line = {"level": level, "by": by, "refused": refused}
    os.write(report, json.dumps(report_line).encode() + b"\n")
    os.close(report)
    if LEVELS.index(level) < LEVELS.index(limits["require"]):
        return
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": directory,
        "TMPDIR": directory,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    os.execve(python, [python, *limits["arguments"]], environment)


def _set_limits(limits: Mapping[str, Any], user_processes: int) -> None:
    """Sets the kernel's limits.

    `user_processes`: processes and threads of this user outside of the cell that the kernel counts
    too.
    """
    for name, limit in (
        ("CPU", limits["cpu_s"]),
        ("AS", limits["memory_bytes"]),
        ("FSIZE", limits["files_bytes"]),
        ("NPROC", limits["processes"] + user_processes),
        ("NOFILE", limits["open_files"]),
        ("CORE", 0),
        ("MSGQUEUE", 0),
    ):
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (value, value))


def _all_may_read(path: str) -> bool:
    while path != "/":
        if not os.stat(path).st_mode & 0o001:
            return False
        path = os.path.dirname(path)
    return True


def _processes_of_this_user() -> int:
    """Returns the number of processes and threads of this user.

    The kernel counts all of them where a cell has no namespace of users.
    """
    total = 0
    user = os.getuid()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == user:
                total += len(os.listdir(f"/proc/{name}/task"))
    return total


def _raise_open_files() -> None:
    """Lets this process open as many files as it may: it looks at all of a cell's."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _watch(first: int, limits: Mapping[str, Any]) -> int:
    """Waits for the first process; returns its status, or SIGKILL if the cell holds too much.

    The kernel limits memory and files only by process, and does not count processes of root.
    """
    while True:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == first:
                    return ended[1]
        if _holds_too_much(first, limits):
            return signal.SIGKILL
        with contextlib.suppress(InterruptedError):
            signal.sigtimedwait({signal.SIGCHLD}, _LOOK_EVERY_S)


def _holds_too_much(first: int, limits: Mapping[str, Any]) -> bool:
    pids, threads = _below([os.getpid()])
    pids = [pid for pid in pids if pid != first]
    if threads > limits["processes"] + _PROCESSES_ADDED:
        return True
    if max(os.fstat(1).st_size, os.fstat(2).st_size) > limits["output_bytes"]:
        return True
    if meters.memory_of(pids, limits["memory_bytes"]) > limits["memory_bytes"]:
        return True
    directory = limits["directory"]
    if limits["jail"]:  # whose file systems may have no limit of files
        return meters.files_inside(pids, directory) > limits["num_files"]
    num_bytes, num_files = meters.files_of(pids, directory, limits["num_files"])
    return num_bytes > limits["files_bytes"] or num_files > limits["num_files"]


def _below(roots: Sequence[int]) -> tuple[list[int], int]:
    """Returns all processes below `roots`, and the number of their threads."""
    below: list[int] = []
    threads = 0
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                threads += pid not in roots
                with open(f"/proc/{pid}/task/{task}/children") as file:
                    children = list(map(int, file.read().split()))
                below += children
                waiting += children
    return below, threads


def _kill_all() -> None:
    """Kills what the program has left behind.

    Without a PID namespace this process is its reaper.
    """
    while pids := _below([os.getpid()])[0]:
        for pid in pids:  # all, before any is waited for: they may go on to fork
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)


if __name__ == "__main__":
    main()

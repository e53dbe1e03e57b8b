"""The cell of one program: namespaces, limits and an empty directory, then the program. Imports the standard library alone.

    python -I sandbox_child.py LIMITS REPORT      limits as JSON; a descriptor. The program's standard streams are this process's

    this process: makes namespaces, forks, sums up what the cell holds, ends with the program's status; kills what is left of it
      └─ first process of a new PID namespace: makes the root, and reaps; with it everything of the program ends (or a jail's)
           └─ the program, as a user that nobody is, without capabilities, behind its filters and limits

Three levels: "namespaces" (all of that), "files" (Landlock and the filter of system calls alone keep it from network and files),
"limits" (neither). One JSON line is written to REPORT before the program begins: {"level", "by", "refused": reason | null}, or
{"failed": reason}.
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

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_USER_INSIDE = jails.USER_INSIDE
_LOOK_EVERY_S = 0.02
_FAILED = 126
_PROCESSES_ADDED = 4  # by this file and a jail
_FILES = ("sandbox_child.py", "sandbox_jails.py", "sandbox_meters.py", "sandbox_walls.py")
_USERS_COUNTED_BY_NAMESPACE = (5, 14)  # from this kernel on
LEVELS = ("limits", "files", "namespaces")


class _EndNow(BaseException):
    """This cell is to end: its time is over, or who watches it is gone."""


def _on_end(*_: object) -> NoReturn:
    raise _EndNow


def main() -> NoReturn:
    limits, report = json.loads(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(report, False)
    if limits["inside"]:
        _guarded(report, lambda: _inside_a_jail(limits, report))
    signal.signal(signal.SIGTERM, _on_end)
    # so that its delivery ends the pause between two looks at the cell
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    walls.libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    walls.libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    limits["others"] = _processes_of_this_user()
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
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def _guarded(report: int, action: Callable[[], object]) -> NoReturn:
    """Ends this process with the action, and reports what it raised."""
    try:
        action()
    except BaseException as error:
        with contextlib.suppress(OSError):  # the report has been made: what failed is the program
            os.write(
                report, json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode() + b"\n"
            )
    os._exit(_FAILED)


def _namespaces(unused_user: int | None) -> tuple[int | None, str | None]:
    """Makes them. Returns the user that the program shall become, if another, and why there are no
    namespaces, if there are none.

    unused_user: an id that nobody has, where this process may become another user.
    """
    wanted = walls.NEWNET | walls.NEWPID | walls.NEWIPC | walls.NEWUTS
    if (
        os.geteuid() == 0
        and unused_user is not None
        and walls.libc.unshare(wanted | walls.NEWNS) == 0
    ):
        return unused_user, None
    pid, uid, gid = os.getpid(), os.geteuid(), os.getegid()
    begin, begins = os.pipe()
    helper = os.fork()
    if helper == 0:  # only a process outside may give the namespace a second user
        os.close(begins)
        if os.read(begin, 1) and unused_user is not None:
            with contextlib.suppress(OSError):
                _map(pid, *(f"0 {mine} 1\n{_USER_INSIDE} {unused_user} 1" for mine in (uid, gid)))
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
        _map(pid, *(f"{_USER_INSIDE} {mine} 1" for mine in (uid, gid)))
    except OSError as error:
        return None, str(error)
    return None, None


def _map(pid: int, users: str, groups: str) -> None:
    alone = (
        [("setgroups", "deny")] if "\n" not in groups else []
    )  # who may not become another group may leave none either
    for name, text in (("uid_map", users), *alone, ("gid_map", groups)):
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
            shown = [*limits["shown"], limits["given"]]
            walls.own_root(
                limits["root"],
                limits["directory"],
                shown,
                limits["files_bytes"],
                limits["num_files"],
            )
            by = "namespaces of its own"
        except OSError as error:
            refused = str(error)
    program = os.fork()
    if program == 0:
        _guarded(report, lambda: _become_the_program(limits, report, by, user, refused))
    _reap_until(program, report)


def _reap_until(program: int, report: int) -> NoReturn:
    """Is the first process of a PID namespace: reaps whatever ends in it, and ends as the program
    does.
    """
    # nothing of this process is the program's to read or to trace
    walls.libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    walls.drop_bounding_set()
    walls.drop_capabilities()
    os.close(report)
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    while True:
        pid, status = os.wait()
        if pid == program:
            os._exit(
                128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            )


def _become_the_jail(limits: Mapping[str, Any], report: int) -> NoReturn:
    """Becomes bubblewrap or nsjail, whose first program is this file again, inside.

    Root becomes the user that nobody is before.
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
        # another user's process has lost it
        walls.libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.execv(program, [*command, "--", limits["python"], "-I", files[0], inside, str(report)])


def _inside_a_jail(limits: Mapping[str, Any], report: int) -> None:
    """Becomes the program; behind a first process of its own where the jail, unlike bubblewrap, has
    put none into the namespace.
    """
    name = limits["jail"][0]
    if os.getpid() == 1:
        program = os.fork()
        if program != 0:
            _reap_until(program, report)
    _become_the_program(limits, report, name, None, None)


def _become_the_program(
    limits: Mapping[str, Any], report: int, by: str | None, user: int | None, refused: str | None
) -> None:
    """by: what has made namespaces and a root, None where nothing has. user: to become; None to
    stay who this is.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    directory, python = limits["directory"], limits["python"]
    if not limits["inside"]:
        os.setsid()
    os.chdir(directory)
    release = tuple(map(int, os.uname().release.split("-")[0].split(".")[:2]))
    alone = user is not None or (by is not None and release >= _USERS_COUNTED_BY_NAMESPACE)
    _set_limits(limits, 0 if alone else limits["others"])
    walls.drop_bounding_set()
    if user is not None and (by is not None or _all_may_read(python)):
        with contextlib.suppress(PermissionError):
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
    walls.drop_capabilities()
    landlock = walls.landlock_version(limits["landlock"])
    behind = by is not None or walls.only_files(
        [*limits["shown"], limits["given"]], directory, landlock
    )
    alone = os.geteuid() == limits["user"]
    filtered = walls.apply_filter(
        walls.filter_of_calls(namespaces=by is not None, landlock=landlock, alone=alone)
    )
    level = 0 if not (behind and filtered) else 1 if by is None else 2
    if level == 0 and os.geteuid() == 0:
        raise PermissionError(f"programs would run as root here ({refused}); run as another user")
    if not os.access(python, os.X_OK):
        raise PermissionError(f"{python} cannot be read by the user of programs")
    by = by or (
        f"Landlock {landlock} and a filter of system calls"
        if level
        else "limits of processes alone"
    )
    report_line = {"level": LEVELS[level], "by": by, "refused": refused}
    os.write(report, json.dumps(report_line).encode() + b"\n")
    os.close(report)
    if level < LEVELS.index(limits["require"]):
        return
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": directory,
        "TMPDIR": directory,
        "LANG": "C.UTF-8",
    }
    environment |= {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    os.execve(python, [python, *limits["arguments"]], environment)


def _set_limits(limits: Mapping[str, Any], others: int) -> None:
    """others: processes and threads of this user that the kernel counts too."""
    for name, value in (
        ("CPU", limits["cpu_s"]),
        ("AS", limits["memory_bytes"]),
        ("FSIZE", limits["files_bytes"]),
        ("NPROC", limits["processes"] + others),
        ("NOFILE", limits["open_files"]),
        ("CORE", 0),
        ("MSGQUEUE", 0),
    ):
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _all_may_read(path: str) -> bool:
    while path != "/":
        if not os.stat(path).st_mode & 0o001:
            return False
        path = os.path.dirname(path)
    return True


def _processes_of_this_user() -> int:
    """The kernel counts a user's processes and threads, all of them where there is no namespace of
    their own.
    """
    found, user = 0, os.getuid()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == user:
                found += len(os.listdir(f"/proc/{name}/task"))
    return found


def _raise_open_files() -> None:
    """Lets this process open as many files as it may: the meters look at all of a cell."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _watch(first: int, limits: Mapping[str, Any]) -> int:
    """Returns the status of the first process, which is killed where all of the cell together hold,
    write or make too much.

    The kernel's limits count memory and files by process, and do not count processes of root.
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
    """All processes below these, and how many threads they have."""
    found: list[int] = []
    threads, waiting = 0, list(roots)
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                threads += pid not in roots
                with open(f"/proc/{pid}/task/{task}/children") as file:
                    children = list(map(int, file.read().split()))
                found += children
                waiting += children
    return found, threads


def _kill_all() -> None:
    """This process is the reaper of what the program has left behind where it had no PID namespace."""
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

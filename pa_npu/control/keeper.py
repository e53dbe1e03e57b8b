"""Runs one command such that nothing it starts outlives it, its keeper or the launcher.

    launcher ──lifeline pipe──> keeper ──fork──> command ──> whatever the command starts

- The keeper is the reaper of all the command's descendants, including those that have left its
  process group or session.
- If the command ends, the keeper kills what it left behind and ends in the same way (exit code or
  signal).
- On SIGTERM the keeper sends SIGTERM to the command's process group, and after GRACE seconds
  SIGKILL to every descendant.
- If the launcher dies, the lifeline closes, and the keeper kills every descendant at once, even if
  it was stopped until then.
- If the keeper is killed, the kernel kills the command, and the launcher, which is the next reaper,
  kills the rest.
- In the end the keeper removes the directory that its variable PA_NPU_SCRATCH names, and runs the
  command in PA_NPU_LAST (quoted as for a shell), for example to remove a container.
- The command's variable PA_NPU_SESSION is its process id, which is also its session's.

Usage: python keeper.py LIFELINE_FD GRACE_S CORES -- COMMAND [ARGUMENT ...]      (CORES: "0,3", or "" for no pinning)

Only the standard library is imported. The parent-death signal and the reaper are Linux calls;
elsewhere only descendants in the command's group are reached.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LONGEST_KILL_S = 5.0
_LONGEST_LAST_S = 10.0
_COMMAND_NOT_STARTED = 127
SCRATCH = "PA_NPU_SCRATCH"
LAST = "PA_NPU_LAST"
SESSION = "PA_NPU_SESSION"


def become_reaper() -> None:
    """Makes orphaned descendants of this process its children instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants(spare: frozenset[int] = frozenset()) -> list[int]:
    """Kills and reaps all descendants of this process, and returns their ids.

    spare: processes that are left alive, with their descendants.
    Repeats until no descendant is left, because a process may fork between the look and the kill.
    Gives up on processes that the kernel does not let go within 5 s.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + _LONGEST_KILL_S
    while pids := descendants(os.getpid(), spare):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(pids)
        for pid in pids:
            # a grandchild becomes our child, and can be reaped, once its parent is gone
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)
    return sorted(killed)


def descendants(root: int, spare: frozenset[int] = frozenset()) -> list[int]:
    """Returns all processes below `root`, without those in `spare` and their descendants."""
    if not os.path.isdir("/proc"):
        return []
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # "pid (command) state ppid ...": the command may contain parentheses, so the line
                # is split after the last one
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))

    below: list[int] = []
    stack = [root]
    while stack:
        for pid in children.get(stack.pop(), ()):
            if pid not in spare:
                below.append(pid)
                stack.append(pid)
    return below


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def main(arguments: list[str]) -> int:
    lifeline = int(arguments[0])
    grace_s = float(arguments[1])
    cores = arguments[2]
    command = arguments[4:]
    os.set_inheritable(lifeline, False)
    become_reaper()
    # wakes a stopped keeper when the launcher dies, so that it sees the closed lifeline
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    wakeup, wakeup_writer = os.pipe()
    os.set_blocking(wakeup, False)
    os.set_blocking(wakeup_writer, False)
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda number, frame: received.append(number))
    signal.set_wakeup_fd(wakeup_writer)
    scratch = os.environ.pop(SCRATCH, None)
    last = os.environ.pop(LAST, None)

    pid = _start(command, cores)
    status = _watch(pid, lifeline, wakeup, received, grace_s)
    kill_descendants()

    # these imports take longer than all the rest, and most commands do not need them
    if scratch is not None:
        import shutil

        shutil.rmtree(scratch, ignore_errors=True)
    if last is not None:
        import shlex
        import subprocess

        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                shlex.split(last),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_LONGEST_LAST_S,
                check=False,
            )
        kill_descendants()
    return _end_like(status)


def _start(command: list[str], cores: str) -> int:
    keeper = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        os.environ[SESSION] = str(os.getpid())
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:  # the keeper died before the line above
            os._exit(_COMMAND_NOT_STARTED)
        if cores:
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
        for number in (
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGHUP,
            signal.SIGCHLD,
            signal.SIGPIPE,
        ):
            # Python ignores SIGPIPE, and exec would keep that
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error}\n".encode())
    finally:
        os._exit(_COMMAND_NOT_STARTED)


def _watch(pid: int, lifeline: int, wakeup: int, received: list[int], grace_s: float) -> int | None:
    """Waits for the command's end and returns its wait status; None if it must be killed."""
    deadline: float | None = None
    # select.select accepts no descriptor above 1,023, and a process that starts us may have more
    events = select.poll()
    for descriptor in (lifeline, wakeup):
        events.register(descriptor, select.POLLIN)
    while True:
        status = _reap(pid)
        if status is not None:
            return status
        if deadline is None and any(number != signal.SIGCHLD for number in received):
            deadline = time.monotonic() + grace_s
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGTERM)
        timeout_ms: float | None = None
        if deadline is not None:
            timeout_ms = 1000 * (deadline - time.monotonic())
            if timeout_ms <= 0:
                return None
        ready = [descriptor for descriptor, _ in events.poll(timeout_ms)]
        if lifeline in ready:  # nothing is ever written to it, so readable means closed
            return None
        if wakeup in ready:
            os.read(wakeup, 4096)


def _reap(pid: int) -> int | None:
    """Reaps all children that have ended. Returns the wait status of `pid` if it is among them."""
    command_status = None
    with contextlib.suppress(ChildProcessError):
        while True:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == 0:
                break
            if ended == pid:
                command_status = status
    return command_status


def _end_like(status: int | None) -> int:
    """Ends this process as the command ended. status: the command's; None if it was killed.

    Returns the exit code to end with; a signal ends the process before.
    """
    if status is None:
        number = int(signal.SIGKILL)
    elif os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
    else:
        return os.WEXITSTATUS(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has dumped its core already
    signal.set_wakeup_fd(-1)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

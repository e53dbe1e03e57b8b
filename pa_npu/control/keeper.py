"""Run one command so that nothing it starts outlives it, its keeper or the launcher. Standard library only.

    launcher ──lifeline pipe──> keeper ──fork──> command ──> whatever the command starts

- The keeper is the reaper of all the command's descendants, also of those that left its process
  group or session.
- The command ends: the keeper kills what it left behind and ends the same way (exit code or
  signal).
- SIGTERM to the keeper: SIGTERM to the command's process group, and after GRACE seconds SIGKILL to
  every descendant.
- The launcher dies, however: the lifeline closes, and the keeper kills every descendant at once,
  even if it was stopped until then.
- The keeper is killed: the kernel kills the command, and the launcher, the next reaper, kills the
  rest.
- PA_NPU_SCRATCH=DIRECTORY in the environment: the keeper removes it in the end.
- PA_NPU_LAST=COMMAND, quoted as for a shell: the keeper runs it in the end, to remove what others
  do for the command (a container).
- PA_NPU_SESSION in the command's environment: its process id, which is its session's too.

Usage: python keeper.py LIFELINE_FD GRACE_S CORES -- COMMAND [ARGUMENT ...]      (CORES: "0,3", or "" for no pinning)
The parent-death signal and the reaper are Linux calls; elsewhere only descendants in the command's
group are reached.
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
    """Orphaned descendants of this process become its children instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants(spare: frozenset[int] = frozenset()) -> list[int]:
    """SIGKILL all descendants of this process but `spare` and what is below those; reap and return
    them.

    Repeats until none is left, because a process may fork between the look and the kill. Gives up
    on processes that the kernel does not let go within 5 s.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + _LONGEST_KILL_S
    while pids := descendants(os.getpid(), spare):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(pids)
        for pid in pids:
            # a grandchild; it is ours to reap once its parent is gone
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)
    return sorted(killed)


def descendants(root: int, spare: frozenset[int] = frozenset()) -> list[int]:
    """All processes below `root`, without those in `spare` and what is below these."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # "pid (command) state ppid ...": the command may hold anything, so split after its
                # last parenthesis
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    stack = [root]
    while stack:
        for pid in children.get(stack.pop(), ()):
            if pid not in spare:
                found.append(pid)
                stack.append(pid)
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def main(arguments: list[str]) -> int:
    lifeline, grace_s, cores = int(arguments[0]), float(arguments[1]), arguments[2]
    command = arguments[4:]
    os.set_inheritable(lifeline, False)
    become_reaper()
    # of the launcher's death: the lifeline says nothing to a stopped keeper
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    wakeup, wakeup_writer = os.pipe()
    os.set_blocking(wakeup, False)
    os.set_blocking(wakeup_writer, False)
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda number, frame: received.append(number))
    signal.set_wakeup_fd(wakeup_writer)
    scratch, last = os.environ.pop(SCRATCH, None), os.environ.pop(LAST, None)
    pid = _start(command, cores)
    status = _watch(pid, lifeline, wakeup, received, grace_s)
    kill_descendants()
    # what is imported here takes longer than all the rest, and most commands do without
    if scratch is not None:
        import shutil

        shutil.rmtree(scratch, ignore_errors=True)
    if last is not None:
        import shlex
        import subprocess

        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            quiet = subprocess.DEVNULL
            subprocess.run(
                shlex.split(last),
                stdin=quiet,
                stdout=quiet,
                stderr=quiet,
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
        if os.getppid() != keeper:  # it died before the line above
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
            # Python ignores SIGPIPE, and what is ignored stays so after exec
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error}\n".encode())
    finally:
        os._exit(_COMMAND_NOT_STARTED)


def _watch(pid: int, lifeline: int, wakeup: int, received: list[int], grace_s: float) -> int | None:
    """Wait for the command's end and return its wait status; None when it must be killed instead."""
    deadline: float | None = None
    # select.select takes no descriptor beyond 1,023, and who starts us may have as many
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
        timeout = None if deadline is None else deadline - time.monotonic()
        if timeout is not None and timeout <= 0:
            return None
        ready = [
            descriptor for descriptor, _ in events.poll(None if timeout is None else 1000 * timeout)
        ]
        if lifeline in ready:  # nothing is ever written to it: readable means closed
            return None
        if wakeup in ready:
            os.read(wakeup, 4096)


def _reap(pid: int) -> int | None:
    """Reap all children that ended; the wait status of `pid` if it is among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == 0:
                break
            if ended == pid:
                found = status
    return found


def _end_like(status: int | None) -> int:
    number = (
        signal.SIGKILL if status is None else os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    )
    if not number:
        return os.WEXITSTATUS(status or 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has dumped its own core
    signal.set_wakeup_fd(-1)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

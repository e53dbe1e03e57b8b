"""A cell that shares its user with other processes reaches none of them and none of their files."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.cells import ALONE, CELLS, cell, open_to_all, readable_python

# Everything by which a program could touch another process of its user, or that process's files,
# without opening them. VICTIM: a process; FILE: a file of the same user. Writes the names of what
# was not refused.
ATTACK = """
import ctypes, fcntl, json, os, resource, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
is_x86 = os.uname().machine == "x86_64"
got = []

def tried(name, call, *arguments):
    try:
        result = call(*arguments)
        if result is not False and result != -1:  # 0 is success of the C library
            got.append(name)
    except OSError:
        pass

def call(x86_64, aarch64, *arguments):
    return libc.syscall(x86_64 if is_x86 else aarch64, *arguments)

def by_owner():
    ours, theirs = socket.socketpair()
    fcntl.fcntl(ours, 10, signal.SIGUSR1)
    fcntl.fcntl(ours, fcntl.F_SETOWN, VICTIM)
    fcntl.fcntl(ours, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    theirs.send(b"x")

def by_owner_of_ioctl():
    ours, _ = socket.socketpair()
    fcntl.ioctl(ours, 0x8901, VICTIM.to_bytes(4, "little"))

tried("kill", os.kill, VICTIM, 0)
tried("kill by signal", os.kill, VICTIM, signal.SIGUSR1)
tried("tkill", call, 200, 130, VICTIM, signal.SIGUSR1)
tried("tgkill", call, 234, 131, VICTIM, VICTIM, signal.SIGUSR1)
tried("pidfd", lambda: signal.pidfd_send_signal(os.pidfd_open(VICTIM), signal.SIGUSR1))
if LANDLOCK < 6:  # later ones refuse the signal, not the owner
    tried("owner", by_owner)
    tried("owner by ioctl", by_owner_of_ioctl)
tried("limit", resource.prlimit, VICTIM, resource.RLIMIT_NOFILE, (64, 64))
tried("its limit", resource.prlimit, VICTIM, resource.RLIMIT_CPU)
tried("priority", os.setpriority, os.PRIO_PROCESS, VICTIM, 5)
if LANDLOCK >= 0:  # without a cell it would slow all of this user's processes
    tried("priority of all", os.setpriority, os.PRIO_USER, 0, 5)
tried("cores", os.sched_setaffinity, VICTIM, {0})
tried("scheduler", os.sched_setscheduler, VICTIM, os.SCHED_BATCH, os.sched_param(0))
tried("i/o priority", call, 251, 30, 1, VICTIM, 3 << 13)
tried("truncate", libc.truncate, FILE.encode(), 0)
tried("owner of a file", libc.chown, FILE.encode(), -1, os.getgid())
tried("attribute", os.setxattr, FILE, "user.pa_npu", b"x")
tried("mode", lambda: os.chmod(FILE, 0) or os.stat(FILE).st_mode & 0o777 == 0)
tried("time", lambda: os.utime(FILE, (1, 1)) or os.stat(FILE).st_mtime == 1)
tried("watch", libc.inotify_add_watch, libc.inotify_init1(0), os.path.dirname(FILE).encode(), 0xFFF)
print(json.dumps(got))
"""
SHARED: list[tuple[str, int]] = [(ALONE, version) for version in (1, 2, 3, 5, 6)]
SHARED += [
    ("root who may map nobody", 6),
    ("root who may map nobody", 1),
    ("a user without anything", 0),
]


def victim_of(kind: str, file: Path) -> subprocess.Popen[bytes]:
    """A process of the user whose cells share it with others, and a file of that user."""
    user = (CELLS[kind][0] or None) if os.geteuid() == 0 else None
    file.write_text("as it was")
    file.chmod(0o644)
    if user is not None:
        os.chown(file, user, user)
    code = (
        "import signal, sys\nsignal.signal(signal.SIGUSR1, lambda *_: "
        "sys.exit(9))\nprint('ready', flush=True)\nsys.stdin.read()"
    )
    victim = subprocess.Popen(
        [readable_python(), "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        user=user,
        cwd="/",
    )
    assert victim.stdout is not None and victim.stdout.readline() == b"ready\n"
    return victim


def about(file: Path) -> tuple[int, ...]:
    status = file.stat()
    return (status.st_mode, status.st_uid, status.st_gid, status.st_size, status.st_mtime_ns)


def attack_on(victim: subprocess.Popen[bytes], file: Path, landlock: int) -> str:
    return f"VICTIM, FILE, LANDLOCK = {victim.pid}, {str(file)!r}, {landlock}\n{ATTACK}"


@pytest.mark.parametrize(("kind", "landlock"), SHARED)
def test_a_cell_that_shares_its_user_reaches_no_other_process_of_it(
    kind: str, landlock: int, tmp_path: Path
) -> None:
    """Also on kernels whose Landlock is older: before version 6 it knows no signals, before 3 it
    lets files be truncated.
    """
    open_to_all(tmp_path)
    file = tmp_path / "of_the_run"
    with victim_of(kind, file) as victim:
        before = about(file)
        limits = Path(f"/proc/{victim.pid}/limits").read_text()
        outcome = cell(kind, attack_on(victim, file, landlock), landlock=landlock)
        assert "failed" not in outcome and outcome["code"] == 0, outcome
        got = json.loads(outcome["stdout"])
        # it says that files are open; processes are not, for the filter holds
        if outcome["level"] == "limits":
            got = [
                name
                for name in got
                if name not in ("truncate", "owner of a file", "attribute", "mode", "time", "watch")
            ]
        assert got == [], outcome["isolation"]
        assert about(file) == before and file.read_text() == "as it was"
        assert victim.poll() is None and Path(f"/proc/{victim.pid}/limits").read_text() == limits
        assert os.getpriority(os.PRIO_PROCESS, victim.pid) == os.getpriority(os.PRIO_PROCESS, 0)
        assert victim.stdin is not None
        victim.stdin.close()
        assert victim.wait(20) == 0, "no signal has come late"


def test_the_attack_on_other_processes_is_a_real_one(tmp_path: Path) -> None:
    """Without a cell, everything is got that a cell must refuse."""
    open_to_all(tmp_path)
    file = tmp_path / "of_the_run"
    user = CELLS[ALONE][0] if os.geteuid() == 0 else None
    with victim_of(ALONE, file) as victim:
        program = attack_on(victim, file, -1).replace("signal.SIGUSR1", "signal.SIGCHLD")
        done = subprocess.run(
            [readable_python(), "-c", program], capture_output=True, user=user, cwd="/", check=True
        )
        victim.kill()
    got = set(json.loads(done.stdout))
    assert {
        "kill",
        "kill by signal",
        "tkill",
        "tgkill",
        "pidfd",
        "owner",
        "owner by ioctl",
        "limit",
        "its limit",
    } <= got
    assert {
        "priority",
        "cores",
        "scheduler",
        "i/o priority",
        "truncate",
        "owner of a file",
        "mode",
        "time",
        "watch",
    } <= got

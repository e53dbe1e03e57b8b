"""Whatever a program does stays in its cell: as root, as root of a container, as a user, with and without what a kernel offers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pa_npu.rewards import sandbox
from pa_npu.rewards.sandbox import CellLimits, ProgramOutcome
from pa_npu.rewards.sandbox_jails import JAILS

LIMITS = CellLimits(wall_s=20.0, cpu_s=10, memory_bytes=512 << 20)


async def run(program: str, stdin: bytes = b"", limits: CellLimits = LIMITS) -> ProgramOutcome:
    return await sandbox.run(["{files}/program.py"], stdin, limits, {"program.py": program})


HOSTILE = {
    "endless": ("while True: pass", CellLimits(wall_s=1.5, cpu_s=20)),
    "sleeping": ("import time; time.sleep(600)", CellLimits(wall_s=1.0)),
    "processor time": ("while True: pass", CellLimits(wall_s=60.0, cpu_s=1)),
    "much memory": ("x = bytearray(1 << 33)", LIMITS),
    "memory by and by": ("x = []\nwhile True: x.append(bytearray(1 << 22))", LIMITS),
    "huge output": ("while True: print('x' * 5000)", LIMITS),
    "huge errors": ("import sys\nwhile True: print('x' * 5000, file=sys.stderr)", LIMITS),
    "large file": ("open('large', 'wb').write(bytes(1 << 28))", LIMITS),
    "many files open": ("x = [open(__file__) for _ in range(10000)]", LIMITS),
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_a_program_that_takes_too_much_is_ended_and_costs_nothing_else(kind: str) -> None:
    program, limits = HOSTILE[kind]
    start_s = time.monotonic()
    outcome = await run(program, limits=limits)
    assert (outcome.ended, outcome.code) != ("itself", 0), kind
    assert time.monotonic() - start_s < 45
    assert len(outcome.stdout) <= limits.output_bytes and len(outcome.stderr) <= limits.output_bytes


def alive(mark: str) -> int:
    found = 0
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                found += mark.encode() in (directory / "cmdline").read_bytes()
            except OSError:
                continue
    return found


@pytest.mark.parametrize(
    "program",
    [
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        "
        "time.sleep(600)\n    os._exit(0)",
    ],
    ids=["fork bomb", "a process that leaves its group"],
)
async def test_no_process_outlives_its_cell_and_their_number_is_limited(program: str) -> None:
    outcome = await run(program, limits=CellLimits(wall_s=2.0, processes=16))
    assert outcome.ended in ("timeout", "itself")
    counted = await run(
        "import os, time\nn = 0\ntry:\n    while n < 200:\n        if os.fork() == 0:\n            "
        "time.sleep(60)\n        n += 1\n"
        "except OSError:\n    pass\nprint(n)",
        limits=CellLimits(wall_s=20.0, processes=16),
    )
    assert int(counted.stdout) < 20
    deadline_s = time.monotonic() + 20
    while alive("pa_npu-cell-") and time.monotonic() < deadline_s:
        await asyncio.sleep(0.05)
    assert not alive("pa_npu-cell-")


# Everything by which a program could leave its cell, really tried; what worked is written. FOREIGN:
# files of others.
ESCAPE = """
import ctypes, json, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
got = []

def tried(name, call, *arguments):
    try:
        result = call(*arguments)
        if result is not False and result != -1:  # 0 is success of the C library
            got.extend([name] if name else [])
    except OSError:
        pass

def into(path):
    with open(path, "a") as file:
        file.write("written")

number = dict(x86_64=(155, 56), aarch64=(41, 220))[os.uname().machine]
tried("remount", libc.mount, b"none", b"/", None, 32 | 4096, None)
tried("mount", libc.mount, b"none", os.getcwd().encode(), b"tmpfs", 0, None)
tried("umount", libc.umount2, os.getcwd().encode(), 2)
tried("chroot", libc.chroot, b".")
tried("pivot_root", libc.syscall, number[0], b".", b".")
tried("unshare", libc.unshare, 0x10000000)
tried("clone", libc.syscall, number[1], 0x10000000 | 17, 0, 0, 0, 0)
for pid in {1, os.getppid()}:
    tried("ptrace", libc.ptrace, 16, pid, 0, 0)
    tried("setns", lambda: libc.setns(os.open(f"/proc/{pid}/ns/mnt", 0), 0))
    tried("memory of another", lambda: open(f"/proc/{pid}/mem", "rb").read(1))
    for path in FOREIGN:
        tried("by way of /proc", lambda: open(f"/proc/{pid}/root{path}").close())
for path in FOREIGN:
    tried("read", lambda: open(path).read())
    tried("write", into, path)
    tried("look", lambda: bool(os.listdir(os.path.dirname(path))))
for path in (FOREIGN[0] + ".made", "/etc/pa_npu_was_here", "/proc/sys/kernel/core_pattern"):
    tried("write", into, path)
tried("network", lambda: socket.create_connection(("127.0.0.1", PORT), 2) and True)
tried("unix socket", lambda: socket.socket(socket.AF_UNIX).connect(FOREIGN[0] + ".socket"))
into("own")
held = []
lines = lambda: [line for line in open("/proc/self/status") if line[:6] in ("CapInh", "CapPrm", "CapEff", "CapAmb")]
tried("", lambda: held.extend(line.split()[1] for line in lines()))
keys = [name for name, value in os.environ.items() if "secret" in value]
print(json.dumps({"got": got, "user": os.getuid(), "capabilities": [held for held in held if int(held, 16)], "keys": keys}))
"""
_UNSHARED = "namespaces of its own"
_JAILS = ("bubblewrap", "nsjail")
# who runs it, without what, and the level that comes of it; the first is the user of these tests,
# whoever that is
CELLS: dict[str, tuple[int | None, tuple[str, ...], str, str]] = {
    "root": (0, _JAILS, "namespaces", _UNSHARED),
    "root with bubblewrap": (0, (), "namespaces", "bubblewrap"),
    "root with nsjail": (0, ("bubblewrap",), "namespaces", "nsjail"),
    "root of a container": (0, (*_JAILS, "sys_admin"), "namespaces", _UNSHARED),
    "root of a container with bubblewrap": (
        0,
        ("sys_admin", "setfcap"),
        "namespaces",
        "bubblewrap",
    ),
    "root of a container with nsjail": (
        0,
        ("bubblewrap", "sys_admin", "setfcap"),
        "namespaces",
        "nsjail",
    ),
    "root who may map nobody": (0, (*_JAILS, "sys_admin", "setfcap"), "files", "Landlock"),
    "a user": (4321, _JAILS, "namespaces", _UNSHARED),
    "a user with bubblewrap": (4321, (), "namespaces", "bubblewrap"),
    "a user with nsjail": (4321, ("bubblewrap",), "namespaces", "nsjail"),
    "a user without namespaces": (4321, ("namespaces", *_JAILS), "files", "Landlock"),
    "a user without anything": (
        4321,
        ("namespaces", *_JAILS, "landlock"),
        "limits",
        "limits of processes alone",
    ),
}
_CARRIED = ["a user", "a user with bubblewrap", "a user with nsjail"]


def readable_python() -> str:
    """An interpreter that every user may start; root's own may lie where only root looks."""
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        with contextlib.suppress(OSError):
            asks = [python, "-c", "import sys; assert sys.version_info >= (3, 10)"]
            if subprocess.run(asks, capture_output=True, user=4321, check=False).returncode == 0:
                return python
    pytest.skip("no interpreter here is readable for all")


def cell(kind: str, program: str, **limits: Any) -> dict[str, Any]:
    """The outcome of a program, run by this kind of user."""
    user, without, _, _ = CELLS[kind]
    if os.geteuid() != 0 and user in (0, None):
        pytest.skip("needs root")
    python = sys.executable
    if user or not set(_JAILS) <= set(without):
        if os.geteuid() == 0:
            python = readable_python()
        else:
            user = None
    request = {
        "without": without,
        "user": user or None,
        "landlock": limits.pop("landlock", sandbox._LANDLOCK_VERSION),
        "limits": {"wall_s": 60.0, "memory_bytes": 512 << 20, **limits},
    }
    helper = Path(__file__).parents[2] / "helpers" / "cell.py"
    done = subprocess.run(
        [python, helper, json.dumps(request)],
        input=program,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def level_here(kind: str, found: dict[str, Any]) -> str:
    """The level that was reached; skips where this system is poorer than the case wants."""
    _, _, level, by = CELLS[kind]
    if "failed" in found or found["level"] != level or by not in found["isolation"]:
        if by in _JAILS and shutil.which(JAILS[by][0]) is None:
            pytest.skip(f"no {by} here")
        if (
            level == "namespaces"
            and subprocess.run(
                ["unshare", "-Ur", "true"], capture_output=True, check=False
            ).returncode
        ):
            pytest.skip("this system gives users no namespaces")
        pytest.fail(f"{found} instead of {level} by {by}")
    return level


@pytest.mark.parametrize("kind", CELLS)
def test_whoever_runs_it_no_program_leaves_its_cell_and_its_level_is_told(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret-key")
    for path in (tmp_path, *tmp_path.parents[:-2]):
        path.chmod(0o777 if path == tmp_path else 0o755)
    secret, of_the_run = tmp_path / "private", tmp_path / "of_the_run"
    for path, mode in ((secret, 0o600), (of_the_run, 0o666)):
        path.write_text("as it was")
        path.chmod(mode)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as by_path:
        by_path.bind(f"{of_the_run}.socket")
        Path(f"{of_the_run}.socket").chmod(0o777)
        by_path.listen()
        program = ESCAPE.replace("PORT", str(server.getsockname()[1]))
        outcome = cell(kind, program.replace("FOREIGN", repr([str(of_the_run), str(secret)])))
    level = level_here(kind, outcome)
    assert outcome["code"] == 0, outcome["stderr"]
    found = json.loads(outcome["stdout"])
    assert found["keys"] == [] and found["capabilities"] == []
    if (
        level == "limits"
        # where nothing is granted, files are open, and nothing claims otherwise: the attack is a
        # real
        # one
    ):
        assert {"read", "write", "look"} <= set(found["got"])
        return
    assert found["got"] == []
    assert secret.read_text() == of_the_run.read_text() == "as it was"
    if CELLS[kind][0] == 0 and level == "namespaces":
        assert found["user"] != 0
    assert not Path(f"{of_the_run}.made").exists()


STAND_IN = """#!{python}
import json, os, sys
with open({record!r}, "a") as file:
    file.write(json.dumps(sys.argv) + chr(10))
sys.exit({status}) if {status} else os.execv(sys.argv[sys.argv.index("--") + 1], sys.argv[sys.argv.index("--") + 1 :])
"""


@pytest.fixture
def jail_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory in which jails are looked for, where everybody may read."""
    for path in (tmp_path, *tmp_path.parents[:-2]):
        path.chmod(0o777 if path == tmp_path else 0o755)
    monkeypatch.setattr(sandbox, "_JAIL_PATH", str(tmp_path))
    python = readable_python()
    monkeypatch.setattr(sandbox, "_shown", lambda: (python, [], ["/usr/bin", "/usr/lib"]))
    sandbox._jail.cache_clear()
    yield tmp_path
    sandbox._jail.cache_clear()


def stand_in(directory: Path, file: str, status: int) -> Path:
    """Puts a program in the place of a jail that records its command line, and fails or starts what
    it is given.
    """
    record = directory / f"{file}.commands"
    record.touch()
    record.chmod(0o666)
    program = directory / file
    program.write_text(STAND_IN.format(python=readable_python(), record=str(record), status=status))
    program.chmod(0o755)
    return record


@pytest.mark.parametrize(
    ("statuses", "chosen"),
    [
        ({"bwrap": 0, "nsjail": 0}, "bubblewrap"),
        ({"bwrap": 1, "nsjail": 0}, "nsjail"),
        ({"nsjail": 0}, "nsjail"),
        ({"nsjail": 3}, None),
        ({}, None),
    ],
)
def test_the_first_jail_that_works_carries_the_cells(
    statuses: dict[str, int], chosen: str | None, jail_path: Path
) -> None:
    for file, status in statuses.items():
        stand_in(jail_path, file, status)
    found = sandbox._jail()
    assert (found and found[0]) == chosen


@pytest.mark.parametrize("name", JAILS)
def test_a_jail_is_asked_for_no_more_than_a_cell_shows(name: str, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("usr/lib")
    cell = {
        "shown": ["/usr/lib", str(link)],
        "program_files": "/given",
        "directory": "/work",
        "files_bytes": 5,
        "num_files": 3,
    }
    command = JAILS[name][1]("/jail", cell, ["/child.py"], 7)
    text = " ".join(command)
    if name == "bubblewrap":
        read_only = [
            "--ro-bind /usr/lib /usr/lib",
            f"--symlink usr/lib {link}",
            "--ro-bind /given /given",
        ]
        read_only += [
            "--ro-bind /child.py /child.py",
            "--size 5 --tmpfs /work",
            "--remount-ro /",
            "--unshare-all",
        ]
        assert "--bind " not in text.replace("--ro-bind ", "") and "--share-net" not in text
    else:
        read_only = [
            "--bindmount_ro /usr/lib",
            f"--symlink usr/lib:{link}",
            "--bindmount_ro /given",
            "--pass_fd 7",
        ]
        read_only += [
            "--bindmount_ro /child.py",
            "--mount none:/work:tmpfs:size=5,nr_inodes=4,mode=1777",
        ]
        writable = [
            command[place + 1] for place, word in enumerate(command) if word == "--bindmount"
        ]
        assert writable == [
            f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")
        ]
        assert not {
            "--rw",
            "--keep_env",
            "--keep_caps",
            "--disable_no_new_privs",
            "--chroot",
        } & set(command)
        assert "--disable_clone" not in text, "every namespace is new"
    for part in read_only:
        assert part in text


def test_cells_that_nsjail_carries_leave_no_directories_behind() -> None:
    before = set(Path("/tmp").glob("nsjail.*"))
    level_here("root with nsjail", cell("root with nsjail", "print(1)"))
    assert set(Path("/tmp").glob("nsjail.*")) <= before


@pytest.mark.parametrize("kind", ["a user", "a user without anything"])
def test_a_run_that_wants_more_isolation_than_there_is_is_refused(kind: str) -> None:
    wanted = "namespaces" if kind == "a user without anything" else "files"
    found = cell(kind, "print(1)", require=wanted)
    if kind == "a user":
        assert found["stdout"] == "1\n"
    else:
        assert found["failed"].startswith(
            "reward.code.require: namespaces, but this system gives level limits (limits of"
        )
        assert "Operation not permitted" in found["failed"]


def test_a_cell_without_namespaces_ends_what_its_program_leaves_behind() -> None:
    program = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.closerange(0, 3)\n    "
        "time.sleep(600)\nprint('left it')"
    )
    assert cell("a user without anything", program)["stdout"] == "left it\n"
    assert cell("a user without anything", "while True: pass", wall_s=1.0)["ended"] == "timeout"
    deadline_s = time.monotonic() + 20
    while alive("pa_npu-cell-") and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not alive("pa_npu-cell-")


TOGETHER = {
    "children": "pids = [os.fork() for _ in range(4)]",  # sixteen processes of 40 MiB each
    "a shared mapping": "m = mmap.mmap(-1, 1 << 26)\nfor i in range(0, 1 << 26, 4096): m[i] = "
    "1\nif os.fork():\n    m.close()\n"
    "    n = mmap.mmap(-1, 1 << 26)\n    for i in range(0, 1 << 26, 4096): "
    "n[i] = 1",
    "a file in memory": "f = os.memfd_create('m')\nfor _ in range(40): os.write(f, bytes(1 << 22))",
}


@pytest.mark.parametrize("how", TOGETHER)
@pytest.mark.parametrize("kind", ["a user", "a user without namespaces"])
def test_memory_is_limited_for_all_processes_of_a_cell_together(how: str, kind: str) -> None:
    """Each process stays below the limit by itself."""
    program = (
        f"import mmap, os, time\n{TOGETHER[how]}\nx = b'x' * (40 << "
        "20)\ntime.sleep(2)\nprint('held it all')"
    )
    found = cell(kind, program, memory_bytes=128 << 20)
    assert found["code"] not in (0, None) and "held it all" not in found["stdout"], found
    assert (
        cell(kind, "x = b'x' * (40 << 20)\nprint('fits')", memory_bytes=128 << 20)["stdout"]
        == "fits\n"
    )


def test_processes_that_share_what_they_hold_are_not_counted_twice() -> None:
    program = """
import os, time
x = b"x" * (60 << 20)
for _ in range(3):
    if os.fork() == 0:
        time.sleep(1)
        os._exit(0)
print([os.wait()[1] for _ in range(3)])
"""
    found = cell("a user", program, memory_bytes=128 << 20)
    assert found["stdout"] == "[0, 0, 0]\n", found


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
# What needs no victim, refused by every cell.
HIDDEN = """
import ctypes, fcntl, json, os, socket
libc = ctypes.CDLL(None, use_errno=True)
is_x86 = os.uname().machine == "x86_64"
got = []
for name, x86_64, aarch64, *arguments in (
    ("shared memory", 29, 194, 77, 4096, 0o1666), ("queue", 68, 186, 77, 0o1666), ("semaphores", 64, 190, 77, 1, 0o1666),
    ("POSIX queue", 240, 180, b"pa_npu", 0o102, 0o666, 0), ("undumpable", 157, 167, 4, 0, 0, 0, 0),
):
    if libc.syscall(x86_64 if is_x86 else aarch64, *arguments) != -1:
        got.append(name)
ours, theirs = socket.socketpair()
for name, call in (
    ("pipe", lambda: fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)),
    ("buffer", lambda: ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)),
    ("descriptor in flight", lambda: socket.send_fds(ours, [b"x"], [0])),
):
    try:
        call()
        got.append(name)
    except OSError:
        pass
print(json.dumps(got))
"""
# What programs may do all the same.
ALLOWED = """
import asyncio, os, resource, shutil, signal, subprocess, sys, tempfile
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
signal.signal(signal.SIGUSR1, lambda *_: print("signal"))
os.kill(os.getpid(), signal.SIGUSR1)
signal.raise_signal(signal.SIGUSR1)
open("a", "w").write("x")
shutil.copy("a", "b")
os.makedirs("c/d")
os.rename("b", "c/b")
with tempfile.TemporaryDirectory() as directory:
    shutil.copytree("c", directory + "/c")
async def main():
    await asyncio.sleep(0)
    print("loop")
asyncio.run(main())
print(subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, text=True).stdout.strip())
os.nice(1)
"""
_ALONE = "a user without namespaces"
SHARED: list[tuple[str, int]] = [(_ALONE, version) for version in (1, 2, 3, 5, 6)]
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


def open_to_all(directory: Path) -> None:
    for path in (directory, *directory.parents[:-2]):
        path.chmod(0o777 if path == directory else 0o755)


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
    user = CELLS[_ALONE][0] if os.geteuid() == 0 else None
    with victim_of(_ALONE, file) as victim:
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


@pytest.mark.parametrize("kind", [*_CARRIED, _ALONE])
def test_what_no_process_shows_is_refused_in_every_cell_and_what_programs_need_is_not(
    kind: str,
) -> None:
    outcome = cell(kind, HIDDEN)
    level_here(kind, outcome)
    assert json.loads(outcome["stdout"]) == [], outcome
    allowed = cell(kind, ALLOWED, landlock=2)
    assert allowed["code"] == 0 and allowed["stdout"].split() == [
        "signal",
        "signal",
        "loop",
        "1",
    ], allowed


SOCKETS = """
import os, socket, time
held = []
for _ in range(8):
    if os.fork() == 0:
        break
for _ in range(28):
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    try:
        while True:
            ours.send(bytes(4096))
    except OSError:
        pass
    held.append((ours, theirs))
time.sleep(3)
print("held it all")
"""


@pytest.mark.parametrize("kind", [*_CARRIED, _ALONE])
def test_buffers_of_socket_pairs_are_memory_that_a_cell_holds(kind: str) -> None:
    found = cell(kind, SOCKETS, memory_bytes=96 << 20)
    level_here(kind, found)
    assert found["code"] not in (0, None) and "held it all" not in found["stdout"], found
    few = "import socket\nheld = [socket.socketpair() for _ in range(3)]\nprint('fits')"
    assert cell(kind, few, memory_bytes=96 << 20)["stdout"] == "fits\n"


WRITES = {
    "many files": "for i in range(64): open(str(i), 'wb').write(block)",
    "removed files that are open": "held = []\nfor i in range(40):\n    held.append(open('x', "
    "'wb'))\n    held[-1].write(block)\n"
    "    held[-1].flush()\n    os.remove('x')",
    "removed files that are mapped": "held = []\nfor i in range(40):\n    f = open('x', 'wb+')\n   "
    " f.write(block)\n    f.flush()\n"
    "    held.append(mmap.mmap(f.fileno(), 0, "
    "prot=mmap.PROT_READ))\n    f.close()\n    os.remove('x')",
    "many empty files": "for i in range(100_000): open(str(i), 'w').close()",
    "nested directories": "for i in range(3000):\n    os.mkdir('d')\n    os.chdir('d')",
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("kind", [*_CARRIED, _ALONE])
def test_files_of_a_cell_are_limited_together_in_bytes_and_number(kind: str, how: str) -> None:
    program = (
        "import mmap, os, time\nblock = bytes(8 << "
        f"20)\n{WRITES[how]}\ntime.sleep(3)\nprint('wrote it all')"
    )
    found = cell(kind, program, files_bytes=16 << 20)
    level_here(kind, found)
    assert found["code"] not in (0, None) and "wrote it all" not in found["stdout"], found


@pytest.mark.parametrize("kind", [*_CARRIED, _ALONE])
def test_what_a_program_writes_over_counts_once(kind: str) -> None:
    program = (
        "import os\nfor i in range(100):\n    open('a', 'wb').write(bytes(8 << 20))\n    "
        "os.makedirs(f'd/{i}')\nprint('fits')"
    )
    assert cell(kind, program, files_bytes=16 << 20)["stdout"] == "fits\n"


def test_no_place_but_its_directory_can_be_filled(tmp_path: Path) -> None:
    program = (
        "import os\nfor place in ('/dev', '/', '/tmp', '/proc', os.path.dirname(os.getcwd())):\n"
    )
    program += (
        "    try:\n        open(place + '/pa_npu_was_here', 'wb').write(bytes(4 << 20))\n   "
        "     print(place)\n"
    )
    program += (
        "    except OSError:\n        pass\ntry:\n    open('/dev/shm/x', "
        "'wb').write(bytes(4 << 20))\n    print('shm')\n"
    )
    program += "except OSError:\n    pass\n"
    for kind in (*_CARRIED, _ALONE):
        outcome = cell(kind, program)
        if kind != _ALONE and CELLS[kind][3] not in outcome["isolation"]:
            continue
        assert outcome["stdout"] == "", outcome


@pytest.mark.parametrize("kind", ["nested", "full", "closed", "of links"])
def test_a_cells_directory_is_removed_however_deep_or_full_it_is(kind: str, tmp_path: Path) -> None:
    place, kept = tmp_path / "cell", tmp_path / "kept"
    place.mkdir()
    kept.mkdir()
    (kept / "file").write_text("stays")
    if kind == "nested":
        top = os.open(place, os.O_RDONLY)
        for _ in range(3000):
            os.mkdir("d", dir_fd=top)
            below = os.open("d", os.O_RDONLY, dir_fd=top)
            os.close(top)
            top = below
        os.close(top)
    elif kind == "full":
        for number in range(5000):
            (place / str(number)).touch()
    elif kind == "closed":
        (place / "a" / "b").mkdir(parents=True)
        (place / "a" / "b" / "c").touch()
        (place / "a" / "b").chmod(0)
        (place / "a").chmod(0)
    else:
        (place / "to_a_directory").symlink_to(kept)
        (place / "to_a_file").symlink_to(kept / "file")
    sandbox.remove_tree(str(place), time.monotonic() + 60)
    assert not place.exists() and (kept / "file").read_text() == "stays"


def test_a_removal_that_takes_too_long_is_a_warning_and_costs_no_verdict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cell").mkdir()
    (tmp_path / "cell" / "file").touch()
    monkeypatch.setattr(sandbox, "_REMOVAL_S", -1.0)
    sandbox._remove(str(tmp_path / "cell"))
    assert "take too long to remove" in caplog.text


async def test_the_event_loop_goes_on_while_a_cell_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    removing, goes_on = asyncio.Event(), asyncio.Event()
    loop, remove = asyncio.get_running_loop(), sandbox._remove

    def slow(parent: str) -> None:
        loop.call_soon_threadsafe(removing.set)
        asyncio.run_coroutine_threadsafe(goes_on.wait(), loop).result(60)
        remove(parent)

    monkeypatch.setattr(sandbox, "_remove", slow)
    task = asyncio.create_task(run("print(1)"))
    await asyncio.wait_for(removing.wait(), 60)
    goes_on.set()
    assert (await asyncio.wait_for(task, 60)).stdout == b"1\n"

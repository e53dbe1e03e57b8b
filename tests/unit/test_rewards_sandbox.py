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
from pathlib import Path
from typing import Any

import pytest

from pa_npu.rewards import sandbox
from pa_npu.rewards.sandbox import Limits, Outcome

LIMITS = Limits(wall_s=20.0, cpu_s=10, memory_bytes=512 << 20)


async def run(program: str, stdin: bytes = b"", limits: Limits = LIMITS) -> Outcome:
    return await sandbox.run(["{files}/program.py"], stdin, limits, {"program.py": program})


HOSTILE = {
    "endless": ("while True: pass", Limits(wall_s=1.5, cpu_s=20)),
    "sleeping": ("import time; time.sleep(600)", Limits(wall_s=1.0)),
    "processor time": ("while True: pass", Limits(wall_s=60.0, cpu_s=1)),
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
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(600)\n    os._exit(0)",
    ],
    ids=["fork bomb", "a process that leaves its group"],
)
async def test_no_process_outlives_its_cell_and_their_number_is_limited(program: str) -> None:
    outcome = await run(program, limits=Limits(wall_s=2.0, processes=16))
    assert outcome.ended in ("timeout", "itself")
    counted = await run(
        "import os, time\nn = 0\ntry:\n    while n < 200:\n        if os.fork() == 0:\n            time.sleep(60)\n        n += 1\n"
        "except OSError:\n    pass\nprint(n)",
        limits=Limits(wall_s=20.0, processes=16),
    )
    assert int(counted.stdout) < 20
    deadline_s = time.monotonic() + 20
    while alive("pa_npu-cell-") and time.monotonic() < deadline_s:
        await asyncio.sleep(0.05)
    assert not alive("pa_npu-cell-")


# Everything by which a program could leave its cell, really tried; what worked is written. FOREIGN: files of others.
ESCAPE = """
import ctypes, json, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
got = []

def tried(name, call, *arguments):
    try:
        if call(*arguments) not in (-1, False):
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
# who runs it, without what, and the level that comes of it; the first is the user of these tests, whoever that is
CELLS: dict[str, tuple[int | None, tuple[str, ...], str, str]] = {
    "root": (0, (), "namespaces", _UNSHARED),
    "root of a container": (0, ("sys_admin",), "namespaces", _UNSHARED),
    "root who may map nobody": (0, ("sys_admin", "setfcap"), "files", "Landlock"),
    "a user": (4321, ("bubblewrap",), "namespaces", _UNSHARED),
    "a user with bubblewrap": (4321, (), "namespaces", "bubblewrap"),
    "a user without namespaces": (4321, ("namespaces", "bubblewrap"), "files", "Landlock"),
    "a user without anything": (4321, ("namespaces", "bubblewrap", "landlock"), "limits", "limits of processes alone"),
}


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
    if user:
        if os.geteuid() == 0:
            python = readable_python()
        else:
            user = None
    request = {
        "without": without,
        "user": user or None,
        "limits": {"wall_s": 20.0, "memory_bytes": 512 << 20, **limits},
    }
    helper = Path(__file__).parents[1] / "helpers" / "cell.py"
    done = subprocess.run(
        [python, helper, json.dumps(request)], input=program, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def level_here(kind: str, found: dict[str, Any]) -> str:
    """The level that was reached; skips where this system is poorer than the case wants."""
    _, _, level, by = CELLS[kind]
    if "failed" in found or found["level"] != level or by not in found["isolation"]:
        if by == "bubblewrap" and shutil.which("bwrap") is None:
            pytest.skip("no bubblewrap here")
        if (
            level == "namespaces"
            and subprocess.run(["unshare", "-Ur", "true"], capture_output=True, check=False).returncode
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
    ):  # where nothing is granted, files are open, and nothing claims otherwise: the attack is a real one
        assert {"read", "write", "look"} <= set(found["got"])
        return
    assert found["got"] == []
    assert secret.read_text() == of_the_run.read_text() == "as it was"
    if CELLS[kind][0] == 0 and level == "namespaces":
        assert found["user"] != 0
    assert not Path(f"{of_the_run}.made").exists()


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
    program = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.closerange(0, 3)\n    time.sleep(600)\nprint('left it')"
    assert cell("a user without anything", program)["stdout"] == "left it\n"
    assert cell("a user without anything", "while True: pass", wall_s=1.0)["ended"] == "timeout"
    deadline_s = time.monotonic() + 20
    while alive("pa_npu-cell-") and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not alive("pa_npu-cell-")


TOGETHER = {
    "children": "pids = [os.fork() for _ in range(4)]",  # sixteen processes of 40 MiB each
    "a shared mapping": "m = mmap.mmap(-1, 1 << 26)\nfor i in range(0, 1 << 26, 4096): m[i] = 1\nif os.fork():\n    m.close()\n"
    "    n = mmap.mmap(-1, 1 << 26)\n    for i in range(0, 1 << 26, 4096): n[i] = 1",
    "a file in memory": "f = os.memfd_create('m')\nfor _ in range(40): os.write(f, bytes(1 << 22))",
}


@pytest.mark.parametrize("how", TOGETHER)
@pytest.mark.parametrize("kind", ["a user", "a user without namespaces"])
def test_memory_is_limited_for_all_processes_of_a_cell_together(how: str, kind: str) -> None:
    """Each process stays below the limit by itself."""
    program = f"import mmap, os, time\n{TOGETHER[how]}\nx = b'x' * (40 << 20)\ntime.sleep(2)\nprint('held it all')"
    found = cell(kind, program, memory_bytes=128 << 20)
    assert found["code"] not in (0, None) and "held it all" not in found["stdout"], found
    assert cell(kind, "x = b'x' * (40 << 20)\nprint('fits')", memory_bytes=128 << 20)["stdout"] == "fits\n"


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

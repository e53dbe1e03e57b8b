"""Whatever a program does stays in its cell: as root, as root of a container, as a user, with and without what a kernel offers."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path

import pytest

from pa_npu.rewards.sandbox import CellLimits
from tests.helpers.cells import ALONE, CARRIED, CELLS, alive, cell, level_here, run


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
    actual = json.loads(outcome["stdout"])
    assert actual["keys"] == [] and actual["capabilities"] == []
    if (
        level == "limits"
        # where nothing is granted, files are open, and nothing claims otherwise: the attack is a
        # real
        # one
    ):
        assert {"read", "write", "look"} <= set(actual["got"])
        return
    assert actual["got"] == []
    assert secret.read_text() == of_the_run.read_text() == "as it was"
    if CELLS[kind][0] == 0 and level == "namespaces":
        assert actual["user"] != 0
    assert not Path(f"{of_the_run}.made").exists()


@pytest.mark.parametrize("kind", ["a user", "a user without anything"])
def test_a_run_that_wants_more_isolation_than_there_is_is_refused(kind: str) -> None:
    wanted = "namespaces" if kind == "a user without anything" else "files"
    actual = cell(kind, "print(1)", require=wanted)
    if kind == "a user":
        assert actual["stdout"] == "1\n"
    else:
        assert actual["failed"].startswith(
            "reward.code.require: namespaces, but this system gives level limits (limits of"
        )
        assert "Operation not permitted" in actual["failed"]


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


@pytest.mark.parametrize("kind", [*CARRIED, ALONE])
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

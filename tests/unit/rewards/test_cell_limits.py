"""Time, memory and files of a cell are limited, for all of its processes together."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pa_npu.rewards.sandbox import CellLimits
from tests.helpers.cells import ALONE, CARRIED, CELLS, LIMITS, cell, level_here, run

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
    actual = cell(kind, program, memory_bytes=128 << 20)
    assert actual["code"] not in (0, None) and "held it all" not in actual["stdout"], actual
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
    actual = cell("a user", program, memory_bytes=128 << 20)
    assert actual["stdout"] == "[0, 0, 0]\n", actual


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


@pytest.mark.parametrize("kind", [*CARRIED, ALONE])
def test_buffers_of_socket_pairs_are_memory_that_a_cell_holds(kind: str) -> None:
    actual = cell(kind, SOCKETS, memory_bytes=96 << 20)
    level_here(kind, actual)
    assert actual["code"] not in (0, None) and "held it all" not in actual["stdout"], actual
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
@pytest.mark.parametrize("kind", [*CARRIED, ALONE])
def test_files_of_a_cell_are_limited_together_in_bytes_and_number(kind: str, how: str) -> None:
    program = (
        "import mmap, os, time\nblock = bytes(8 << "
        f"20)\n{WRITES[how]}\ntime.sleep(3)\nprint('wrote it all')"
    )
    actual = cell(kind, program, files_bytes=16 << 20)
    level_here(kind, actual)
    assert actual["code"] not in (0, None) and "wrote it all" not in actual["stdout"], actual


@pytest.mark.parametrize("kind", [*CARRIED, ALONE])
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
    for kind in (*CARRIED, ALONE):
        outcome = cell(kind, program)
        if kind != ALONE and CELLS[kind][3] not in outcome["isolation"]:
            continue
        assert outcome["stdout"] == "", outcome

"""How a process ends that runs its event loop through run_until_terminated: by itself, by SIGTERM, or by its second."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, sys
from pa_npu.control import tasks
tasks.LONGEST_S = 0.3

async def returns(): pass
async def fails(): raise ValueError("its own failure")
async def waits():
    try:
        print("ready", flush=True)
        await asyncio.sleep(60)
    finally:
        print("closed", flush=True)
async def fails_when_cancelled():
    try:
        await waits()
    except asyncio.CancelledError:
        raise ValueError("came of ending") from None
async def never_ends():
    print("ready", flush=True)
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            print("goes on", flush=True)

tasks.run_until_terminated(globals()[sys.argv[1]]())
print("returned", flush=True)
"""


@pytest.mark.parametrize(
    "work, message, code",
    [
        ("returns", "returned", 0),
        ("fails", "ValueError: its own failure", 1),
        ("waits", "ready closed", -signal.SIGTERM),
        ("fails_when_cancelled", "ready closed", -signal.SIGTERM),
        ("never_ends", "ready goes on", -signal.SIGTERM),
    ],
)
def test_the_process_ends_as_it_would_without_but_for_what_it_closes_before(
    work: str, message: str, code: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, work],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    with process:
        first = ""
        if code < 0:
            first = process.stdout.readline()
            assert first == "ready\n", first
            process.send_signal(signal.SIGTERM)
        # not communicate, which does not see what readline has taken from the pipe already
        output = first + process.stdout.read()
        process.wait(20)
    assert process.returncode == code, output
    assert message in " ".join(output.split()) and ("Traceback" in output) == (code == 1), output

"""Processes of a benchmark end with it, also by SIGTERM."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.helpers.launched import running
from tools.processes import ROOT


def test_what_a_benchmark_has_started_ends_when_it_is_ended_by_sigterm(tmp_path: Path) -> None:
    child = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(60)']); time.sleep(60)"
    )
    program = f"""
import pathlib, sys, time
from tools.processes import end_on_sigterm, started
end_on_sigterm()
with started([sys.executable, "-c", {child!r}], pathlib.Path({str(tmp_path / "log")!r})) as process:
    print(process.pid, flush=True)
    time.sleep(60)
"""
    benchmark = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert benchmark.stdout is not None
    with benchmark:
        group = int(benchmark.stdout.readline())
        deadline = time.monotonic() + 20
        while len(members := of_group(group)) < 2:
            assert time.monotonic() < deadline, members
            time.sleep(0.05)
        benchmark.send_signal(signal.SIGTERM)
        assert benchmark.wait(40) == 128 + signal.SIGTERM
    assert not any(map(running, members)), "neither the process nor what it started"


def of_group(group: int) -> list[int]:
    """Process ids of a process group."""
    actual = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            actual.append(int(stat.parent.name))
    return actual

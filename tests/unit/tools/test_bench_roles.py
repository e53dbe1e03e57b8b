"""tools/bench_roles.py: processor time is that of all processes that were started, and a ratio is of one round."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import pytest

from tools.bench_roles import ProcessorTime, Run, render

BURN = """
import time
end = time.process_time() + 0.6
while time.process_time() < end:
    sum(range(1000))
time.sleep(0.4)
"""


def test_processor_time_is_of_children_and_theirs_and_waiting_takes_none() -> None:
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {BURN!r}])"
    measured = ProcessorTime()
    with measured.sampled():
        begin_s = time.time()
        subprocess.run([sys.executable, "-S", "-c", nested], check=True)
        end_s = time.time()
        time.sleep(0.2)
    assert measured.between(begin_s, end_s) == pytest.approx(0.65, abs=0.15)
    assert measured.between(end_s, end_s + 0.1) == pytest.approx(0.0, abs=0.02)


def test_a_ratio_is_of_the_medians_of_one_round() -> None:
    def run(mode: str, number: int, seconds: list[float]) -> Run:
        return Run("short", mode, number, seconds, seconds, [0] * len(seconds), [])

    runs = [
        run("turns", 0, [1.0, 1.0, 9.0]),
        run("roles", 0, [1.0, 1.0, 1.0]),
        run("turns", 1, [4.0, 4.0, 4.0]),
        run("roles", 1, [2.0, 2.0, 2.0]),
    ]
    row = render(runs, argparse.Namespace(order="prompt")).splitlines()[-1]
    assert "| 1.500 (1.000 to 2.000) |" in row, "not of the machine's drift from round to round"

"""A limit on the time in which processes could run: a busy machine takes nothing of it, and every limit ends by the clock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from pa_npu.config.sections.reward import STARVED_FACTOR
from pa_npu.control.running_time import TimeLimit, waits_of


class Machine:
    """A clock and the kernel's count of what threads have waited, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.waits = {"main": 5_000_000_000, "other": 0}

    def limit(self, limit_s: float, longest_s: float | None = None) -> TimeLimit:
        return TimeLimit(
            1, limit_s, longest_s, waits=lambda root: dict(self.waits), clock=lambda: self.now_s
        )

    def over_after(self, limit: TimeLimit, waiting: float, thread: str = "main") -> float:
        """Returns when the limit is over, if the thread waits for a processor in this share of the
        time.
        """
        while not limit.is_over():
            step_s = limit.look_again_s()
            assert step_s > 0, "the limit would be looked at for ever"
            self.now_s += step_s
            self.waits[thread] = self.waits.get(thread, 0) + int(waiting * step_s * 1e9)
        return self.now_s


@pytest.mark.parametrize(
    ("waiting", "factor"), [(0.0, 1.0), (0.5, 2.0), (0.8, 5.0), (1.0, STARVED_FACTOR)]
)
@pytest.mark.parametrize("thread", ["main", "other", "one that has just begun"])
def test_what_a_thread_waits_for_a_processor_does_not_count_up_to_a_factor(
    waiting: float, factor: float, thread: str
) -> None:
    machine = Machine()
    assert machine.over_after(machine.limit(4.0), waiting, thread) == pytest.approx(
        4.0 * factor, rel=0.15
    )


def test_a_limit_of_the_clock_alone_does_not_stretch() -> None:
    machine = Machine()
    assert machine.over_after(machine.limit(4.0, longest_s=4.0), 1.0) == pytest.approx(
        4.0, rel=0.02
    )


def test_a_kernel_that_counts_no_waiting_leaves_the_clock() -> None:
    limit_s = 2.0
    machine = Machine()
    machine.waits = {}
    limit = machine.limit(limit_s)
    machine.now_s = limit_s - 0.01
    assert not limit.is_over()
    machine.now_s = limit_s
    assert limit.is_over()


def test_the_kernel_counts_the_waiting_of_descendants_that_share_a_processor() -> None:
    """Two processes spin on one processor, so that each waits for about half of the time."""
    processor = min(os.sched_getaffinity(0))
    spin = (
        f"import os\nos.sched_setaffinity(0, {{{processor}}})\nprint(flush=True)\nwhile True: pass"
    )
    spinners = [
        subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) for _ in range(2)
    ]
    try:
        for spinner in spinners:
            assert spinner.stdout is not None
            spinner.stdout.readline()
        began_s, before = time.monotonic(), waits_of(os.getpid())
        if not any(before.values()):
            pytest.skip("this kernel does not count it")
        while (elapsed_s := time.monotonic() - began_s) < 0.6:
            pass
        grown = [waited - before.get(thread, 0) for thread, waited in waits_of(os.getpid()).items()]
    finally:
        for spinner in spinners:
            spinner.send_signal(signal.SIGKILL)
            spinner.communicate()
    assert max(grown) / 1e9 > 0.25 * elapsed_s

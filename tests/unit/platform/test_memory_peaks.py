"""Memory at its most is that since the last look, of each kind of process, by the kernel's mark."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pa_npu.control import keeper
from pa_npu.engines.vllm.worker import WorkerExtension
from pa_npu.engines.worker_answers import memory_peak
from pa_npu.platform import memory_peaks
from pa_npu.platform.memory_peaks import (
    MemoryPeak,
    ResidentPeak,
    device_peak_bytes,
    own_processes,
    tree,
)

MIB = 2**20
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the marks are Linux's"
)


class Child:
    """A process that holds and lets go of memory when told to."""

    PROGRAM = """
import mmap, sys
held = None
for line in sys.stdin:
    size = int(line)
    if held is not None:
        held.close()
    held = mmap.mmap(-1, size) if size else None
    for page in range(0, size, 4096):
        held[page] = 1
    print("done", flush=True)
"""

    def __enter__(self) -> Child:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", self.PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.hold(0)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.communicate("")

    @property
    def pid(self) -> int:
        return self._process.pid

    def hold(self, mib: int) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{mib * MIB}\n")
        self._process.stdin.flush()
        self._process.stdout.readline()


def rises(peak: ResidentPeak, child: Child) -> list[float]:
    """MiB above the first look, of an iteration that needs 64 for a time, one that needs nothing,
    one that keeps 32.
    """
    first = peak.pop_peak()
    actual = []
    for needs in ((64, 0), (0,), (32,)):
        for mib in needs:
            child.hold(mib)
        actual.append((peak.pop_peak() - first) / MIB)
    return actual


def test_what_one_iteration_needed_is_not_the_next_ones() -> None:
    with Child() as child:
        assert rises(ResidentPeak(lambda: [child.pid]), child) == pytest.approx([64, 0, 32], abs=4)


def test_several_processes_add_up_and_one_that_has_ended_counts_nothing() -> None:
    with Child() as one, Child() as second:
        peak = ResidentPeak(lambda: [one.pid, second.pid, 2**22 + 1])
        first = peak.pop_peak()
        one.hold(32), second.hold(16), one.hold(0)
        assert (peak.pop_peak() - first) / MIB == pytest.approx(48, abs=5)
    assert peak.pop_peak() == 0


def test_where_the_mark_cannot_be_reset_it_is_the_most_since_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ResidentPeak, "_reset", lambda self, pid: None)
    with Child() as child:
        assert rises(ResidentPeak(lambda: [child.pid]), child) == pytest.approx([64, 64, 64], abs=4)


def test_no_processes_are_no_bytes() -> None:
    assert ResidentPeak(lambda: []).pop_peak() == 0


def test_without_proc_it_is_the_most_since_the_start(tmp_path: Path) -> None:
    assert ResidentPeak(own_processes, proc=str(tmp_path)).pop_peak() > 50 * MIB


def test_the_processes_of_a_command_are_those_that_its_keeper_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert keeper.SESSION == memory_peaks.SESSION
    monkeypatch.delenv(keeper.SESSION, raising=False)
    assert own_processes() == [os.getpid()]
    command = [
        sys.executable,
        "-c",
        "from tests.unit.platform.test_memory_peaks import print_peak; print_peak()",
    ]
    lifeline, writer = os.pipe()
    actual = subprocess.run(
        [sys.executable, "-I", "-S", keeper.__file__, str(lifeline), "5", "", "--", *command],
        pass_fds=[lifeline], start_new_session=True, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    os.close(lifeline), os.close(writer)
    assert actual.stdout.strip() == "True", "the command, and what it started"


def print_peak() -> None:
    """In the command: whether its own processes are it and its child."""
    with Child() as child:
        print(set(own_processes()) == {os.getpid(), child.pid} == set(tree(os.getpid())))


def test_a_device_that_keeps_no_count_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_peak_bytes("cpu") is None and device_peak_bytes("no_such_device") is None
    state = {"peak": 900}
    device = SimpleNamespace(
        max_memory_allocated=lambda: state["peak"],
        reset_peak_memory_stats=lambda: state.update(peak=100),
    )
    monkeypatch.setattr(torch, "toy", device, raising=False)
    assert [device_peak_bytes("toy") for _ in range(2)] == [900, 100], "reset at each look"


def test_the_fullest_of_engines_and_workers_counts() -> None:
    assert MemoryPeak.largest([]) is None
    assert MemoryPeak.largest([MemoryPeak(5), MemoryPeak(3, 7), MemoryPeak(1, 9)]) == MemoryPeak(
        5, 9
    )
    answers = [{"memory": {"host": 70, "device": 5}}, {"memory": {"host": 0, "device": 8}}]
    assert memory_peak(answers) == MemoryPeak(70, 8), (
        "the first worker counts all processes of the engine"
    )
    assert memory_peak([{"memory": {"host": 70, "device": None}}]) == MemoryPeak(70)
    assert memory_peak([{}]) is None and memory_peak([{"memory": "a lot"}]) is None


def test_one_worker_of_an_engine_counts_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def worker(rank: int) -> WorkerExtension:
        extension = WorkerExtension()
        extension.rank, extension.device = rank, "cpu"  # type: ignore[attr-defined]
        return extension

    monkeypatch.delenv(keeper.SESSION, raising=False)
    assert all(worker(rank)._pa_memory()["host"] > 50 * MIB for rank in (0, 1)), (
        "without a keeper each counts itself"
    )
    monkeypatch.setenv(keeper.SESSION, str(os.getsid(0)))
    monkeypatch.setattr(memory_peaks, "tree", lambda leader: [os.getpid()])
    assert [bool(worker(rank)._pa_memory()["host"]) for rank in (0, 1)] == [True, False]

"""tools/paced: devices that take as long as asked, whatever the work beside them took."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pa_npu.attention import PrefixLayout
from pa_npu.backends.registry import backend_module
from pa_npu.planning.iteration_model.subjects import EngineSpeed, VirtualCluster
from tools.bench_schedule import RESPONSES, shortest_generation_s
from tools.paced import device as paced_device
from tools.paced.device import Device
from tools.paced.trainer import PacedBackend, PacedMicrobatches


class Clock:
    """What time.monotonic tells and time.sleep moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock of the paced devices alone: threads that other tests left behind keep the real one."""
    clock = Clock()
    stand_in = SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.sleep)
    monkeypatch.setattr(paced_device, "time", stand_in)
    return clock


class Source:
    """Microbatches of so many tokens, each ready at its time; its reader works for work_s on the
    one before.
    """

    is_last, traffic = False, None

    def __init__(self, clock: Clock, batches: list[tuple[float, int]]) -> None:
        self._clock, self._batches = clock, iter(batches)
        self.waited_s = 0.0

    def settle(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        ready_s, tokens = next(self._batches)
        self.waited_s += max(0.0, ready_s - self._clock.now)
        self._clock.now = max(self._clock.now, ready_s)
        return SimpleNamespace(whole_layout=PrefixLayout.from_sequences([tokens]))


def test_work_that_goes_on_has_no_gap_and_work_that_begins_does_not_begin_earlier(
    clock: Clock,
) -> None:
    device = Device()
    device.ends(device.begins(goes_on=False), 0.5)
    assert clock.now == pytest.approx(100.5)
    clock.now += 0.2  # beside the device
    device.ends(device.begins(goes_on=True), 0.5)
    assert clock.now == pytest.approx(101.0)
    clock.now += 0.2
    device.ends(device.begins(goes_on=False), 0.5)
    assert clock.now == pytest.approx(101.7)
    begin_s = device.begins(goes_on=True)
    clock.now += 0.9  # longer than the device takes
    device.ends(begin_s, 0.5)
    assert clock.now == pytest.approx(102.6)


def test_microbatches_follow_each_other_at_the_trainers_speed_but_for_waiting(clock: Clock) -> None:
    source = Source(clock, [(100.0, 1000), (100.0, 2000), (107.0, 1000)])
    paced = PacedMicrobatches(source, 0.001)  # type: ignore[arg-type]
    begun = []
    for _ in paced:
        begun.append(clock.now)
        clock.now += 0.3  # forward and backward
    assert begun == pytest.approx([100.0, 101.0, 107.0]) and clock.now == pytest.approx(108.0)
    assert paced.waited_s == pytest.approx(4.0) and paced.settle() == 3


def test_a_backend_takes_as_long_as_asked_and_does_all_else_itself(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACED_TRAINER", "0.001")
    inputs: list[Any] = []
    backend = SimpleNamespace(
        step=lambda: "stepped",
        accumulate=lambda microbatches, objective: inputs.extend([objective, *microbatches]),
    )
    paced = PacedBackend(backend)  # type: ignore[arg-type]
    paced.accumulate(Source(clock, [(100.0, 1000), (100.0, 2000)]), "objective")  # type: ignore[arg-type]
    assert len(inputs) == 3 and inputs[0] == "objective" and clock.now == pytest.approx(103.0)
    assert paced.step() == "stepped"
    assert (
        backend_module("tools.paced.trainer:BACKEND").changes()
        == backend_module("megatron").changes()
    )


def test_a_worker_computes_and_then_waits_for_its_device(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CPUWorker:
        """vLLM's, whose steps take 30 ms here."""

        def execute_model(self, scheduler_output: Any) -> str:
            clock.now += 0.03
            return f"computed {len(scheduler_output.num_scheduled_tokens)}"

    monkeypatch.setitem(
        sys.modules, "vllm.v1.worker.cpu_worker", SimpleNamespace(CPUWorker=CPUWorker)
    )  # type: ignore[misc]
    monkeypatch.delitem(sys.modules, "tools.paced.engine", raising=False)
    monkeypatch.setenv("PACED_ENGINE", "0.1,0.01,0.001")
    worker = importlib.import_module("tools.paced.engine").PacedWorker()
    monkeypatch.delitem(sys.modules, "tools.paced.engine")

    def step(**tokens: int) -> float:
        before = clock.now
        assert (
            worker.execute_model(SimpleNamespace(num_scheduled_tokens=tokens))
            == f"computed {len(tokens)}"
        )
        return clock.now - before

    assert step(a=129, b=33) == pytest.approx(0.1 + 2 * 0.01 + 160 * 0.001), "two prompts"
    clock.now += 0.05  # what vLLM does between two steps
    assert step(a=1, b=1) == pytest.approx(0.12 - 0.05), "beside the device"
    clock.now += 0.05
    assert step(c=1) == pytest.approx(0.11), "after a pause"
    assert step() == pytest.approx(0.03), "nothing to compute"


def test_the_trainers_speed_follows_from_the_shortest_generation() -> None:
    cluster = VirtualCluster({"0": EngineSpeed(0.012, 0.0005, 0.0)}, 32)
    lengths = [[64] * RESPONSES] * 16
    assert shortest_generation_s(cluster, lengths, 128) == pytest.approx(
        4 * 64 * (0.012 + 32 * 0.0005)
    )
    two = VirtualCluster({name: EngineSpeed(0.012, 0.0005, 0.0) for name in "01"}, 32)
    assert shortest_generation_s(two, lengths, 128) == pytest.approx(2 * 64 * (0.012 + 32 * 0.0005))

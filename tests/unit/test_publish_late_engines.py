"""Late engines: weights are held while they are sent, never sent once they change; a failed delivery harms nobody but itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from pa_npu import platform as platforms
from pa_npu.config.mesh import Mesh, Place
from pa_npu.control.channel import StoreChannel
from pa_npu.errors import DeadlineExceeded
from pa_npu.publish.late_engines import LateEngines
from pa_npu.publish.messages import (
    LATE_ANSWER,
    LATE_BROKEN,
    LATE_DECISION,
    LATE_REQUEST,
    LATE_SENT,
    LateDecision,
    LateRequest,
    PublishMembers,
    SentWeights,
)
from pa_npu.publish.publisher import PublishStats
from pa_npu.publish.version_gate import VersionGate
from pa_npu.weight_transfer.transport import WeightSyncError

WAIT_S = 90.0  # nothing waits so long unless it is wrong, or the machine has no time for ten threads that spin
ALONE = Mesh().place(0)


def make_channel() -> StoreChannel:
    return StoreChannel(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))


class Publisher:
    """Notes what it is asked; publishing does `work`."""

    def __init__(self, work: Callable[[], None] = lambda: None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._work = work

    def connect(self, members: PublishMembers) -> None:
        self.calls.append(("connect", members.epoch, members.workers, members.host_workers))

    def publish(self, version: int) -> PublishStats:
        self.calls.append(("publish", version))
        self._work()
        return PublishStats(digests="ab")

    def close(self) -> None:
        self.calls.append(("close",))


def ask(channel: StoreChannel, number: int, version: int, go: bool, rank: int = 0) -> bool:
    """The coordinator's part for one rank; returns its answer."""
    LATE_REQUEST.put(channel, LateRequest(version, 2), number=number)
    held = LATE_ANSWER.wait(channel, WAIT_S, number=number, rank=rank).held
    LATE_DECISION.put(channel, LateDecision(go), number=number)
    return held


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


@pytest.mark.parametrize("fails", [False, True])
def test_a_late_engine_is_sent_the_version_when_all_ranks_hold_it(fails: bool) -> None:
    channel, gate = make_channel(), VersionGate(0.05)

    def work() -> None:
        with pytest.raises(DeadlineExceeded):
            gate.close()  # held as long as this takes
        if fails:
            raise WeightSyncError("the engine died again")

    publisher = Publisher(work)
    gate.open(4)
    with LateEngines(publisher, channel, gate, platforms.get("cpu"), ALONE, WAIT_S):  # type: ignore[arg-type]
        assert ask(channel, 0, version=4, go=False), "held here, but another rank has gone on"
        assert ask(channel, 1, version=4, go=True)
        assert not ask(channel, 2, version=3, go=False)
    wait_until(lambda: gate.hold(4), "the weights stay held")
    assert publisher.calls == [("connect", 1, 2, 0), ("publish", 4), ("close",)], (
        "the first was called off, the third is outdated"
    )
    assert LATE_BROKEN.exists(channel, number=1) == fails
    assert LATE_SENT.exists(channel, number=1, stage=0) != fails
    if not fails:
        assert LATE_SENT.get(channel, number=1, stage=0) == SentWeights(4, "ab")


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), ValueError("nonsense"), WeightSyncError("gone")])
def test_whatever_breaks_a_delivery_is_told_and_the_next_engine_is_served(error: Exception) -> None:
    """torch raises RuntimeError; a thread that it ended would let all later engines wait in vain."""
    channel, gate = make_channel(), VersionGate(WAIT_S)
    outcomes = iter([error, None])

    def work() -> None:
        if (outcome := next(outcomes)) is not None:
            raise outcome

    gate.open(0)
    with LateEngines(Publisher(work), channel, gate, platforms.get("cpu"), ALONE, WAIT_S):  # type: ignore[arg-type]
        assert ask(channel, 0, version=0, go=True)
        broken = LATE_BROKEN.wait(channel, WAIT_S, number=0)
        assert str(error) in broken.reason and type(error).__name__ in broken.reason and "rank 0" in broken.reason
        assert ask(channel, 1, version=0, go=True)
        LATE_SENT.wait(channel, WAIT_S, number=1, stage=0)


class Device:
    """A device with one of the backends that cannot run two groups' collectives at the same time: fails where they overlap."""

    comm_backend = "nccl"

    def __init__(self) -> None:
        self.training = False
        self.sent_during: list[str] = []
        self._lock = threading.Lock()

    def synchronize(self) -> None:
        assert not self.training

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        yield

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        with self._lock:
            self.training = True
        yield
        with self._lock:
            self.training = False

    def send(self) -> None:
        for _ in range(20):
            with self._lock:
                assert not self.training, "a collective of training runs beside the delivery"
            time.sleep(0.001)


class Stage:
    """Two tensor-parallel ranks. Every microbatch has a collective of both, in which they agree whether it is the last."""

    def __init__(self, number: int, end: threading.Event) -> None:
        self.number, self.ranks = number, (2 * number, 2 * number + 1)
        self._end, self._is_last = end, False
        self._all = threading.Barrier(2, self._agree)

    def _agree(self) -> None:
        self._is_last = self._end.is_set()

    def collective(self) -> bool:
        self._all.wait(WAIT_S)
        return self._is_last


class Trainer:
    """A rank that trains microbatches, each with a collective of its stage."""

    def __init__(self, rank: int, stage: Stage, channel: StoreChannel) -> None:
        self.gate, self.device = VersionGate(WAIT_S), Device()
        self.gate.open(0)
        self.borders = 0
        self.publisher = Publisher(self.device.send)
        self.late = LateEngines(self.publisher, channel, self.gate, self.device, Mesh(2, 2).place(rank), WAIT_S)  # type: ignore[arg-type]
        self._stage = stage
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._train, name=f"rank {rank}")

    def _train(self) -> None:
        try:
            while True:
                with self.gate.border():
                    pass
                self.borders += 1
                with self.device.microbatch():
                    ends = self._stage.collective()
                if ends:
                    return
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Trainer:
        self.late.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(WAIT_S)
        self.late.__exit__(None, None, None)
        assert not self._thread.is_alive() and self.error is None, self.error


@pytest.mark.parametrize("stages", [1, 2])
def test_deliveries_take_turns_with_training_on_all_ranks_and_training_goes_on(stages: int) -> None:
    """Two tensor-parallel ranks per stage, which would deadlock if they stopped at different borders; five deliveries."""
    channel = make_channel()
    end = threading.Event()
    trainers = [
        Trainer(rank, stage, channel)
        for stage in (Stage(number, end) for number in range(stages))
        for rank in stage.ranks
    ]
    started = [trainer.__enter__() for trainer in trainers]
    for number in range(5):
        LATE_REQUEST.put(channel, LateRequest(0, 2), number=number)
        for rank in range(2 * stages):
            assert LATE_ANSWER.wait(channel, WAIT_S, number=number, rank=rank).held
        LATE_DECISION.put(channel, LateDecision(True), number=number)
        for stage in range(stages):
            LATE_SENT.wait(channel, WAIT_S, number=number, stage=stage)
        assert not LATE_BROKEN.exists(channel, number=number), LATE_BROKEN.get(channel, number=number).reason
        before = trainers[0].borders
        wait_until(lambda before=before: trainers[0].borders > before + 3, "training stands still")  # type: ignore[misc]
    end.set()
    for trainer in started:
        trainer.__exit__()
    assert all(len([call for call in t.publisher.calls if call[0] == "publish"]) == 5 for t in trainers)


def test_the_device_of_these_tests_sees_an_overlap() -> None:
    """The control: without turns the stand-in fails."""
    device = Device()
    with device.microbatch(), pytest.raises(AssertionError, match="runs beside the delivery"):
        device.send()


def test_a_delivery_goes_on_while_training_waits_for_the_engine_that_it_is_for() -> None:
    channel, gate, device = make_channel(), VersionGate(WAIT_S), Device()
    gate.open(0)
    publisher = Publisher(device.send)
    with LateEngines(publisher, channel, gate, device, ALONE, WAIT_S), gate.border():  # type: ignore[arg-type]
        assert ask(channel, 0, version=0, go=True)
        LATE_SENT.wait(channel, WAIT_S, number=0, stage=0)


def test_a_stage_that_cannot_stop_breaks_the_delivery_and_keeps_nothing() -> None:
    """As a pipeline stage that waits for its neighbour's activations, which is no border."""
    channel, gate, device = make_channel(), VersionGate(WAIT_S), Device()
    gate.open(0)
    publisher = Publisher()
    with LateEngines(publisher, channel, gate, device, ALONE, timeout_s=0.4):  # type: ignore[arg-type]
        with device.microbatch():
            assert ask(channel, 0, version=0, go=True)
            reason = LATE_BROKEN.wait(channel, WAIT_S, number=0).reason
        assert "did not come to microbatch border 0 within 0.2 s" in reason
        assert ("publish", 0) not in publisher.calls
        with gate.border():
            pass
        gate.close()


class Failing(Publisher):
    """A leader whose engine dies while they join."""

    def connect(self, members: PublishMembers) -> None:
        super().connect(members)
        raise WeightSyncError("the engine died")


@pytest.mark.parametrize("place", [Mesh(2).place(1), Mesh(pipeline=2).place(1)])
def test_who_waits_for_a_rank_whose_part_failed_stops_at_once_and_training_goes_on(place: Place) -> None:
    """A tensor-parallel peer, and the leader of the next stage. Their own deadline is much later than this test's."""
    channel, device = make_channel(), Device()
    gates = [VersionGate(WAIT_S), VersionGate(WAIT_S)]
    for gate in gates:
        gate.open(0)
    first = place.mesh.place(0)
    leader = LateEngines(Failing(), channel, gates[0], device, first, 60 * WAIT_S)  # type: ignore[arg-type]
    waiting = Publisher()
    other = LateEngines(waiting, channel, gates[1], device, place, 60 * WAIT_S)  # type: ignore[arg-type]
    with leader, other, gates[0].border(), gates[1].border():
        LATE_REQUEST.put(channel, LateRequest(0, 2), number=0)
        for rank in (0, place.rank):
            assert LATE_ANSWER.wait(channel, WAIT_S, number=0, rank=rank).held
        LATE_DECISION.put(channel, LateDecision(True), number=0)
        reason = LATE_BROKEN.wait(channel, WAIT_S, number=0).reason
        wait_until(lambda: waiting.calls[-1:] == [("close",)], "the rank that waits does not give the delivery up")
    for gate in gates:
        gate.close()
    assert ("publish", 0) not in waiting.calls
    assert LATE_BROKEN.get(channel, number=0).reason == reason and "rank 0" in reason, "who failed first is named"

"""Late engines: weights are held while they are sent, never sent once they change; a failed delivery harms nobody but itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from pa_npu import platform as platforms
from pa_npu.config.mesh import Mesh
from pa_npu.control.channel import StoreChannel
from pa_npu.errors import DeadlineExceeded
from pa_npu.publish.late_engines import LateEngineSender, VersionGate
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
from pa_npu.weight_transfer.transport import WeightSyncError

# nothing waits so long unless it is wrong, or the machine has no time for ten threads that spin
WAIT_S = 90.0
ALONE = Mesh().place(0)


def make_channel() -> StoreChannel:
    return StoreChannel(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))


class Publisher:
    """Notes what it is asked; publishing does `work`."""

    is_leader = True

    def __init__(self, work: Callable[[], None] = lambda: None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._work = work

    def publish(self, version: int, members: PublishMembers) -> PublishStats:
        self.calls.append(
            ("publish", version, members.epoch, members.workers, members.host_workers)
        )
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


def wait_until(condition: Callable[[], bool], description: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, description
        time.sleep(0.002)


@pytest.mark.parametrize("fails", [False, True])
def test_a_late_engine_is_sent_the_version_when_all_ranks_hold_it(fails: bool) -> None:
    channel = make_channel()
    gate = VersionGate(0.05)

    def work() -> None:
        with pytest.raises(DeadlineExceeded):
            gate.close()  # held as long as this takes
        if fails:
            raise WeightSyncError("the engine died again")

    publisher = Publisher(work)
    gate.open(4)
    with LateEngineSender(publisher, channel, gate, platforms.get("cpu"), ALONE, WAIT_S):  # type: ignore[arg-type]
        assert ask(channel, 0, version=4, go=False), "held here, but another rank has gone on"
        assert ask(channel, 1, version=4, go=True)
        assert not ask(channel, 2, version=3, go=False)
    wait_until(lambda: gate.acquire(4), "the weights stay held")
    assert publisher.calls == [("publish", 4, 1, 2, 0), ("close",)], (
        "the first was called off, the third is outdated"
    )
    assert LATE_BROKEN.exists(channel, number=1) == fails
    assert LATE_SENT.exists(channel, number=1, rank=0) != fails
    if not fails:
        assert LATE_SENT.get(channel, number=1, rank=0) == SentWeights(4, "ab")


@pytest.mark.parametrize(
    "error", [RuntimeError("out of memory"), ValueError("nonsense"), WeightSyncError("gone")]
)
def test_whatever_breaks_a_delivery_is_told_and_the_next_engine_is_served(error: Exception) -> None:
    """torch raises RuntimeError; a thread that it ended would let all later engines wait in vain."""
    channel = make_channel()
    gate = VersionGate(WAIT_S)
    outcomes = iter([error, None])

    def work() -> None:
        if (outcome := next(outcomes)) is not None:
            raise outcome

    gate.open(0)
    with LateEngineSender(Publisher(work), channel, gate, platforms.get("cpu"), ALONE, WAIT_S):  # type: ignore[arg-type]
        assert ask(channel, 0, version=0, go=True)
        broken = LATE_BROKEN.wait(channel, WAIT_S, number=0)
        assert (
            str(error) in broken.reason
            and type(error).__name__ in broken.reason
            and "rank 0" in broken.reason
        )
        assert ask(channel, 1, version=0, go=True)
        LATE_SENT.wait(channel, WAIT_S, number=1, rank=0)

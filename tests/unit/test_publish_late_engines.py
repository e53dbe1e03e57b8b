"""Late engines: weights are held while they are sent, never sent once they change, and a failed delivery harms nobody."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from pa_npu import platform as platforms
from pa_npu.control.channel import StoreChannel
from pa_npu.errors import DeadlineExceeded
from pa_npu.publish.late_engines import LateEngines, VersionGate
from pa_npu.publish.publisher import PublishStats
from pa_npu.publish.transport import WeightSyncError

WAIT_S = 20.0


def test_only_the_version_that_is_in_place_can_be_held() -> None:
    gate = VersionGate(1.0)
    assert not gate.hold(3), "nothing is published yet"
    gate.open(3)
    assert not gate.hold(2)
    assert gate.hold(3)
    gate.release()
    gate.close()
    assert not gate.hold(3), "the optimizer has begun"


def test_a_change_waits_for_the_reader_and_not_for_ever() -> None:
    gate = VersionGate(0.2)
    gate.open(1)
    assert gate.hold(1)
    with pytest.raises(DeadlineExceeded, match=r"version 1 is still being sent to a late engine after 0\.2 s"):
        gate.close()
    release = threading.Timer(0.05, gate.release)
    release.start()
    gate.close()
    release.join()
    assert not gate.hold(1)


class Publisher:
    """Notes what it is asked; may fail."""

    def __init__(self, gate: VersionGate, fails: bool) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._gate, self._fails = gate, fails

    def connect(self, epoch: int, workers: int) -> None:
        self.calls.append(("connect", epoch, workers))

    def publish(self, version: int) -> PublishStats:
        with pytest.raises(DeadlineExceeded):
            VersionGate.close(self._gate)  # held as long as this takes
        self.calls.append(("publish", version))
        if self._fails:
            raise WeightSyncError("the engine died again")
        return PublishStats()

    def close(self) -> None:
        self.calls.append(("close",))


@pytest.mark.parametrize("fails", [False, True])
def test_a_late_engine_is_sent_the_version_when_all_ranks_hold_it(fails: bool) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    channel, gate = StoreChannel(store), VersionGate(0.05)
    publisher = Publisher(gate, fails)
    gate.open(4)
    with LateEngines(publisher, channel, gate, platforms.get("cpu"), rank=1, timeout_s=WAIT_S):  # type: ignore[arg-type]
        channel.put_json("late/0", {"version": 4, "workers": 2})
        assert channel.wait_json("late/0/answer/1", WAIT_S, "an answer") is True
        channel.put_json("late/0/go", False)  # another rank has gone on

        channel.put_json("late/1", {"version": 4, "workers": 2})
        assert channel.wait_json("late/1/answer/1", WAIT_S, "an answer") is True
        channel.put_json("late/1/go", True)

        channel.put_json("late/2", {"version": 3, "workers": 2})
        assert channel.wait_json("late/2/answer/1", WAIT_S, "an answer") is False
        channel.put_json("late/2/go", False)
    deadline = time.monotonic() + WAIT_S
    while not gate.hold(4):
        assert time.monotonic() < deadline, "the weights stay held"
    assert publisher.calls[:2] == [("connect", 1, 2), ("publish", 4)], "the first was called off, the third is outdated"

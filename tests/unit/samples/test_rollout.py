"""Each slot is filled once, read by every rank of its replica, and gone after the last one."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist

from pa_npu.control.channel import StoreChannel
from pa_npu.errors import DeadlineExceeded, InvariantViolation
from pa_npu.samples.group import Group
from pa_npu.samples.rollout_buffer import RolloutBuffer
from tools.groups import group_of_responses


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10)
    )


def group(index: int, iteration: int = 0) -> Group:
    return group_of_responses(
        iteration=iteration,
        version=iteration,
        index=index,
        prompt_id=index,
        prompt_tokens=np.arange(3, dtype=np.int32),
        response_tokens=np.full(4, index, dtype=np.int32),
        response_lengths=np.array([1, 3], dtype=np.int32),
        logprobs=np.zeros(4, np.float32),
        rewards=np.zeros(2, np.float32),
        advantages=np.zeros(2, np.float32),
        finished=np.ones(2, np.uint8),
    )


def test_the_last_reader_removes_the_slot_and_nothing_of_it_stays(server: dist.TCPStore) -> None:
    keys_before = server.num_keys()
    buffer = RolloutBuffer(StoreChannel(server), "run", readers=3)
    buffer.put(group(5), replica=1, slot=2)
    for reader in range(3):
        assert buffer.wait(0, 1, 2, timeout_s=0.0) < 1.0, (
            f"the slot was gone before reader {reader}"
        )
        assert buffer.read(0, 1, 2).index == 5
        buffer.done(0, 1, 2)
    with pytest.raises(DeadlineExceeded):
        buffer.wait(0, 1, 2, timeout_s=0.0)
    assert server.num_keys() == keys_before


def test_a_wait_that_ends_names_iteration_slot_and_replica(server: dist.TCPStore) -> None:
    buffer = RolloutBuffer(StoreChannel(server), "run", readers=1)
    with pytest.raises(
        DeadlineExceeded, match="the group of slot 2, replica 1, iteration 4, from the coordinator"
    ):
        buffer.wait(4, 1, 2, timeout_s=0.01)


def test_a_slot_filled_twice_violates_exactly_once_even_after_it_was_read(
    server: dist.TCPStore,
) -> None:
    buffer = RolloutBuffer(StoreChannel(server), "run", readers=1)
    buffer.put(group(0), 0, 0)
    with pytest.raises(
        InvariantViolation, match=r"I2 .*group 9 .*slot 0 of replica 0.* group 0 of that iteration"
    ):
        buffer.put(group(9), 0, 0)
    buffer.done(0, 0, 0)
    with pytest.raises(InvariantViolation, match="I2"):
        buffer.put(group(0), 0, 0)
    buffer.put(replace(group(1), index=1), 0, 1)
    buffer.put(group(0, iteration=1), 0, 0)
    with pytest.raises(InvariantViolation, match="iteration 1 has begun"):
        buffer.put(group(2), 0, 2)


def test_attempts_of_a_run_do_not_see_each_other(server: dist.TCPStore) -> None:
    channel = StoreChannel(server)
    RolloutBuffer(channel, "attempt-1", readers=1).put(group(0), 0, 0)
    with pytest.raises(DeadlineExceeded):
        RolloutBuffer(channel, "attempt-2", readers=1).wait(0, 0, 0, timeout_s=0.0)

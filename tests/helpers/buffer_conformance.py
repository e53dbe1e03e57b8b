"""Conformance of rollout buffers: CHECKS, each called with a function that opens the buffer under test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pa_npu.control.channel import CHUNK_BYTES
from pa_npu.errors import DeadlineExceeded, InvariantViolation, PaNpuError
from pa_npu.samples.group import Group
from pa_npu.samples.rollout_buffer import RolloutBuffer
from pa_npu.samples.wire import to_bytes
from tools.groups import group_of_responses

Open = Callable[[int], RolloutBuffer]
"""From `readers` to a buffer; all that it opens within one check are the same one."""


def make_group(index: int, iteration: int = 0, longest: int = 9) -> Group:
    rng = np.random.default_rng((index, iteration))
    lengths = rng.integers(1, longest, 4).astype(np.int32)
    total = int(lengths.sum())
    return group_of_responses(
        iteration=iteration,
        version=iteration,
        index=index,
        prompt_id=index,
        prompt_tokens=rng.integers(0, 1000, 5).astype(np.int32),
        response_tokens=rng.integers(0, 1000, total).astype(np.int32),
        response_lengths=lengths,
        logprobs=-rng.random(total).astype(np.float32),
        rewards=rng.random(4).astype(np.float32),
        advantages=np.array([-0.0, 0.5, -1.5, 1e-30], np.float32),
        finished=np.array([True, False, True, True]),
        run_seed=7,
    )


def raises(error: type[PaNpuError], call: Callable[[], object]) -> str:
    try:
        call()
    except error as found:
        return str(found)
    raise AssertionError(f"did not raise {error.__name__}")


def groups_come_back_bit_for_bit_from_their_slots(open_buffer: Open) -> None:
    buffer, reader = open_buffer(1), open_buffer(1)
    places = {(0, 0, 0): 3, (0, 1, 0): 1, (0, 0, 1): 0, (1, 0, 0): 2}
    for (iteration, replica, slot), index in places.items():
        assert not reader.ready(iteration, replica, slot)
        buffer.put(make_group(index, iteration), replica, slot)
        assert reader.ready(iteration, replica, slot)
    for (iteration, replica, slot), index in places.items():
        assert reader.wait(iteration, replica, slot, 5.0) < 5.0
        group = make_group(index, iteration)
        assert reader.read_bytes(iteration, replica, slot) == to_bytes(group)
        assert str(reader.read(iteration, replica, slot)) == str(group)
        reader.done(iteration, replica, slot)


def a_group_of_many_megabytes_passes(open_buffer: Open) -> None:
    group = make_group(0, longest=400_000)
    assert len(to_bytes(group)) > CHUNK_BYTES
    open_buffer(1).put(group, 0, 0)
    assert open_buffer(1).read_bytes(0, 0, 0) == to_bytes(group)


def the_last_reader_removes_a_slot_and_none_before(open_buffer: Open) -> None:
    buffer = open_buffer(3)
    buffer.put(make_group(5), 1, 2)
    for _ in range(3):
        assert buffer.ready(0, 1, 2) and buffer.read(0, 1, 2).index == 5
        buffer.done(0, 1, 2)
    assert not buffer.ready(0, 1, 2)
    raises(PaNpuError, lambda: buffer.read_bytes(0, 1, 2))


def a_slot_is_filled_once(open_buffer: Open) -> None:
    buffer = open_buffer(1)
    buffer.put(make_group(0), 0, 0)
    assert "group 9" in raises(InvariantViolation, lambda: buffer.put(make_group(9), 0, 0))
    buffer.done(0, 0, 0)
    raises(InvariantViolation, lambda: buffer.put(make_group(0), 0, 0))
    buffer.put(replace(make_group(1), index=1), 0, 1)


def a_wait_ends_at_its_deadline_and_says_for_what(open_buffer: Open) -> None:
    actual = raises(DeadlineExceeded, lambda: open_buffer(1).wait(4, 1, 2, 0.01))
    assert "the group of slot 2, replica 1, iteration 4, from the coordinator" in actual


CHECKS: tuple[Callable[[Open], None], ...] = (
    groups_come_back_bit_for_bit_from_their_slots,
    a_group_of_many_megabytes_passes,
    the_last_reader_removes_a_slot_and_none_before,
    a_slot_is_filled_once,
    a_wait_ends_at_its_deadline_and_says_for_what,
)

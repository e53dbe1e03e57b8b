"""Every group gets exactly one slot, every replica the same number (I2)."""

from __future__ import annotations

import random

import pytest

from pa_npu.errors import InvariantViolation
from pa_npu.rollout.assignment import Assignment


def test_prompt_order_does_not_depend_on_arrival():
    expected = {index: (index % 3, index // 3) for index in range(12)}
    for seed in range(5):
        arrival = list(range(12))
        random.Random(seed).shuffle(arrival)
        assignment = Assignment("prompt", 3, 4)
        assert {index: assignment.assign(index, index * 7) for index in arrival} == expected
        assignment.finish()


def test_completion_order_gives_work_to_the_replica_with_least_and_equal_counts():
    assignment = Assignment("completion", 2, 3)
    works = [100, 10, 10, 10, 1, 1]
    slots = [assignment.assign(index, work) for index, work in enumerate(works)]
    # replica 1 has less work until it is full, then replica 0 takes the rest
    assert slots == [(0, 0), (1, 0), (1, 1), (1, 2), (0, 1), (0, 2)]
    assignment.finish()


def test_random_works_fill_every_slot_exactly_once():
    numbers = random.Random(1)
    assignment = Assignment("completion", 4, 8)
    slots = {assignment.assign(index, numbers.randint(1, 1000)) for index in range(32)}
    assert slots == {(replica, slot) for replica in range(4) for slot in range(8)}


def test_repeated_missing_and_unknown_groups_violate_i2():
    assignment = Assignment("completion", 2, 2)
    assignment.assign(0, 1)
    with pytest.raises(InvariantViolation, match="I2 exactly once: group 0"):
        assignment.assign(0, 1)
    with pytest.raises(InvariantViolation, match="I2 exactly once: group 4"):
        assignment.assign(4, 1)
    with pytest.raises(InvariantViolation, match="each must get 2"):
        assignment.finish()

"""A notice of a group that is trained by rule: it comes back as it went, damage is seen, and the iterator counts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pa_npu.algorithm.registry import build_algorithm
from pa_npu.config.schema import Config
from pa_npu.errors import InvariantViolation
from pa_npu.samples.columns import NONE, GroupFormatError
from pa_npu.samples.group import Group
from pa_npu.samples.iterator import MicrobatchIterator
from pa_npu.samples.notice import is_notice, notice_bytes, read_notice
from pa_npu.samples.wire import from_bytes, to_bytes
from tests.helpers.trainer_rank import make_groups, with_advantages


def groups_with_equal(equal: Sequence[int], count: int = 4) -> list[Group]:
    """Groups of iteration 2, of which some have equal rewards; all have their rewards' advantages."""
    groups = []
    for group in make_groups(2, count, 4, seed=1):
        rewards = np.ones(4, np.float32) if group.index in equal else group.rewards
        centred = (rewards - rewards.mean(dtype=np.float64)).astype(np.float32)
        groups.append(with_advantages(replace(group, rewards=rewards), centred))
    return groups


class Shelf:
    """A buffer of one iteration's bytes, of which those after `arrived` slots are not there yet."""

    readers, head_bytes, columns = 1, 0, NONE

    def __init__(self, slots: list[bytes]) -> None:
        self.slots = slots
        self.finished: list[int] = []

    def wait(self, iteration: int, replica: int, slot: int, timeout_s: float) -> float:
        return 0.0

    def ready(self, iteration: int, replica: int, slot: int) -> bool:
        return True

    def read_bytes(self, iteration: int, replica: int, slot: int) -> bytes:
        return self.slots[slot]

    def done(self, iteration: int, replica: int, slot: int) -> None:
        self.finished.append(slot)


def iterator(slots: list[bytes], skips: bool = True, **more: Any) -> MicrobatchIterator:
    return MicrobatchIterator(
        Shelf(slots),  # type: ignore[arg-type]
        replica=0,
        num_replicas=1,
        iteration=2,
        groups=len(slots),
        order="prompt",
        responses_per_microbatch=2,
        shared_prompt=True,
        pad_multiple=1,
        timeout_s=5.0,
        algorithm=build_algorithm(
            Config.model_validate(
                {
                    "model": {"path": "m"},
                    "data": {"train": "t"},
                    "algorithm": {"advantage": "centred"},
                    "schedule": {"skip_zero_advantage": skips},
                }
            )
        ),
        **more,
    )


def as_put(groups: list[Group], equal: Sequence[int]) -> list[bytes]:
    return [
        notice_bytes(group) if group.index in equal else to_bytes(group, NONE) for group in groups
    ]


def test_a_notice_says_what_trainers_count_and_has_no_tokens() -> None:
    (group,) = groups_with_equal([0], count=1)
    data = notice_bytes(group)
    assert is_notice(data)
    assert not is_notice(to_bytes(group, NONE))
    notice, whole = read_notice(data)
    assert whole == b""
    assert notice.response_tokens == group.trained_lengths.tolist()
    assert notice.leading_tokens == group.leading_lengths.tolist()
    assert notice.version_range == group.version_range
    assert (notice.iteration, notice.index) == (2, 0)


def test_a_notice_for_a_checkpoint_has_the_whole_group_with_it() -> None:
    (group,) = groups_with_equal([0], count=1)
    _, whole = read_notice(notice_bytes(group, to_bytes(group, NONE)))
    assert np.array_equal(from_bytes(whole).tokens, group.tokens)


def test_a_notice_of_a_part_counts_the_part_and_knows_all_rewards() -> None:
    (group,) = groups_with_equal([0], count=1)
    notice, _ = read_notice(notice_bytes(replace(group, part=(1, 3))))
    assert notice.first == 1
    assert notice.response_tokens == group.trained_lengths[1:3].tolist()
    assert len(notice.rewards) == 4


def test_every_damaged_byte_is_seen() -> None:
    (group,) = groups_with_equal([0], count=1)
    data = notice_bytes(group, b"the group")
    for place in range(4, len(data)):
        if place in (12, 13, 14, 15):
            continue  # the header's length: see below
        damaged = bytearray(data)
        damaged[place] ^= 1
        with pytest.raises(GroupFormatError):
            read_notice(bytes(damaged))
    shorter = bytearray(data)
    shorter[12] -= 1
    with pytest.raises(GroupFormatError):
        read_notice(bytes(shorter))
    with pytest.raises(GroupFormatError):
        read_notice(data[:10])


def test_the_iterator_counts_groups_by_rule_and_hands_out_the_others_alone() -> None:
    equal = [0, 2, 3]
    groups = groups_with_equal(equal)
    source = iterator(as_put(groups, equal))
    microbatches = list(source)
    source.finish()
    assert [microbatch.group_indices for microbatch in microbatches] == [(1,), (1,)]
    assert [notice.index for notice in source.by_rule] == equal
    assert source.indices == (0, 1, 2, 3)


def test_where_all_groups_are_by_rule_there_is_no_microbatch_and_nothing_to_measure() -> None:
    groups = groups_with_equal(range(4))
    source = iterator(as_put(groups, range(4)))
    assert source.first(1) == []
    assert list(source) == []
    source.finish()
    assert len(source.by_rule) == 4


def test_fillers_take_the_places_where_the_number_of_microbatches_is_agreed_beforehand() -> None:
    groups = groups_with_equal([0, 2])
    source = iterator(as_put(groups, [0, 2]), fills_places=True)
    first = source.first(1)
    assert [microbatch.group_indices for microbatch in first] == [(1,)], "a filler measures nothing"
    microbatches = list(source)
    source.finish()
    fillers = [microbatch.is_filler for microbatch in microbatches]
    assert fillers == [True, True, False, False, True, True, False, False]


def test_each_update_knows_its_own_groups_by_rule() -> None:
    groups = groups_with_equal([0, 2, 3])
    source = iterator(as_put(groups, [0, 2, 3]))
    actual = []
    for share in source.updates(2):
        computed = {microbatch.group_indices[0] for microbatch in share}
        actual.append((computed, [notice.index for notice in share.by_rule]))
    assert actual == [({1}, [0]), (set(), [2, 3])]


def test_a_group_with_a_gradient_that_is_put_by_rule_ends_the_run() -> None:
    groups = groups_with_equal([])
    with pytest.raises(
        InvariantViolation, match=r"I7 gradient: group 0 .* advantages that are not"
    ):
        list(iterator([notice_bytes(group) for group in groups]))


def test_a_notice_in_a_run_without_the_key_ends_the_run() -> None:
    groups = groups_with_equal([0])
    with pytest.raises(InvariantViolation, match="skip_zero_advantage = false"):
        list(iterator(as_put(groups, [0]), skips=False))

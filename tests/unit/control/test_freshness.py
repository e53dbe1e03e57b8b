"""Freshness: 0 <= trained version - token's version <= max_staleness, for training, producing and publishing alike."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from pa_npu.control.freshness import EXACT, Freshness
from pa_npu.errors import InvariantViolation


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_versions_from_max_staleness_back_to_the_trained_one_hold_and_no_others(
    max_staleness: int,
) -> None:
    policy = Freshness(max_staleness)
    for trained in range(6):
        for token in range(8):
            inside = token in range(max(0, trained - max_staleness), trained + 1)
            assert policy.allows(trained, token) == inside
            with (
                nullcontext()
                if inside
                else pytest.raises(InvariantViolation, match="may not be produced")
            ):
                policy.check_production(trained, token)


def test_a_broken_rule_names_what_and_both_versions() -> None:
    EXACT.check(3, [3, 3], "group 7")
    EXACT.check(3, [], "nothing")
    with pytest.raises(
        InvariantViolation,
        match=r"I1 version: group 7 .* weight version 2, but version 3 .*staleness = 0",
    ):
        EXACT.check(3, [3, 2], "group 7")
    Freshness(1).check(3, [2, 3], "group 7")
    with pytest.raises(InvariantViolation, match="weight version 4, but version 3"):
        Freshness(1).check(3, [2, 4], "group 7")


def test_nothing_is_produced_before_its_version_is_published() -> None:
    EXACT.check_production(2, 2)
    for published in (None, 1, 3):
        with pytest.raises(
            InvariantViolation,
            match=f"iteration 2 may not be produced .* weight version {published}",
        ):
            EXACT.check_production(2, published)


def test_weights_do_not_arrive_under_a_response() -> None:
    EXACT.check_arrival(2, 0)
    with pytest.raises(
        InvariantViolation, match="8 sequences are in flight while weight version 2 arrives"
    ):
        EXACT.check_arrival(2, 8)

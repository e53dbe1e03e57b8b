"""A function that fails costs its own rewards of one group, and the run only where it keeps failing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pa_npu.config.sections.reward import RewardConfig, RewardFunction
from pa_npu.errors import DataError
from pa_npu.rewards.pool import LEAST, WINDOW, FailureLimit, RewardPool
from tests.helpers.users_rewards import group, users_config

pytestmark = pytest.mark.usefixtures("users_module")


async def test_what_a_function_prints_or_reads_does_not_disturb_the_protocol() -> None:
    async with RewardPool(users_config()) as pool:
        results = [await pool.score(group(print=True)), await pool.score(group())]
    assert [result.total.tolist() for result in results] == [[2, 3], [2, 3]]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"raise": True}, "users_rewards:by_row: KeyError: 'no\\nsuch thing'"),
        ({"own": True}, "users_rewards:by_row: Own: x, "),
        ({"rewards": [1.0]}, "returned 1 rewards for 2 responses"),
        ({"rewards": [1.0, float("nan")]}, "not finite"),
        ({"rewards": None}, "returned a NoneType, not a list"),
        ({"rewards": "ab"}, "returned a str, not a list"),
        ({"exit": 3}, "its reward worker died 3 times (last: exit code 3)"),
    ],
)
async def test_a_failing_function_is_a_logged_zero_and_the_next_group_is_fine(
    row: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with RewardPool(users_config()) as pool:
        bad, good = await asyncio.gather(pool.score(group(**row)), pool.score(group()))
        later = await pool.score(group())
    assert bad.total.tolist() == [0, 0] and not bad.correct.any()
    assert len(bad.errors) == 1 and reason in bad.errors[0] and "\n" not in bad.errors[0]
    assert good.total.tolist() == later.total.tolist() == [2, 3] and good.errors == ()
    assert reason in caplog.text and "What is 2+2?" in caplog.text


@pytest.mark.parametrize("order", [1, -1], ids=["after the others", "before the others"])
@pytest.mark.parametrize(
    "row",
    [{"raise": True}, pytest.param({"exit": 3}, marks=pytest.mark.nightly), {"endless": True}],
)
async def test_only_the_failing_function_loses_its_reward(row: dict[str, Any], order: int) -> None:
    functions = (RewardFunction(name="math"), RewardFunction(name="users_rewards:by_row"))
    config = RewardConfig(functions=functions[::order], timeout_s=2.0)
    async with RewardPool(config) as pool:
        result = await pool.score(group(["#### 4", "#### 5"], **row))
    assert result.total.tolist() == [1, 0] and len(result.errors) == 1
    assert result.functions["math"].tolist() == [1, 0]
    assert "users_rewards:by_row" in result.errors[0] or "its worker" in result.errors[0]


@pytest.mark.parametrize(
    "row", [{"raise": True}, pytest.param({"exit": 3}, marks=pytest.mark.nightly)]
)
async def test_a_function_that_keeps_failing_ends_the_run_and_the_line_says_what_it_raised(
    row: dict[str, Any],
) -> None:
    """The function that fails is named, not the one before it that does not."""
    functions = (RewardFunction(name="math"), RewardFunction(name="users_rewards:by_row"))
    async with RewardPool(RewardConfig(functions=functions)) as pool:
        for _ in range(LEAST - 1):
            assert (await pool.score(group(**row))).errors
        with pytest.raises(
            DataError,
            match=r"users_rewards:by_row failed for 8 of the last 8 groups.*correct the function",
        ) as ended:
            await pool.score(group(**row))
    if "raise" in row:
        assert "users_rewards.py:" in str(ended.value)


async def test_functions_that_fail_now_and_then_do_not_end_the_run() -> None:
    async with RewardPool(users_config()) as pool:
        for number in range(3 * LEAST):
            await pool.score(group(**({"raise": True} if number % 2 else {})))


def test_the_failing_share_is_that_of_the_last_groups_only() -> None:
    share = FailureLimit(["f", "g"])
    for _ in range(10 * WINDOW):
        share.record({})
    for _ in range(WINDOW // 2):
        share.record({"f": "ValueError: x"})
    with pytest.raises(
        DataError, match=r"f failed for 33 of the last 64 groups.*last: ValueError: y"
    ):
        share.record({"f": "ValueError: y"})

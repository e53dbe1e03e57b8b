"""Time that a function takes costs rewards of its own group alone, and time that it waits costs none."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from pa_npu.config.sections.reward import STARVED_FACTOR, RewardConfig, RewardFunction
from pa_npu.control import running_time
from pa_npu.rewards.functions import RewardInput
from pa_npu.rewards.pool import RewardPool
from tests.helpers.users_rewards import SLOW, group, users_config

pytestmark = pytest.mark.usefixtures("users_module")


def starve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the kernel say that the worker has waited for a processor ever since the machine began."""
    monkeypatch.setattr(running_time, "waits_of", lambda root: {"worker": time.monotonic_ns()})


async def test_a_busy_machine_costs_no_reward_of_a_users_function_and_a_hanging_one_still_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = tmp_path / "release"
    limit_s = 0.4
    async with RewardPool(users_config(timeout_s=limit_s)) as pool:
        starve(monkeypatch)
        scored = asyncio.create_task(pool.score(group(wait_for=str(release))))
        done, _ = await asyncio.wait({scored}, timeout=3 * limit_s)
        release.touch()
        assert not done and (await scored).errors == (), "it had no processor"
        start_s = time.monotonic()
        hanging = await pool.score(group(endless=True))
        assert time.monotonic() - start_s >= STARVED_FACTOR * limit_s
    assert hanging.total.tolist() == [0, 0] and "reward.timeout_s = 0.4 s" in hanging.errors[0]


async def test_waiting_does_not_count_towards_the_time_limit(tmp_path: Path) -> None:
    # Each takes 0.8 s of a limit of 3 s, in sequence 4 s.
    marks = [str(tmp_path / f"mark{number}") for number in range(5)]

    async def touch_later() -> None:
        for mark in marks:
            await asyncio.sleep(0.8)
            Path(mark).touch()

    async with RewardPool(users_config(timeout_s=3.0)) as pool:
        toucher = asyncio.create_task(touch_later())
        results = await asyncio.gather(*(pool.score(group(wait_for=mark)) for mark in marks))
        await toucher
    assert all(result.errors == () for result in results)


async def test_slow_answers_get_zero_and_the_right_ones_of_their_group_keep_one_whatever_the_clock_says() -> (
    None
):
    responses = [
        SLOW,
        *[r"\boxed{2x+1}"] * 3,
        SLOW.replace("10}", "11}"),
        SLOW.replace("10}", "12}"),
        *["$1+2x$"] * 2,
    ]
    config = RewardConfig(timeout_s=0.05)  # of wall-clock: for users' functions alone
    async with RewardPool(config) as pool:
        start_s = time.monotonic()
        result = await pool.score(RewardInput("p", "2x+1", responses, [3] * 8, {}))
        assert time.monotonic() - start_s > 1.0, "not slow: the test shows nothing"
        again = await pool.score(RewardInput("p", "2x+1", responses, [3] * 8, {}))
    for outcome in (result, again):
        assert outcome.total.tolist() == [0, 1, 1, 1, 0, 0, 1, 1] and outcome.errors == ()


async def test_a_pattern_that_tries_too_many_ways_costs_its_response_alone() -> None:
    config = RewardConfig(
        functions=(RewardFunction(name="format", pattern=r"^(a+)+$"),), timeout_s=0.05
    )
    async with RewardPool(config) as pool:
        result = await pool.score(group(["a" * 40 + "b", "aaa", "b"]))
    assert result.total.tolist() == [0, 1, 0]
    assert "5 s of processor time; write one that tries fewer ways" in result.errors[0]


async def test_the_wall_clock_of_a_users_function_starts_with_that_function() -> None:
    functions = (RewardFunction(name="math"), RewardFunction(name="users_rewards:by_row"))
    async with RewardPool(RewardConfig(functions=functions, timeout_s=1.0)) as pool:
        slow_math = await pool.score(RewardInput("p", "2x+1", [SLOW, "2x+1"], [3, 3], {}))
        endless = await pool.score(
            RewardInput("p", "2x+1", ["2x+1", "x"], [3, 3], {"endless": True})
        )
    assert slow_math.total.tolist() == [29, 5] and slow_math.errors == ()
    # What `math` gave to the same responses stays.
    assert endless.total.tolist() == [1, 0] and "reward.timeout_s = 1 s" in endless.errors[0]

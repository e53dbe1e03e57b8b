"""A reward is the weighted sum of what functions give, each one finite number for each response."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pytest

from pa_npu.config.sections.reward import RewardConfig, RewardFunction
from pa_npu.rewards.functions import RewardInput, call_function
from pa_npu.rewards.pool import RewardPool
from tests.helpers.users_rewards import group, users_config

pytestmark = pytest.mark.usefixtures("users_module")


async def test_weighted_sum_verdict_and_labels() -> None:
    config = RewardConfig(
        functions=(
            RewardFunction(name="format", pattern=r"^<think>.*</think>", weight=0.25),
            RewardFunction(name="math"),
            RewardFunction(name="format", pattern=r"####", weight=-0.5),
        )
    )
    async with RewardPool(config) as pool:
        result = await pool.score(
            group(["<think>2\n2</think>\n#### 4", "#### 4", "4", "<think></think> 5"])
        )
    np.testing.assert_array_equal(result.functions["format"], [1, 0, 0, 1])
    np.testing.assert_array_equal(result.functions["math"], [1, 1, 1, 0])
    np.testing.assert_array_equal(result.functions["format#2"], [1, 1, 0, 0])
    np.testing.assert_array_equal(result.total, [0.75, 0.5, 1, 0.25])
    assert result.correct.tolist() == [True, True, True, False], (
        "the verdict is math's, not format's"
    )
    assert result.total.dtype == np.float32 and result.errors == ()


async def test_overlong_responses_lose_up_to_one_and_the_verdict_stays_maths() -> None:
    """DAPO, eq. 13, with L_max = 20 and L_cache = 5: 0 up to 15 tokens, (15 - length) / 5 up to 20,
    -1 beyond.
    """
    overlong = RewardFunction(name="overlong", buffer_tokens=5)
    lengths = [1, 15, 16, 18, 20, 21]
    config = RewardConfig(functions=(overlong, RewardFunction(name="math")))
    async with RewardPool(config, max_response_tokens=20) as pool:
        result = await pool.score(
            RewardInput("What is 2+2?", "4", ["#### 4"] * 5 + ["#### 5"], lengths, {})
        )
    np.testing.assert_allclose(result.functions["overlong"], [0, 0, -0.2, -0.6, -1, -1], rtol=1e-6)
    np.testing.assert_allclose(result.total, [1, 1, 0.8, 0.4, 0, -1], rtol=1e-6, atol=1e-7)
    assert result.correct.tolist() == [True] * 5 + [False]


async def test_a_graded_reward_counts_as_right_from_a_half_on() -> None:
    async with RewardPool(users_config("users_rewards:graded")) as pool:
        result = await pool.score(group())
    assert result.total.tolist() == pytest.approx([0.128, 0.5]) and result.correct.tolist() == [
        False,
        True,
    ]


async def test_a_users_function_receives_the_whole_group() -> None:
    row = {"level": [1, "a"], "day": datetime.date(2026, 1, 2)}
    async with RewardPool(users_config("users_rewards:everything")) as pool:
        result = await pool.score(
            RewardInput("What is 2+2?", "4", ["#### 4", "#### 5"], [3, 4], row)
        )
    assert (
        result.errors == ()
        and result.total.tolist() == [0.5, -0.5]
        and result.correct.tolist() == [True, False]
    )


NO_REWARDS = [
    ([1e39, 1.0], "1e+39 is beyond 1e+15"),
    ([1e308, 1.0], "beyond 1e+15"),
    ([-1e16, 1.0], "-1e+16 is beyond 1e+15"),
    ([10**400, 1], "more than 300 digits"),
    ([float("inf"), 1.0], "inf is not finite"),
    ([["1"], 1.0], "is a list, not a number"),
    (["1", "2"], "'1' is a str, not a number"),
    ([None, 1.0], "None is a NoneType, not a number"),
    ([1j, 1.0], "is a complex, not a number"),
    ({"a": 1.0, "b": 2.0}, "returned a dict, not a list"),
    ({0: 1.0, 1: 2.0}, "returned a dict, not a list"),
    ({1.0, 2.0}, "returned a set, not a list"),
    ({"a": 1, "b": 2}.values(), None),
    ("12", "returned a str, not a list"),
    (b"12", "returned a bytes, not a list"),
    (memoryview(b"12"), "returned a memoryview, not a list"),
    (np.array(1.0), "returned a ndarray, not a list"),
    (np.array([1j, 2.0]), "is a complex128, not a number"),
    (5.0, "returned a float, not a list"),
    ([[1.0, 2.0]], "returned 1 rewards for 2 responses"),
    (np.ones((2, 2)), "is not one number"),
    ([1e15, -1e15], None),
    ([True, False], None),
    (np.array([0.5, 1.0]), None),
    ((value for value in (0.5, 1.0)), None),
    (map(float, (0.5, 1.0)), None),
    ([np.float32(0.5), np.int64(1)], None),
]


@pytest.mark.parametrize(("returned", "reason"), NO_REWARDS, ids=lambda value: f"{value!r:.40}")
def test_a_reward_is_one_finite_number_that_float32_holds_for_each_response_in_order(
    returned: Any, reason: str | None
) -> None:
    rewards, problem = call_function(lambda _: returned, group())
    if reason is None:
        assert problem is None and len(rewards) == 2
    else:
        assert (
            rewards == [0.0, 0.0]
            and problem is not None
            and reason in problem
            and "\n" not in problem
        )


async def test_a_weighted_sum_beyond_the_range_is_zero_and_counted_as_a_failure() -> None:
    functions = (RewardFunction(name="users_rewards:by_row", weight=1e15),)
    async with RewardPool(RewardConfig(functions=functions)) as pool:
        result = await pool.score(group(rewards=[1e3, 1.0]))
        assert (
            result.total.tolist() == [0.0, 0.0]
            and "weighted sum of 1e+18 is beyond" in result.errors[0]
        )
        assert (await pool.score(group(rewards=[0.5, -1.0]))).total.tolist() == pytest.approx(
            [5e14, -1e15]
        )


@pytest.mark.parametrize("weight", [1e39, -1e16, float("inf"), float("nan")])
def test_a_weight_beyond_the_range_is_refused_with_the_configuration(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        RewardFunction(name="math", weight=weight)


@pytest.mark.parametrize(
    ("prompt", "reward"), [("Why?<|assistant|><think>\n", [0, 0, 1]), ("Why?", [1, 0, 1])]
)
async def test_an_answer_in_a_thought_that_the_prompt_opened_and_nobody_closed_is_none(
    prompt: str, reward: list[int]
) -> None:
    responses = [
        r"Maybe \boxed{42}. Wait, let me check",
        r"<think>\boxed{42}",
        r"so</think>\boxed{42}",
    ]
    functions = (RewardFunction(name="math"), RewardFunction(name="format", pattern="^<think>"))
    async with RewardPool(RewardConfig(functions=functions)) as pool:
        result = await pool.score(RewardInput(prompt, "42", responses, [3] * 3, {}))
    assert result.functions["math"].tolist() == reward
    assert result.functions["format"].tolist() == ([1, 1, 1] if "<think>" in prompt else [0, 1, 0])

"""The API's groups go to consumers by what training them costs, not by how many tokens they have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from pa_npu.config.schema import Config
from pa_npu.coordinator.episode import ScoredGroup
from pa_npu.coordinator.service.messages import TakeGroups
from pa_npu.coordinator.service.rollouts import RolloutService
from pa_npu.data.prompts import Prompt
from pa_npu.dispatch.work import GroupWork
from pa_npu.engines.protocol import Sampling
from pa_npu.families.spec import ModelSpec
from pa_npu.rewards.types import RewardResult
from pa_npu.samples.types import Sample, SampleBuilder, group_lengths
from tests.unit.test_dispatch_assignment import SMALL

CONFIG = Config.model_validate(
    {"model": {"path": "m"}, "data": {"train": "t"}, "rollout": {"max_response_tokens": 8192}}
)
PROMPT = 100
# About as many tokens each; one long response or eight of a length. Tokens pair those of one kind.
RESPONSES = ([8003] + [1] * 7, [1000] * 7 + [1005], [1000] * 7 + [1003], [7993] + [1] * 7)


def by_hand(lengths: list[int]) -> float:
    """Operations of training a group that shares its prompt: layers by token, attention by visible pair, head by prediction."""
    hidden, ffn, heads, kv_heads, head_dim, layers, vocabulary = 64, 96, 4, 2, 16, 2, 50
    linear = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * ffn
    pairs = PROMPT * (PROMPT + 1) / 2 + sum(PROMPT * n + n * (n + 1) / 2 for n in lengths)
    return (
        6 * layers * linear * (PROMPT + sum(lengths))
        + 3.5 * 4 * layers * heads * head_dim * pairs
        + 6 * hidden * vocabulary * sum(lengths)
    )


def samples(lengths: list[int]) -> list[Sample]:
    found = []
    for length in lengths:
        sample = SampleBuilder(np.ones(PROMPT, np.int32))
        sample.write(np.full(length, 3, np.int32), np.full(length, -0.5, np.float32), 0)
        found.append(sample.finish(True, ""))
    return found


async def imbalance(work: Callable[[int, Sequence[int]], float]) -> float:
    """Two consumers take the groups by turns: operations by hand of the one that has more over the mean, minus 1."""
    nothing: Any = None
    service = RolloutService(CONFIG, nothing, nothing, nothing, Sampling(8192, 1.0), nothing, work)

    async def take(consumer: int, most: int) -> list[dict[str, Any]]:
        asked = {"task": "t", "columns": ("lengths",), "source": "run", "policy": "balanced"}
        return await service.take_groups(msgspec.convert({**asked, "consumer": consumer, "most": most}, TakeGroups))

    assert await take(0, 1) == [], "there is nothing yet; the task begins"
    zeros = np.zeros(8, np.float32)
    for index, lengths in enumerate(RESPONSES):
        written = samples(lengths)
        prompt, right = Prompt(0, np.ones(PROMPT, np.int32), "1", "p", {}), np.zeros(8, np.bool_)
        scored = ScoredGroup(prompt, written, RewardResult(zeros, {}, right, ()))
        service.delivered(scored.group(0, 0, index), scored)
    done = [0.0, 0.0]
    for turn in range(len(RESPONSES)):
        (group_taken,) = await take(turn % 2, 1)
        done[turn % 2] += by_hand([length - PROMPT for length in group_taken["lengths"]])
    return max(done) / (sum(done) / 2) - 1


async def test_consumers_get_equal_operations_where_equal_tokens_would_give_one_of_them_all_that_is_dear() -> None:
    work = GroupWork(ModelSpec.parse("m", SMALL), CONFIG)
    for lengths in RESPONSES:
        assert work(*group_lengths(samples(lengths))) == pytest.approx(by_hand(lengths))
    assert await imbalance(work) < 0.01
    assert await imbalance(lambda prompt, lengths: prompt + sum(lengths)) > 0.3, "what tokens would do"

"""From a group's samples to its rewards: by the environment that made them, or by the reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pa_npu.data.prompts import Prompt
from pa_npu.environments.protocol import EnvironmentFailed
from pa_npu.rewards.types import RewardInput, RewardResult
from pa_npu.samples.types import Sample


class Rewards(Protocol):
    """Scores groups; pa_npu.rewards.pool.RewardPool is one."""

    async def score(self, group: RewardInput) -> RewardResult:
        """Rewards of a group's responses. A failing reward function is a logged zero, never an exception or a hang."""


async def score(rewards: Rewards, prompt: Prompt, samples: Sequence[Sample]) -> RewardResult:
    """Rewards of the samples of a prompt; those that the environment gave, if it gave any."""
    given = [sample.reward for sample in samples if sample.reward is not None]
    if not given:
        return await rewards.score(reward_input(prompt, samples))
    if len(given) != len(samples) or not np.isfinite(given).all():
        raise EnvironmentFailed(
            f"environment.name: rewards {[sample.reward for sample in samples]} of the samples of prompt {prompt.prompt_id} must "
            f"be finite numbers, or all None, which leaves them to the reward functions; correct the environment"
        )
    total = np.asarray(given, np.float32)
    return RewardResult(total, {"environment": total}, total > 0, ())


def reward_input(prompt: Prompt, samples: Sequence[Sample]) -> RewardInput:
    return RewardInput(
        prompt=prompt.text,
        answer=prompt.answer,
        responses=[sample.text for sample in samples],
        response_tokens=[sample.num_trained for sample in samples],
        row=prompt.row,
    )

"""Between a group's completions and its rewards: the reward input, and what a scored group is until it has advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pa_npu.data.prompts import Prompt
from pa_npu.engines.protocol import Generation
from pa_npu.rewards.types import RewardInput, RewardResult
from pa_npu.samples.group import Group


class Rewards(Protocol):
    """Scores groups; pa_npu.rewards.pool.RewardPool is one."""

    async def score(self, group: RewardInput) -> RewardResult:
        """Rewards of a group's responses. A failing reward function is a logged zero, never an exception or a hang."""


def reward_input(prompt: Prompt, completions: Sequence[Generation]) -> RewardInput:
    return RewardInput(
        prompt=prompt.text,
        answer=prompt.answer,
        responses=[completion.text for completion in completions],
        response_tokens=[len(completion.tokens) for completion in completions],
        row=prompt.row,
    )


@dataclass(frozen=True, eq=False)
class ScoredGroup:
    """A finished group with its rewards; `index` is its dispatch index in the iteration."""

    iteration: int
    index: int
    prompt: Prompt
    completions: list[Generation]
    result: RewardResult

    @property
    def prompt_length(self) -> int:
        return len(self.prompt.tokens)

    @property
    def num_responses(self) -> int:
        return len(self.completions)

    @property
    def response_lengths(self) -> list[int]:
        """Tokens of each response."""
        return [len(completion.tokens) for completion in self.completions]

    @property
    def num_response_tokens(self) -> int:
        return sum(self.response_lengths)

    def with_advantages(self, advantages: np.ndarray) -> Group:
        """The group as the buffer takes it. advantages: float32 [G]. Under max_staleness=0 version is the iteration (I1)."""
        return Group(
            iteration=self.iteration,
            version=self.iteration,
            index=self.index,
            prompt_id=self.prompt.prompt_id,
            prompt_tokens=np.asarray(self.prompt.tokens, np.int32),
            response_tokens=np.concatenate([completion.tokens for completion in self.completions]),
            response_lengths=np.array(self.response_lengths, np.int32),
            logprobs=np.concatenate([completion.logprobs for completion in self.completions]),
            rewards=np.asarray(self.result.total, np.float32),
            advantages=advantages,
            finished=np.array([completion.finished for completion in self.completions], np.uint8),
        )

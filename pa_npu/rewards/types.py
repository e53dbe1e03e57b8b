"""RewardInput and RewardResult: what a reward function receives, and what the pool returns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

SHAPING = frozenset({"format", "overlong"})
"""Functions that judge a response's form, not its content."""


@dataclass(frozen=True)
class RewardInput:
    """A finished group: one prompt and its G responses. prompt: the rendered prompt. answer: the reference answer. responses: G
    texts. response_tokens: their lengths. row: the dataset row, as far as JSON can hold it (other values arrive as text)."""

    prompt: str
    answer: str
    responses: Sequence[str]
    response_tokens: Sequence[int]
    row: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class RewardResult:
    """Rewards of a group.

    total: float32 [G], the weighted sum. functions: each function's own rewards, float32 [G], unweighted, by name
    (a repeated name gets #2). correct: bool [G], the verdict of the first function that is not in SHAPING: its reward
    is at least half, all tests of a program pass. errors: what went wrong, one line each; a function that
    failed gave zeros. no_verdict: by function, responses on which a judge or a sandbox gave none; they have the mean of the others.
    """

    total: npt.NDArray[np.float32]
    functions: dict[str, npt.NDArray[np.float32]]
    correct: npt.NDArray[np.bool_]
    errors: tuple[str, ...]
    no_verdict: Mapping[str, int] = field(default_factory=dict)

    @property
    def judged(self) -> npt.NDArray[np.float32]:
        """float32 [G]: rewards of the first function that is not in SHAPING; the total where all are."""
        judging = (values for name, values in self.functions.items() if name.partition("#")[0] not in SHAPING)
        return next(judging, self.total)

    @cached_property
    def is_informative(self) -> bool:
        """Whether the rewards for content (not for form, such as length) differ within the group."""
        judged = self.judged
        return bool((judged != judged[0]).any())


def group_line(identity: int, group: RewardInput) -> bytes:
    """A group as a worker reads it."""
    fields = {
        "prompt": group.prompt,
        "answer": group.answer,
        "responses": list(group.responses),
        "response_tokens": [int(length) for length in group.response_tokens],
        "row": dict(group.row),
    }
    return json.dumps({"id": identity, "group": fields}, default=str).encode() + b"\n"

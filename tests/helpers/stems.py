"""Groups with long prompts cut into pieces behind stems, and their gradients by a backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import Microbatch, cut, pack
from pa_npu.samples.stems import Branch, Stem, with_stems
from pa_npu.trainer.learner import Learner
from tests.helpers.backend import Source
from tools.groups import group_of_responses


def long_group(
    prompt: int = 29, lengths: Sequence[int] = (5, 3, 7, 4), index: int = 0, iteration: int = 0
) -> Group:
    """Random tokens; advantages that are not zero."""
    rng = np.random.default_rng((index, iteration, prompt))
    total = sum(lengths)
    return group_of_responses(
        iteration=iteration,
        version=iteration,
        index=index,
        prompt_id=index,
        prompt_tokens=rng.integers(3, 128, prompt).astype(np.int32),
        response_tokens=rng.integers(3, 128, total).astype(np.int32),
        response_lengths=np.array(lengths, np.int32),
        logprobs=-rng.random(total).astype(np.float32) - 4.3,
        rewards=rng.random(len(lengths)).astype(np.float32),
        advantages=rng.standard_normal(len(lengths)).astype(np.float32),
        finished=np.ones(len(lengths), np.uint8),
    )


def depth_first(
    group: Group, responses: int, *, multiple: int = 1, stem_tokens: int | None = None
) -> list[Microbatch]:
    """The group's stems, cut into at most `stem_tokens`, and its pieces behind them."""
    microbatches = []
    for part in with_stems(cut(group, responses), group, multiple, stem_tokens, min_saved_rows=1):
        if isinstance(part, Stem):
            microbatches.append(part.packed())
        elif isinstance(part, Branch):
            microbatches.append(part.packed(multiple))
        else:
            microbatches.append(pack([part], True, multiple))
    return microbatches


def gradients(learner: Learner, microbatches: Sequence[Microbatch]) -> dict[str, torch.Tensor]:
    """What `accumulate` leaves of these microbatches, by parameter."""
    learner.accumulate(Source(microbatches))
    found: dict[str, torch.Tensor] = {}
    backend: Any = learner.backend
    for tensor in backend.stepped():
        assert tensor.gradient is not None
        found[tensor.name] = tensor.gradient.clone()
    return found


def relative_errors(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> dict[str, float]:
    """The largest difference of each gradient, as a share of the tensor's largest."""
    assert found.keys() == expected.keys()
    return {
        name: float((found[name] - values).abs().max() / values.abs().max().clamp_min(1e-30))
        for name, values in expected.items()
    }

"""A group put together from arrays of prompt and responses, and the work of a packed layout, for benchmarks and tests."""

from __future__ import annotations

import numpy as np

from pa_npu.attention import PrefixLayout
from pa_npu.families.shape import FlopsModel
from pa_npu.samples.group import Group
from pa_npu.samples.types import SampleBuilder


def group_of_responses(
    *,
    iteration: int,
    version: int,
    index: int,
    prompt_id: int,
    prompt_tokens: np.ndarray,
    response_tokens: np.ndarray,
    response_lengths: np.ndarray,
    logprobs: np.ndarray,
    rewards: np.ndarray,
    advantages: np.ndarray,
    finished: np.ndarray,
    run_seed: int = 0,
) -> Group:
    """One prompt with G responses, which stand one after another in response_tokens and logprobs."""
    ends = np.cumsum(response_lengths)[:-1]
    samples = []
    for number, (tokens, sampled) in enumerate(
        zip(np.split(response_tokens, ends), np.split(logprobs, ends), strict=True)
    ):
        sample = SampleBuilder(prompt_tokens)
        sample.write(tokens, sampled, version)
        samples.append(sample.finish(bool(finished[number]), ""))
    identity = {
        "run_seed": run_seed,
        "iteration": iteration,
        "index": index,
        "prompt_id": prompt_id,
    }
    return Group.from_samples(samples, rewards, advantages, **identity)


def separate(layout: PrefixLayout) -> PrefixLayout:
    """Returns the same sequences without sharing, in leaf order, without padding: what the layout
    is measured against.
    """
    return PrefixLayout.from_sequences(
        layout.offsets[leaf] + layout.lengths[leaf] for leaf in layout.leaves
    )


def pairs(layout: PrefixLayout) -> int:
    """(query, key) pairs that attention computes."""
    spans = zip(layout.lengths, layout.offsets, strict=True)
    return sum(length * (length + 1) // 2 + length * offset for length, offset in spans)


def step_flops(flops: FlopsModel, layout: PrefixLayout, predictions: int) -> float:
    """Returns work of one step over the layout with that many predicted tokens."""
    return (
        layout.total * flops.per_token
        + pairs(layout) * flops.per_pair
        + predictions * flops.per_prediction
    )

"""The default environment: every sample is the prompt and one response."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from pa_npu.data.prompts import Prompt
from pa_npu.engines.protocol import Generation
from pa_npu.environments.protocol import EnvironmentContext, Generate, write
from pa_npu.samples.columns import NO_VERSION
from pa_npu.samples.types import Sample, SampleBuilder, SampleRow, check_one_each


class SingleTurn:
    """Gets all responses of a prompt from one request. It has no options."""

    waits_are_bounded = True  # it waits only for the policy
    trains_all_answers = True  # every response is a sample
    trains_in_context = True

    def __init__(self, context: EnvironmentContext) -> None:
        context.refuse_options("single_turn")

    async def rollout(self, prompt: Prompt, num_samples: int, generate: Generate) -> list[Sample]:
        generations = await generate(prompt.tokens, n=num_samples)
        return samples_of(prompt.tokens, generations)


def samples_of(prompt: npt.NDArray[np.int32], generations: Sequence[Generation]) -> list[Sample]:
    """Makes one sample of the prompt and each generation.

    The result equals a SampleBuilder's. Because every group comes through here, the arrays of all
    samples are made together and then cut apart, which takes half the time.
    """
    if any([generation.columns for generation in generations]):
        return [_sample(prompt, generation) for generation in generations]
    bounds = [0, *accumulate(len(prompt) + len(generation.tokens) for generation in generations)]
    parts: list[npt.NDArray[np.int32]] = []
    for generation in generations:
        parts += [prompt, generation.tokens]
    tokens = np.concatenate(parts, dtype=np.int32)
    component = np.zeros(bounds[-1], np.uint8)
    logprobs = np.zeros(bounds[-1], np.float32)
    versions = np.full(bounds[-1], NO_VERSION, np.int32)
    for generation, (start, end) in zip(generations, pairwise(bounds), strict=True):
        check_one_each(generation.tokens, generation.logprobs)
        written = slice(start + len(prompt), end)
        component[written] = 1
        versions[written] = generation.written_by
        if len(generation.logprobs):
            logprobs[written] = generation.logprobs
    row = SampleRow(tokens, component, logprobs, versions, bounds[1:], prompt=len(prompt))
    return row.cut(
        [generation.finished for generation in generations],
        [generation.text for generation in generations],
    )


def _sample(prompt: npt.NDArray[np.int32], generation: Generation) -> Sample:
    sample = SampleBuilder(prompt)
    write(sample, generation)
    return sample.finish(generation.finished, generation.text)

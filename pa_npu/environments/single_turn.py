"""The single turn: every sample is the prompt and one response, all responses from one request."""

from __future__ import annotations

from pa_npu.data.prompts import Prompt
from pa_npu.environments.protocol import EnvironmentContext, Generate, write
from pa_npu.samples.types import Sample, SampleBuilder


class SingleTurn:
    """The default environment; it has no options."""

    def __init__(self, context: EnvironmentContext) -> None:
        context.refuse_options("single_turn")

    async def rollout(self, prompt: Prompt, num_samples: int, generate: Generate) -> list[Sample]:
        samples = []
        for generation in await generate(prompt.tokens, n=num_samples):
            sample = SampleBuilder(prompt.tokens)
            write(sample, generation)
            samples.append(sample.finish(generation.finished, generation.text))
        return samples

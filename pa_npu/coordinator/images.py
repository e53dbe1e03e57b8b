"""Images of a prompt in the samples that an environment made of it: attached to their placeholders."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pa_npu.data.prompts import Prompt
from pa_npu.samples.shown_images import attached
from pa_npu.samples.types import Sample


async def with_images(prompt: Prompt, samples: Sequence[Sample]) -> list[Sample]:
    """Returns the samples with the prompt's images attached, each array once for all of them.

    Raises ValueError for a sample that shows placeholders of an image that nobody attached.
    """
    runs = await asyncio.to_thread(attached, prompt.images)
    attached_samples = []
    for number, sample in enumerate(samples):
        if not begins_with(sample.tokens, prompt.tokens):
            if shows_placeholders(sample.tokens[~sample.written], prompt):
                raise ValueError(
                    f"sample {number} has placeholders of images, but does not begin with the "
                    "prompt; begin with prompt.tokens"
                )
            attached_samples.append(sample)
            continue
        sent_with_response = [run for run in sample.placeholders if run.start >= len(prompt.tokens)]
        attached_samples.append(replace(sample, placeholders=(*runs, *sent_with_response)))
    return attached_samples


def begins_with(tokens: npt.NDArray[np.int32], prompt: npt.NDArray[np.int32]) -> bool:
    return len(tokens) >= len(prompt) and np.array_equal(tokens[: len(prompt)], prompt)


def shows_placeholders(tokens: npt.NDArray[np.int32], prompt: Prompt) -> bool:
    """Returns whether a placeholder of the prompt's model is among the tokens."""
    placeholder = prompt.tokens[prompt.images[0].start]
    return bool((tokens == placeholder).any())

"""The sequences of a trial, and their log-probs: by transformers' own forward, and as the backend packs them.

Each pass adds gradients of the same weighted sum of log-probs, so that models can be compared by
their gradients too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pa_npu.attention import PrefixLayout
from pa_npu.attention.stems import KeptKeys, PathRows
from pa_npu.attention.trie import pack
from pa_npu.backends.fsdp.model import ScoredModel
from pa_npu.backends.fsdp.vision import PackedImages, ShownPatches, joined_images, text_only
from pa_npu.vision.family import FAMILIES
from pa_npu.vision.processor import ImageProcessor

# Right packings differ by rounding in fp32, some 1e-6; a wrong mask changes log-probs by some
# tenths.
MAX_DIFFERENCE = 1e-3
VOCABULARY = 160
# Of a model that reads images: the first of its special tokens, and an image in the first prompt.
IMAGE_TOKEN = 150
_IMAGE_GRID = (1, 4, 6)
_IMAGE_START = 5
_IMAGE_TOKENS = 6
# (prompt, responses) of two groups.
GROUPS = ((20, (7, 12, 3)), (9, (5, 14)))


@dataclass(frozen=True)
class TrialSequence:
    """prompt: number of its tokens. image: patches [patches, size] that are the model's image,
    which tokens _IMAGE_START and following are placeholders of; None without one.
    """

    tokens: torch.Tensor
    prompt: int
    image: torch.Tensor | None = None


def sequences_of(model: Any) -> list[TrialSequence]:
    """Returns the sequences of the trial. The first group's prompt shows an image if the model
    reads any.
    """
    generator = torch.Generator().manual_seed(1)
    reads_images = model.config.model_type in FAMILIES
    largest = IMAGE_TOKEN if reads_images else VOCABULARY

    def draw(number: int) -> torch.Tensor:
        return torch.randint(0, largest, (number,), generator=generator)

    image = None
    if reads_images:
        image = torch.randn(
            _IMAGE_GRID[1] * _IMAGE_GRID[2], _patch_size(model), generator=generator
        )
    sequences = []
    for prompt, responses in GROUPS:
        first = draw(prompt)
        if image is not None:
            first[_IMAGE_START : _IMAGE_START + _IMAGE_TOKENS] = IMAGE_TOKEN
        for length in responses:
            sequences.append(TrialSequence(torch.cat([first, draw(length)]), prompt, image))
        image = None
    return sequences


def _patch_size(model: Any) -> int:
    """Returns the numbers of a patch."""
    vision = model.config.vision_config
    return int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)


def processor_of(model: Any) -> ImageProcessor:
    vision = model.config.vision_config
    return ImageProcessor(
        patch=vision.patch_size,
        merged=vision.spatial_merge_size,
        frames=vision.temporal_patch_size,
    )


def _weights(number: int) -> torch.Tensor:
    """Returns weights for the sum of a response's log-probs with which no gradients cancel."""
    return torch.linspace(0.5, 1.5, number)


def _forward(
    model: Any, tokens: torch.Tensor, prompt: int, image: torch.Tensor | None
) -> torch.Tensor:
    """Returns the log-probs of the tokens behind the prompt by transformers' own forward."""
    shown: dict[str, torch.Tensor] = {}
    if image is not None:
        shown = {
            "pixel_values": image,
            "image_grid_thw": torch.tensor([_IMAGE_GRID]),
            "mm_token_type_ids": (tokens == IMAGE_TOKEN).int()[None],
        }
    logits = model(tokens[None], use_cache=False, **shown).logits[0, prompt - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, tokens[prompt:, None])[:, 0]


def logprobs_alone(model: Any, sequences: list[TrialSequence]) -> list[torch.Tensor]:
    logprobs_by_sequence = []
    for sequence in sequences:
        logprobs = _forward(model, sequence.tokens, sequence.prompt, sequence.image)
        (logprobs * _weights(len(logprobs))).sum().backward()
        logprobs_by_sequence.append(logprobs.detach())
    return logprobs_by_sequence


@torch.no_grad()
def is_mixed_up(model: Any, sequences: list[TrialSequence], expected: list[torch.Tensor]) -> bool:
    """Returns whether the model is not causal, or depends on its context so little that a wrong
    context would not be detected.
    """
    sequence = sequences[0]
    short = len(expected[0]) - 1
    cut = _forward(model, sequence.tokens[:-1], sequence.prompt, sequence.image)
    if float((cut - expected[0][:short]).abs().max()) > MAX_DIFFERENCE:
        return True
    foreign = torch.cat([sequences[-1].tokens, sequence.tokens])  # the last shows no image
    seen = _forward(model, foreign, len(foreign) - len(expected[0]), sequence.image)
    return float((seen - expected[0]).abs().max()) < 10 * MAX_DIFFERENCE


def packed_logprobs(
    model: ScoredModel, sequences: list[TrialSequence], shares: bool, one_by_one: bool
) -> list[torch.Tensor]:
    """Returns each sequence's log-probs as the backend computes them, and sums gradients over
    microbatches as the backend does.

    shares: whether prompts are shared. one_by_one: whether a microbatch has one sequence.
    """
    microbatches = [sequences]
    if one_by_one:
        microbatches = [[sequence] for sequence in sequences]
    scores: list[torch.Tensor] = []
    for microbatch in microbatches:
        if shares:
            packed = pack([sequence.tokens.numpy() for sequence in microbatch])
            layout = packed.layout
            tokens = packed.tokens
            leaves = packed.leaves
        else:
            layout = PrefixLayout.from_sequences([len(sequence.tokens) for sequence in microbatch])
            tokens = torch.cat([sequence.tokens for sequence in microbatch])
            leaves = tuple(range(len(microbatch)))
        rows = []
        for leaf, sequence in zip(leaves, microbatch, strict=True):
            rows.append(layout.path_rows(leaf)[sequence.prompt - 1 : -1])
        targets = torch.cat([sequence.tokens[sequence.prompt :] for sequence in microbatch])
        images = _images(model, microbatch, layout, leaves)
        row_scores = model(tokens, layout, torch.cat(rows), targets, 1.0, 16, images=images)
        responses = row_scores.logprobs.split([len(response_rows) for response_rows in rows])
        losses = [(response * _weights(len(response))).sum() for response in responses]
        torch.stack(losses).sum().backward()
        scores += [response.detach() for response in responses]
    return scores


def logprobs_behind_stems(model: ScoredModel, sequences: list[TrialSequence]) -> list[torch.Tensor]:
    """As `packed_logprobs`, each response by itself behind its prompt."""
    scores: list[torch.Tensor] = []
    first = 0
    nothing = torch.zeros(1, dtype=torch.int64)
    for prompt, responses in GROUPS:
        rows = prompt - 1
        kept = KeptKeys(rows)
        stem = PathRows(PrefixLayout((rows,), (-1,)), own=kept)
        tokens = sequences[first].tokens
        opened = model(tokens[:rows], stem, nothing, nothing, 1.0, 16)
        for sequence in sequences[first : first + len(responses)]:
            layout = PrefixLayout((len(sequence.tokens),), (-1,))
            targets = sequence.tokens[prompt:]
            own = torch.arange(len(targets))
            piece = PathRows(layout, stems=(kept,))
            response = model(sequence.tokens[rows:], piece, own, targets, 1.0, 16).logprobs
            (response * _weights(len(response))).sum().backward()
            scores.append(response.detach())
        (opened.logprobs.sum() * 0.0).backward()
        kept.release()
        first += len(responses)
    return scores


def _images(
    model: ScoredModel, sequences: list[TrialSequence], layout: PrefixLayout, leaves: Sequence[int]
) -> PackedImages | None:
    """Returns the image of a microbatch, as the backend packs it; None for a model without."""
    if not model.reads_images:
        return None
    spans = []
    for leaf, sequence in zip(leaves, sequences, strict=True):
        if sequence.image is not None:
            image = sequence.image
            spans.append(layout.path_rows(leaf)[_IMAGE_START : _IMAGE_START + _IMAGE_TOKENS])
    if not spans:
        return text_only(layout, torch.device("cpu"))
    rows, first = np.unique(torch.cat(spans).numpy(), return_index=True)
    shown = ShownPatches(
        grid=_IMAGE_GRID,
        patches=image,
        rows=torch.from_numpy(rows),
        places=torch.from_numpy(first % _IMAGE_TOKENS),
    )
    merged = model.causal.config.vision_config.spatial_merge_size
    return joined_images(layout, [shown], merged, torch.device("cpu"))

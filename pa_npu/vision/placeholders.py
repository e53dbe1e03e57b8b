"""Placeholder tokens: one for each image in a rendered prompt, as many as an image has where a model reads them.

    rendered    p0 <start> i <end> p1              what the chat template and the tokenizer make
    expanded    p0 <start> i i i i <end> p1        what the model reads: i once per token of the image

Everything in this package has expanded tokens. An engine that expands by itself gets them
collapsed again, and has to come to the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Span = tuple[int, int]
"""The first placeholder of an image, and how many it has."""


def expanded(
    tokens: Sequence[int], image_token: int, lengths: Sequence[int]
) -> tuple[list[int], list[Span]]:
    """Returns the tokens with as many placeholders as each image has, and where they are.

    lengths: of each image, in order. Raises ValueError unless there is one placeholder an image.
    """
    places = [place for place, token in enumerate(tokens) if token == image_token]
    if len(places) != len(lengths):
        raise ValueError(f"{len(places)} placeholders for {len(lengths)} images")
    return expanded_at(tokens, places, lengths)


def expanded_at(
    tokens: Sequence[int], places: Sequence[int], lengths: Sequence[int]
) -> tuple[list[int], list[Span]]:
    """Returns the tokens with those at `places`, ascending, repeated `lengths` times, and where
    these are.
    """
    result: list[int] = []
    spans: list[Span] = []
    copied = 0
    for place, length in zip(places, lengths, strict=True):
        result += tokens[copied:place]
        spans.append((len(result), length))
        result += [tokens[place]] * length
        copied = place + 1
    result += tokens[copied:]
    return result, spans


def collapsed(
    tokens: npt.NDArray[np.int32], spans: Sequence[Span]
) -> tuple[npt.NDArray[np.int32], list[int]]:
    """Returns the tokens with one placeholder an image, and where these are.

    A placeholder token outside of all spans was written by the policy, and stays what it is.
    """
    parts: list[npt.NDArray[np.int32]] = []
    places: list[int] = []
    copied = removed = 0
    for start, length in spans:
        parts.append(tokens[copied : start + 1])
        places.append(start - removed)
        copied = start + length
        removed += length - 1
    parts.append(tokens[copied:])
    return np.concatenate(parts), places

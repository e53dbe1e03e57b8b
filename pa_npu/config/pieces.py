"""Which samples of a group a microbatch takes, and whether what they begin with is computed once for several.

A microbatch takes consecutive samples, up to a number of samples and of packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

MIN_SAVED_ROWS = 1024
"""What a group's pieces share is computed once, in a pass of its own, where that saves so many rows.
A pass reads every weight once more, and under fsdp gathers it, which takes about as long.
"""


def saved_rows(num_pieces: int, shared_rows: int) -> int:
    """Returns how many rows are saved where what the pieces share is computed once."""
    return max(0, num_pieces - 1) * shared_rows


def samples_of_pieces(
    lengths: Sequence[int], shared: Sequence[int], max_samples: int, max_tokens: int | None
) -> list[int]:
    """Returns the number of samples of each piece of a group.

    A piece takes the next samples as long as they fit. A sample that is longer than `max_tokens`
    goes alone.

    Args:
        lengths: tokens of each sample, its prompt included.
        shared: of each sample, the first tokens that it has in common with the one before it. They
            are packed once where both are in one piece.
        max_samples: of a piece.
        max_tokens: packed tokens of a piece; None for any number.
    """
    counts: list[int] = []
    num_tokens = 0
    for length, common in zip(lengths, shared, strict=True):
        further = length - common
        fits = max_tokens is None or num_tokens + further <= max_tokens
        if counts and counts[-1] < max_samples and fits:
            counts[-1] += 1
            num_tokens += further
        else:
            counts.append(1)
            num_tokens = length
    return counts

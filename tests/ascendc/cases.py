"""Random merges for the tests: tensors, intervals and sequences."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import torch

WIDTH = 8
Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Merge:
    """One merge: six tensors in the order of lse_merge_, the rows, and the sequences of the two
    attention calls.
    """

    tensors: Tensors
    intervals: tuple[tuple[int, int], ...]
    segments: tuple[int, ...]
    part_segments: tuple[int, ...]

    def clone(self) -> Tensors:
        out, maximum, total, part_out, part_max, part_sum = (
            tensor.clone() for tensor in self.tensors
        )
        return out, maximum, total, part_out, part_max, part_sum

    @property
    def shape(self) -> tuple[int, int, int]:
        tokens, heads, dim = self.tensors[0].shape
        return tokens, heads, dim

    @property
    def work_rows(self) -> int:
        return self.tensors[3].shape[0] * self.tensors[3].shape[1]


def random_merge(
    tokens: int, heads: int, dim: int, dtype: torch.dtype, seed: int = 0, min_rows: int = 0
) -> Merge:
    """Random values, intervals (some touching, some empty) and sequences (some empty) over `tokens`
    rows, of which at least `min_rows` are merged."""
    rng = random.Random(seed)
    rows = -1
    while rows < min_rows:
        bounds = sorted(rng.randint(0, tokens) for _ in range(2 * rng.randint(1, 4)))
        intervals = tuple(zip(bounds[::2], bounds[1::2], strict=True))
        rows = sum(end - start for start, end in intervals)
    return Merge(
        (*random_result(tokens, heads, dim, dtype), *random_result(rows, heads, dim, dtype)),
        intervals,
        _cut(tokens, rng),
        _cut(rows, rng),
    )


def random_result(rows: int, heads: int, dim: int, dtype: torch.dtype) -> Result:
    """Output, maxima and sums like those of an attention call; equal copies of each statistic."""
    out = torch.randn(rows, heads, dim).to(dtype)
    maximum = (5 * torch.randn(rows, heads, 1)).repeat(1, 1, WIDTH)
    total = (1 + 30 * torch.rand(rows, heads, 1)).repeat(1, 1, WIDTH)
    return out, maximum, total


def _cut(total: int, rng: random.Random) -> tuple[int, ...]:
    bounds = [0, *sorted(rng.randint(0, total) for _ in range(rng.randint(0, 4))), total]
    return tuple(after - before for before, after in pairwise(bounds))


def to_ntd(stats: torch.Tensor, segments: tuple[int, ...]) -> torch.Tensor:
    """The same statistics with the memory of the NTD layout: per sequence [heads, length, width]."""
    pieces = [piece.transpose(0, 1).reshape(-1) for piece in stats.split(list(segments))]
    return torch.cat(pieces).view(stats.shape)


def from_ntd(stats: torch.Tensor, segments: tuple[int, ...]) -> torch.Tensor:
    """Inverse of to_ntd."""
    _, heads, width = stats.shape
    sizes = [length * heads * width for length in segments]
    pieces = [
        piece.view(heads, length, width).transpose(0, 1)
        for piece, length in zip(stats.reshape(-1).split(sizes), segments, strict=True)
    ]
    return torch.cat(pieces)

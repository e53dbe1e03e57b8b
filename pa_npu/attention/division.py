"""Division: the rows of a packed sequence, divided among the ranks of a context group.

Every rank gets the same number of rows, and nearly the same number of pairs of a query and a key
that it sees, which is what attention costs. A long segment is cut into two pieces per rank, and
rank r gets the r-th piece from the front and the r-th from the back: within a segment the work of a
row grows linearly, so that these two pieces together cost the same on all ranks. Short segments are
dealt out whole, the largest first, to the rank that has least.

    a segment of 16 rows over 2 ranks:   rows  0 1 2 3 | 4 5 6 7 8 9 10 11 | 12 13 14 15
                                         rank     0    |         1         |      0

Cutting a segment changes nothing about its mask: the second part is the only child of the first.
The division follows from the layout alone, so that all ranks compute the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from pa_npu.attention.layout import PrefixLayout, compress
from pa_npu.attention.rows import Span

# The fullest rank over the mean, of pairs and of rows. Fewer cuts are tried first.
_MAX_WORK = 1.02
_MAX_ROWS = 1.05
# Segments with a larger share of a rank's rows or pairs are cut, from the first threshold that
# balances the ranks. 0 cuts all that have two rows per rank.
_CUT_SHARES = (0.5, 0.25, 0.12, 0.06, 0.03, 0.015, 0.008, 0.004, 0.0)


@dataclass(frozen=True, eq=False)
class Division:
    """The rows of each rank of a context group.

    layout: the packed sequence without its own padding, followed by one root per rank that holds
        the rank's padding (of any length, also 0).
    spans: of each rank, its rows of `layout`, ascending; its padding is last.
    num_rows: rows of the packed sequence, padding left out.
    rows_per_rank: rows of every rank, padding included.
    work: of each rank, the pairs of its rows and what they see, padding left out.
    """

    layout: PrefixLayout
    spans: tuple[tuple[Span, ...], ...]
    num_rows: int
    rows_per_rank: int
    work: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.spans)

    def padding(self, rank: int) -> int:
        """Returns the padding rows of a rank, which are its last ones."""
        return self.layout.lengths[len(self.layout.lengths) - self.size + rank]

    def real_rows(self, rank: int) -> int:
        """Returns the rows of a rank that are no padding."""
        return self.rows_per_rank - self.padding(rank)

    @cached_property
    def rows(self) -> torch.Tensor:
        """The row of `layout` behind each rank's rows, int64 [size, rows_per_rank]."""
        parts = []
        for spans in self.spans:
            parts.append(torch.cat([torch.arange(start, end) for start, end in spans]))
        return torch.stack(parts)

    @cached_property
    def places(self) -> torch.Tensor:
        """Inverse of `rows`: rank x rows_per_rank + number on its rank, int64 [layout.total]."""
        return self.rows.flatten().argsort()


def divide(layout: PrefixLayout, ranks: int, multiple: int = 1) -> Division:
    """Divides the rows of a packed sequence among `ranks`.

    multiple: the rows of every rank are padded to a multiple of it.
    """
    if ranks < 1 or multiple < 1:
        raise ValueError(f"ranks {ranks} and multiple {multiple} must be at least 1")
    lengths = layout.lengths
    parents = layout.parents
    if layout.padding:
        lengths = lengths[:-1]
        parents = parents[:-1]
    num_rows = sum(lengths)
    if not num_rows:
        raise ValueError("layout: there are no rows to divide, only padding")
    dealt = _deal(compress(PrefixLayout(lengths, parents)), ranks)
    fullest = max(dealt.rows)
    rows_per_rank = -(-fullest // multiple) * multiple
    paddings = tuple(rows_per_rank - rows for rows in dealt.rows)
    whole = PrefixLayout((*lengths, *paddings), (*parents, *(-1 for _ in paddings)))
    spans = []
    for rank, own in enumerate(dealt.spans):
        start = whole.starts[len(lengths) + rank]
        spans.append(_joined([*sorted(own), (start, start + paddings[rank])]))
    return Division(
        layout=whole,
        spans=tuple(spans),
        num_rows=num_rows,
        rows_per_rank=rows_per_rank,
        work=tuple(dealt.work),
    )


class _Dealt:
    """The spans that each rank has so far."""

    def __init__(self, ranks: int, mean_rows: float, mean_work: float) -> None:
        self.spans: list[list[Span]] = [[] for _ in range(ranks)]
        self.rows = [0] * ranks
        self.work = [0] * ranks
        self._mean_rows = mean_rows
        self._mean_work = mean_work

    def give(self, rank: int, start: int, end: int, offset: int) -> None:
        """Gives rows [start, end) to a rank. offset: of the first of them in its sequence."""
        if start == end:
            return
        self.spans[rank].append((start, end))
        self.rows[rank] += end - start
        self.work[rank] += num_pairs(end - start, offset)

    def load_with(self, rank: int, rows: int, work: int) -> tuple[float, int]:
        """Returns how full the rank would be, as a share of the mean; of two equal ones the first
        is emptier.
        """
        of_rows = (self.rows[rank] + rows) / self._mean_rows
        of_work = (self.work[rank] + work) / self._mean_work
        return max(of_rows, of_work), rank

    @property
    def worst_rows(self) -> float:
        return max(self.rows) / self._mean_rows

    @property
    def worst_work(self) -> float:
        return max(self.work) / self._mean_work


def num_pairs(rows: int, offset: int) -> int:
    """Returns the pairs of `rows` consecutive rows and what they see; the first sees `offset` + 1."""
    return rows * offset + rows * (rows + 1) // 2


def _deal(layout: PrefixLayout, ranks: int) -> _Dealt:
    """Deals out the segments, with as few cuts as balance the ranks."""
    works = [
        num_pairs(length, offset)
        for length, offset in zip(layout.lengths, layout.offsets, strict=True)
    ]
    best: tuple[float, _Dealt] | None = None
    for share in _CUT_SHARES:
        dealt = _dealt_with(layout, works, ranks, share)
        excess = max(
            (dealt.worst_work - 1.0) / (_MAX_WORK - 1.0),
            (dealt.worst_rows - 1.0) / (_MAX_ROWS - 1.0),
        )
        if best is None or excess < best[0]:
            best = (excess, dealt)
        if excess <= 1.0:
            break
    assert best is not None, "there is a share"
    return best[1]


def _dealt_with(layout: PrefixLayout, works: Sequence[int], ranks: int, share: float) -> _Dealt:
    """Cuts the segments that have more than `share` of a rank's rows or pairs, and deals out all."""
    mean_rows = layout.total / ranks
    mean_work = sum(works) / ranks
    dealt = _Dealt(ranks, mean_rows, mean_work)
    whole: list[tuple[float, int]] = []
    for segment, length in enumerate(layout.lengths):
        size = max(length / mean_rows, works[segment] / mean_work)
        if size > share and length >= 2 * ranks:
            _cut(dealt, layout, segment, ranks)
        elif length:
            whole.append((-size, segment))
    for _, segment in sorted(whole):
        length = layout.lengths[segment]
        work = works[segment]
        _, rank = min(dealt.load_with(rank, length, work) for rank in range(ranks))
        start = layout.starts[segment]
        dealt.give(rank, start, start + length, layout.offsets[segment])
    return dealt


def _cut(dealt: _Dealt, layout: PrefixLayout, segment: int, ranks: int) -> None:
    """Cuts a segment into two pieces per rank, and gives each rank one from the front and one from
    the back. Ranks that have less so far come first where the pieces differ by a row.
    """
    start = layout.starts[segment]
    length = layout.lengths[segment]
    offset = layout.offsets[segment]
    pieces = 2 * ranks
    bounds = [length * piece // pieces for piece in range(pieces + 1)]
    sizes = []
    for piece in range(ranks):
        back = pieces - 1 - piece
        rows = bounds[piece + 1] - bounds[piece] + bounds[back + 1] - bounds[back]
        sizes.append((-rows, piece))
    by_load = sorted(range(ranks), key=lambda rank: dealt.load_with(rank, 0, 0))
    for rank, (_, piece) in zip(by_load, sorted(sizes), strict=True):
        for part in (piece, pieces - 1 - piece):
            first = bounds[part]
            dealt.give(rank, start + first, start + bounds[part + 1], offset + first)


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Returns ascending spans with adjacent ones joined and empty ones left out."""
    joined: list[Span] = []
    for start, end in spans:
        if start == end:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return tuple(joined)

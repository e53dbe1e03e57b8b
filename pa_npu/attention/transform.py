"""Rewrites of a PrefixLayout that keep its mask, positions and row order: split, compress and shard."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pa_npu.attention.layout import PrefixLayout


@dataclass(frozen=True)
class Sharding:
    """A layout cut finely enough to be divided, and the rank that computes the queries of each segment.

    A rank needs its own queries, and keys and values of all rows (all-gather), or of the ancestors of its segments.
    """

    layout: PrefixLayout
    owners: tuple[int, ...]

    def segments(self, rank: int) -> tuple[int, ...]:
        """The segments whose queries belong to the rank."""
        return tuple(segment for segment, owner in enumerate(self.owners) if owner == rank)

    def rows(self, rank: int) -> torch.Tensor:
        """int64 [rows of the rank]: its query rows, ascending."""
        layout = self.layout
        spans = [torch.arange(layout.starts[s], layout.ends[s]) for s in self.segments(rank)]
        return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)

    def pairs(self, rank: int) -> int:
        """(query, key) pairs the rank computes."""
        layout = self.layout
        return sum(_pairs(layout.lengths[s], layout.offsets[s]) for s in self.segments(rank))


def split(layout: PrefixLayout, rows: Iterable[int]) -> PrefixLayout:
    """Cut segments before the given rows: each piece becomes the only child of the one before it.

    Raises ValueError for a row outside of the layout.
    """
    cuts = sorted(set(rows))
    if cuts and not 0 <= cuts[0] <= cuts[-1] <= layout.total:
        bad = cuts[0] if cuts[0] < 0 else cuts[-1]
        raise ValueError(f"split: row {bad} is outside of the layout's {layout.total} rows")
    lengths: list[int] = []
    parents: list[int] = []
    last_piece: list[int] = []  # of each old segment, in new numbering
    for segment, (start, end) in enumerate(zip(layout.starts, layout.ends, strict=True)):
        is_padding = layout.padding > 0 and segment == len(layout.lengths) - 1
        inside = [] if is_padding else cuts[bisect.bisect_right(cuts, start) : bisect.bisect_left(cuts, end)]
        parent = last_piece[layout.parents[segment]] if layout.parents[segment] >= 0 else -1
        for first, stop in zip([start, *inside], [*inside, end], strict=True):
            lengths.append(stop - first)
            parents.append(parent)
            parent = len(lengths) - 1
        last_piece.append(parent)
    return PrefixLayout(tuple(lengths), tuple(parents), layout.padding)


def compress(layout: PrefixLayout) -> PrefixLayout:
    """Merge only children into their parents and drop empty segments that have children; leaves stay as they are."""
    num_children = [0] * len(layout.lengths)
    for parent in layout.parents:
        if parent >= 0:
            num_children[parent] += 1
    # An empty inner segment vanishes and its children move up to its parent, which may then have more than one child.
    effective_parent: list[int] = []
    for parent in layout.parents:
        while parent >= 0 and layout.lengths[parent] == 0:
            parent = effective_parent[parent]
        effective_parent.append(parent)
    kept = [length > 0 or not children for length, children in zip(layout.lengths, num_children, strict=True)]
    children_kept = [0] * len(layout.lengths)
    for segment, parent in enumerate(effective_parent):
        if parent >= 0 and kept[segment]:
            children_kept[parent] += 1

    lengths: list[int] = []
    parents: list[int] = []
    renumbered: list[int] = []
    for segment, length in enumerate(layout.lengths):
        parent = effective_parent[segment]
        if not kept[segment]:
            renumbered.append(-1)  # nobody's effective parent
        elif parent >= 0 and children_kept[parent] == 1:
            renumbered.append(renumbered[parent])
            lengths[renumbered[segment]] += length
        else:
            renumbered.append(len(lengths))
            lengths.append(length)
            parents.append(renumbered[parent] if parent >= 0 else -1)
    return PrefixLayout(tuple(lengths), tuple(parents), layout.padding)


def shard(layout: PrefixLayout, ranks: int, block: int = 128) -> Sharding:
    """Divide the query rows among `ranks`, each computing about as many pairs (context parallel).

    Cuts segments into blocks of at most `block` rows; the dearest block left goes to the least loaded rank.
    """
    if ranks < 1 or block < 1:
        raise ValueError(f"shard: ranks {ranks} and block {block} must be at least 1")
    cuts = [
        row for start, end in zip(layout.starts, layout.ends, strict=True) for row in range(start + block, end, block)
    ]
    pieces = split(layout, cuts)
    costs = [_pairs(length, offset) for length, offset in zip(pieces.lengths, pieces.offsets, strict=True)]
    loads = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(costs)
    for segment in sorted(range(len(costs)), key=lambda s: (-costs[s], s)):
        load, rank = heapq.heappop(loads)
        owners[segment] = rank
        heapq.heappush(loads, (load + costs[segment], rank))
    return Sharding(pieces, tuple(owners))


def _pairs(length: int, offset: int) -> int:
    return length * (length + 1) // 2 + length * offset

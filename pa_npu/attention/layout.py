"""PrefixLayout: which tokens of one packed sequence see which others.

Packed tokens are cut into a forest of segments with parents, in depth-first order. A token attends
to all tokens of its segment's ancestors and causally to its own segment. A shared prompt is a root
with one child per response; several groups are several roots; separate sequences are roots without
children; a segment cut in two is a parent with an only child, so merging only children never
changes the mask, the positions or the order of the rows.

    group (P=4, R=[2, 3]):   lengths (4, 2, 3)  parents (-1, 0, 0)
    rows       0 1 2 3 | 4 5 | 6 7 8
    positions  0 1 2 3 | 4 5 | 4 5 6
    predictors - 0 1 2 | 3 4 | 3 6 7

The prompt's last row predicts the first token of every response. What kernels compute for a layout
is planned in pa_npu.attention.plans.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import index as as_integer
from typing import Any

import torch

from pa_npu.attention.kept import KeepsTensors


@dataclass(frozen=True)
class PrefixLayout(KeepsTensors):
    """Immutable host-side description of one packed sequence of `total` tokens.

    lengths: tokens of each segment; zero is allowed.
    parents: index of each segment's parent, -1 for a root. Segments are in depth-first order: a
        parent comes before its children, and a subtree is contiguous.
    padding: tokens at the end that stand for nothing (see `pad`). The last segment is then a root
        of that length.

    Raises ValueError naming the first offending segment. Returned tensors are cached per device: do
    not write to them.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    padding: int = 0
    _cache: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", _integers("length", self.lengths))
        object.__setattr__(self, "parents", _integers("parent", self.parents))
        _check(self.lengths, self.parents, self.padding)

    def __reduce__(self) -> tuple[type[PrefixLayout], tuple[tuple[int, ...], tuple[int, ...], int]]:
        # without the cache
        return PrefixLayout, (self.lengths, self.parents, self.padding)

    # Constructors

    @classmethod
    def from_groups(cls, groups: Iterable[tuple[int, Sequence[int]]]) -> PrefixLayout:
        """Lays out groups of (prompt length, response lengths), one after another.

        Each prompt comes before its responses.
        """
        lengths: list[int] = []
        parents: list[int] = []
        for prompt, responses in groups:
            root = len(lengths)
            lengths += [prompt, *responses]
            parents += [-1] + [root] * len(responses)
        return cls(tuple(lengths), tuple(parents))

    @classmethod
    def from_sequences(cls, lengths: Iterable[int]) -> PrefixLayout:
        """Lays out separate sequences that see nothing of each other."""
        lengths = tuple(lengths)
        return cls(lengths, (-1,) * len(lengths))

    # Derived structure, one entry per segment

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First row of each segment."""
        starts = []
        row = 0
        for length in self.lengths:
            starts.append(row)
            row += length
        return tuple(starts)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Row after the last of each segment."""
        return tuple(
            start + length for start, length in zip(self.starts, self.lengths, strict=True)
        )

    @cached_property
    def subtree_ends(self) -> tuple[int, ...]:
        """Row after the last descendant of each segment.

        Rows [end, subtree_end) are exactly its descendants.
        """
        ends = list(self.ends)
        for segment in range(len(ends) - 1, -1, -1):
            parent = self.parents[segment]
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[segment])
        return tuple(ends)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Position of each segment's first token: the total length of its ancestors."""
        offsets: list[int] = []
        for parent in self.parents:
            offsets.append(offsets[parent] + self.lengths[parent] if parent >= 0 else 0)
        return tuple(offsets)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Number of ancestors of each segment."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return tuple(depths)

    @cached_property
    def longest(self) -> int:
        """Length of the longest sequence, shared part included."""
        return max(
            offset + length for offset, length in zip(self.offsets, self.lengths, strict=True)
        )

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        """Segments without children, padding excluded: one per sequence."""
        inner = set(self.parents)
        last = len(self.lengths) - 1 if self.padding else len(self.lengths)
        return tuple(segment for segment in range(last) if segment not in inner)

    def path(self, segment: int) -> tuple[int, ...]:
        """Returns the segment and its ancestors, from the root downwards."""
        path = []
        while segment >= 0:
            path.append(segment)
            segment = self.parents[segment]
        return tuple(reversed(path))

    # Counts

    @property
    def total(self) -> int:
        """Number of rows, padding included."""
        return self.ends[-1]

    # Tensors, one entry per row

    def position_ids(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Returns the position of every token inside its own sequence, int64 [total].

        A segment continues after the last token of its parent.
        """

        def build() -> torch.Tensor:
            shifts = torch.tensor(
                [start - offset for start, offset in zip(self.starts, self.offsets, strict=True)]
            )
            return torch.arange(self.total) - shifts.repeat_interleave(torch.tensor(self.lengths))

        return self.tensor("position_ids", device, build)

    def predictor_rows(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Returns the row whose hidden state predicts each token, int64 [total].

        It is -1 for a root's first token and for padding.
        """

        def build() -> torch.Tensor:
            rows = torch.arange(-1, self.total - 1)
            last_rows: list[int] = []  # last row of each segment's path
            for segment, parent in enumerate(self.parents):
                last_row = last_rows[parent] if parent >= 0 else -1
                if self.lengths[segment]:
                    rows[self.starts[segment]] = last_row
                    last_row = self.ends[segment] - 1
                last_rows.append(last_row)
            if self.padding:
                rows[-self.padding :] = -1
            return rows

        return self.tensor("predictor_rows", device, build)

    def path_rows(self, segment: int) -> torch.Tensor:
        """Returns the rows of the sequence that ends in this segment, int64 [offset + length]."""
        return torch.cat([torch.arange(self.starts[s], self.ends[s]) for s in self.path(segment)])

    def dense_mask(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Returns bool [total, total], True where the row attends to the column.

        It is for tests and the dense reference, and not cached.
        """
        mask = torch.zeros(self.total, self.total, dtype=torch.bool, device=device)
        for segment, length in enumerate(self.lengths):
            start = self.starts[segment]
            end = self.ends[segment]
            causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
            mask[start:end, start:end] = causal
            mask[end : self.subtree_ends[segment], start:end] = True
        return mask

    def pad(self, multiple: int) -> PrefixLayout:
        """Returns a layout whose total is a multiple of `multiple`.

        The pad tokens form a root of their own at the end, which no other token sees.
        """
        if multiple < 1:
            raise ValueError(f"pad: multiple {multiple} must be at least 1")
        missing = -self.total % multiple
        if not missing:
            return self
        if self.padding:
            raise ValueError(
                f"pad: the layout already ends in {self.padding} pad tokens; pad the layout it "
                "came from"
            )
        return PrefixLayout((*self.lengths, missing), (*self.parents, -1), padding=missing)


def _integers(field_name: str, values: Iterable[int]) -> tuple[int, ...]:
    checked = []
    for segment, value in enumerate(values):
        try:
            checked.append(as_integer(value))
        except TypeError:
            raise ValueError(
                f"segment {segment}: {field_name} {value!r} must be an integer"
            ) from None
    return tuple(checked)


def _check(lengths: tuple[int, ...], parents: tuple[int, ...], padding: int) -> None:
    if len(lengths) != len(parents):
        raise ValueError(
            f"segment {min(len(lengths), len(parents))}: {len(lengths)} lengths for {len(parents)} "
            "parents"
        )
    if not lengths:
        raise ValueError("segment 0: a layout needs at least one segment")
    for segment, (length, parent) in enumerate(zip(lengths, parents, strict=True)):
        if length < 0:
            raise ValueError(f"segment {segment}: length {length} must not be negative")
        if not -1 <= parent < segment:
            raise ValueError(f"segment {segment}: parent {parent} must be -1 or an earlier segment")
        # In depth-first order the parent is on the path that the last segment ended.
        open_segment = segment - 1
        while open_segment > parent:
            open_segment = parents[open_segment]
        if open_segment != parent and parent >= 0:
            raise ValueError(
                f"segment {segment}: parent {parent} is not an ancestor of segment {segment - 1}; "
                "list segments in depth-first order"
            )
    if padding and (padding != lengths[-1] or parents[-1] != -1):
        raise ValueError(
            f"segment {len(lengths) - 1}: padding {padding} needs a last segment that is a root of "
            f"that length, not length {lengths[-1]} with parent {parents[-1]}"
        )


def compress(layout: PrefixLayout) -> PrefixLayout:
    """Returns a layout of the same attention in fewer segments.

    Only children are merged into their parents, and empty inner segments are dropped.
    """
    num_children = [0] * len(layout.lengths)
    for parent in layout.parents:
        if parent >= 0:
            num_children[parent] += 1
    # An empty inner segment vanishes and its children move up to its parent, which may then have
    # more than one child.
    effective_parent: list[int] = []
    for parent in layout.parents:
        while parent >= 0 and layout.lengths[parent] == 0:
            parent = effective_parent[parent]
        effective_parent.append(parent)
    kept = [
        length > 0 or not children
        for length, children in zip(layout.lengths, num_children, strict=True)
    ]
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
            renumbered.append(-1)  # it is no segment's effective parent
        elif parent >= 0 and children_kept[parent] == 1:
            renumbered.append(renumbered[parent])
            lengths[renumbered[segment]] += length
        else:
            renumbered.append(len(lengths))
            lengths.append(length)
            parents.append(renumbered[parent] if parent >= 0 else -1)
    return PrefixLayout(tuple(lengths), tuple(parents), padding=layout.padding)

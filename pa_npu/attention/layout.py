"""PrefixLayout: which tokens of one packed sequence see which others, and the varlen kernel calls that it turns into.

Packed tokens are cut into a forest of segments with parents, in depth-first order. A token attends
to all tokens of its segment's ancestors and causally to its own segment. A shared prompt is a root
with one child per response; several groups are several roots; separate sequences are roots without
children; a segment cut in two is a parent with an only child, so merging only children never
changes the mask, the positions or the order of the rows.

    group (P=4, R=[2, 3]):   lengths (4, 2, 3)  parents (-1, 0, 0)
    rows       0 1 2 3 | 4 5 | 6 7 8
    positions  0 1 2 3 | 4 5 | 4 5 6
    predictors - 0 1 2 | 3 4 | 3 6 7      (the prompt's last row predicts the first token of every response)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from operator import index as as_integer
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class PrefixLayout:
    """Immutable host-side description of one packed sequence of `total` tokens.

    lengths: tokens of each segment; zero is allowed.
    parents: index of each segment's parent, -1 for a root. Segments are in depth-first order (a
    parent comes before its
        children, a subtree is contiguous).
    padding: tokens at the end that stand for nothing (see `pad`); then the last segment is a root
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
        return PrefixLayout, (self.lengths, self.parents, self.padding)  # caches stay behind

    # Constructors

    @classmethod
    def from_groups(cls, groups: Iterable[tuple[int, Sequence[int]]]) -> PrefixLayout:
        """Groups of (prompt length, response lengths), packed one after another, each prompt before
        its responses.
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
        """Separate sequences that see nothing of each other."""
        lengths = tuple(lengths)
        return cls(lengths, (-1,) * len(lengths))

    # Derived structure, one entry per segment

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First row of each segment."""
        starts, row = [], 0
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
        """Row after the last descendant of each segment; rows [end, subtree_end) are exactly its
        descendants.
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
        """The segment and its ancestors, from the root downwards."""
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
        """int64 [total]: position inside the token's own sequence; it restarts after the parent's
        last token.
        """

        def build() -> torch.Tensor:
            shift = torch.tensor(
                [start - offset for start, offset in zip(self.starts, self.offsets, strict=True)]
            )
            return torch.arange(self.total) - shift.repeat_interleave(torch.tensor(self.lengths))

        return self.tensor("position_ids", device, build)

    def predictor_rows(self, device: torch.device | str | None = None) -> torch.Tensor:
        """int64 [total]: the row whose hidden state predicts the token; -1 for a root's first token
        and for padding.
        """

        def build() -> torch.Tensor:
            rows = torch.arange(-1, self.total - 1)
            last_row: list[int] = []  # last row of each segment's path
            for segment, (length, parent) in enumerate(
                zip(self.lengths, self.parents, strict=True)
            ):
                inherited = last_row[parent] if parent >= 0 else -1
                if length:
                    rows[self.starts[segment]] = inherited
                last_row.append(self.ends[segment] - 1 if length else inherited)
            if self.padding:
                rows[-self.padding :] = -1
            return rows

        return self.tensor("predictor_rows", device, build)

    def path_rows(self, segment: int) -> torch.Tensor:
        """int64 [offset + length]: the rows of the sequence that ends in this segment, in order."""
        return torch.cat([torch.arange(self.starts[s], self.ends[s]) for s in self.path(segment)])

    def dense_mask(self, device: torch.device | str | None = None) -> torch.Tensor:
        """bool [total, total], True where row attends to column.

        For tests and the dense reference; not cached.
        """
        mask = torch.zeros(self.total, self.total, dtype=torch.bool, device=device)
        for length, start, end, below in zip(
            self.lengths, self.starts, self.ends, self.subtree_ends, strict=True
        ):
            mask[start:end, start:end] = torch.ones(
                length, length, dtype=torch.bool, device=device
            ).tril()
            mask[end:below, start:end] = True
        return mask

    def tensor(
        self, name: str, device: torch.device | str | None, build: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """The tensor `name` on `device`, built on the host once and copied to each device once."""
        host = self.cached(name, build)
        device = torch.device("cpu" if device is None else device)
        return (
            host if device.type == "cpu" else self.cached((name, device), lambda: host.to(device))
        )

    def cached(self, key: Hashable, build: Callable[[], T]) -> T:
        """Return what `build` returns, made once and kept as long as the layout; attention keeps
        its plans here.
        """
        if key not in self._cache:
            self._cache[key] = build()
        return self._cache[key]

    def pad(self, multiple: int) -> PrefixLayout:
        """A layout whose total is a multiple: pad tokens form a root of their own at the end, seen
        by nobody else.
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
        return PrefixLayout((*self.lengths, missing), (*self.parents, -1), missing)


def _integers(what: str, values: Iterable[int]) -> tuple[int, ...]:
    checked = []
    for segment, value in enumerate(values):
        try:
            checked.append(as_integer(value))
        except TypeError:
            raise ValueError(f"segment {segment}: {what} {value!r} must be an integer") from None
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
        # depth-first order: the parent is on the path that the last segment ended
        open_segment = segment - 1
        while open_segment > parent:
            open_segment = parents[open_segment]
        if open_segment != parent and parent >= 0:
            raise ValueError(
                f"segment {segment}: parent {parent} is not an ancestor of segment {segment - 1}; "
                f"list segments in depth-first order"
            )
    if padding and (padding != lengths[-1] or parents[-1] != -1):
        raise ValueError(
            f"segment {len(lengths) - 1}: padding {padding} needs a last segment that is a root of "
            f"that length, not length {lengths[-1]} with parent {parents[-1]}"
        )


Span = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Rows:
    """Packed rows as ascending spans; a single span is taken as a view, several by an index cached
    per device.
    """

    spans: tuple[Span, ...]
    _index: dict[torch.device, torch.Tensor] = field(default_factory=dict, init=False, repr=False)

    @staticmethod
    def of(spans: Sequence[Span]) -> Rows:
        """Rows of the non-empty spans, adjacent ones joined."""
        joined: list[Span] = []
        for start, end in spans:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], end)
            elif end > start:
                joined.append((start, end))
        return Rows(tuple(joined))

    @property
    def span(self) -> Span | None:
        """The only span, if there is just one."""
        return self.spans[0] if len(self.spans) == 1 else None

    def index(self, device: torch.device) -> torch.Tensor:
        """int64 [rows] on the device."""
        if device not in self._index:
            host = torch.cat([torch.arange(start, end) for start, end in self.spans])
            self._index[device] = host.to(device)
        return self._index[device]

    def take(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """These rows of x along dim: a view if they are one span."""
        if self.span is not None:
            return x.narrow(dim, self.span[0], self.span[1] - self.span[0])
        return x.index_select(dim, self.index(x.device))

    def put_(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Overwrite these rows of x."""
        if self.span is not None:
            x[self.span[0] : self.span[1]].copy_(rows)
        else:
            x.index_copy_(0, self.index(x.device), rows)

    def add_(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Add to these rows of x; rows are distinct unless spans overlap."""
        if self.span is not None:
            x[self.span[0] : self.span[1]].add_(rows)
        else:
            x.index_add_(0, self.index(x.device), rows.to(x.dtype))


@dataclass(frozen=True, eq=False)
class Run:
    """`count` consecutive sequences of a call with the same lengths; they start at packed rows
    q_start and k_start.
    """

    count: int
    q_start: int
    q_length: int
    k_start: int
    k_length: int

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, kv_heads, head_dim] -> [count, kv_heads, k_length, head_dim], a view."""
        x = x.narrow(0, self.k_start, self.count * self.k_length)
        return x.unflatten(0, (self.count, self.k_length)).transpose(1, 2)


@dataclass(frozen=True, eq=False)
class VarlenCall:
    """One variable-length attention call on packed tensors: query sequence i sees key sequence i
    and nothing else.

    causal: bottom-right aligned, the last query sees all keys; then no query sequence is longer
    than its keys. No sequence has length zero.
    """

    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    causal: bool
    _tensors: dict[tuple[str, torch.device], torch.Tensor] = field(
        default_factory=dict, init=False, repr=False
    )

    @cached_property
    def q_ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.q_lengths))

    @cached_property
    def k_ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.k_lengths))

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Consecutive sequences of equal lengths, which a kernel without varlen support takes as
        one batch.
        """
        runs: list[Run] = []
        q_start = k_start = 0
        for q_length, k_length in zip(self.q_lengths, self.k_lengths, strict=True):
            last = runs[-1] if runs else None
            if last is not None and (last.q_length, last.k_length) == (q_length, k_length):
                runs[-1] = Run(last.count + 1, last.q_start, q_length, last.k_start, k_length)
            else:
                runs.append(Run(1, q_start, q_length, k_start, k_length))
            q_start += q_length
            k_start += k_length
        return tuple(runs)

    def cumulative(self, side: str, device: torch.device) -> torch.Tensor:
        """int32 [sequences + 1] with a leading 0; side is "q" or "k"."""
        ends = self.q_ends if side == "q" else self.k_ends
        return self.tensor(side, device, lambda: torch.tensor((0, *ends), dtype=torch.int32))

    def tensor(
        self, name: str, device: torch.device, build: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """An index tensor that belongs to the call, built once and copied to each device once."""
        if (name, device) not in self._tensors:
            self._tensors[name, device] = build().to(device)
        return self._tensors[name, device]


@dataclass(frozen=True, eq=False)
class CrossCall:
    """Queries below some segments against those segments' keys, all of them visible."""

    q_rows: Rows
    k_rows: Rows
    call: VarlenCall


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """One causal call over all segments, then cross calls whose results are merged into it by
    log-sum-exp.

    k_rows: rows that the call takes as its keys, path after path, so that a shared row occurs
    several times; None: all as they are. Without k_rows every key row is in the call and in at most
    one cross call, so the gradient of a key is a sum of two terms.
    """

    call: VarlenCall
    k_rows: Rows | None = None
    crosses: tuple[CrossCall, ...] = ()


def merge_plan(layout: PrefixLayout, per_depth: bool) -> AttentionPlan:
    """The queries of each segment against its own keys, and what is below a segment against that
    one's; kept with the layout.

    per_depth: one cross call per depth, for devices where a launch is dear and gathering rows is
    cheap; else one per inner segment, whose rows are views.
    """
    return layout.cached(
        ("merge_plan", per_depth), lambda: _build_merge_plan(compress(layout), per_depth)
    )


def _build_merge_plan(layout: PrefixLayout, per_depth: bool) -> AttentionPlan:
    lengths = tuple(length for length in layout.lengths if length)
    inner = [
        s for s, end in enumerate(layout.ends) if layout.starts[s] < end < layout.subtree_ends[s]
    ]
    batches: dict[int, list[int]] = {}
    for segment in inner:
        batches.setdefault(layout.depths[segment] if per_depth else segment, []).append(segment)
    crosses = []
    for _, segments in sorted(batches.items()):
        q_spans = [(layout.ends[s], layout.subtree_ends[s]) for s in segments]
        k_spans = [(layout.starts[s], layout.ends[s]) for s in segments]
        call = VarlenCall(_lengths(q_spans), _lengths(k_spans), causal=False)
        crosses.append(CrossCall(Rows.of(q_spans), Rows.of(k_spans), call))
    return AttentionPlan(VarlenCall(lengths, lengths, causal=True), None, tuple(crosses))


def gather_plan(layout: PrefixLayout) -> AttentionPlan:
    """The queries of each segment against the keys of its whole path, gathered, bottom-right
    causal; kept with the layout.
    """
    return layout.cached("gather_plan", lambda: _build_gather_plan(compress(layout)))


def _build_gather_plan(layout: PrefixLayout) -> AttentionPlan:
    segments = [segment for segment, length in enumerate(layout.lengths) if length]
    spans = [(layout.starts[s], layout.ends[s]) for s in segments]
    paths = [
        [(layout.starts[a], layout.ends[a]) for a in layout.path(s) if layout.lengths[a]]
        for s in segments
    ]
    shared = any(len(path) > 1 for path in paths)
    k_rows = Rows(tuple(span for path in paths for span in path)) if shared else None
    k_lengths = tuple(layout.offsets[s] + layout.lengths[s] for s in segments)
    return AttentionPlan(VarlenCall(_lengths(spans), k_lengths, causal=True), k_rows)


def compress(layout: PrefixLayout) -> PrefixLayout:
    """The same attention in fewer segments: only children are merged into their parents and empty
    inner segments dropped.
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
            renumbered.append(-1)  # nobody's effective parent
        elif parent >= 0 and children_kept[parent] == 1:
            renumbered.append(renumbered[parent])
            lengths[renumbered[segment]] += length
        else:
            renumbered.append(len(lengths))
            lengths.append(length)
            parents.append(renumbered[parent] if parent >= 0 else -1)
    return PrefixLayout(tuple(lengths), tuple(parents), layout.padding)


def _lengths(spans: Sequence[Span]) -> tuple[int, ...]:
    return tuple(end - start for start, end in spans)

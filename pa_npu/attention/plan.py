"""The varlen kernel calls that a layout turns into, device-neutral: MergePlan and GatherPlan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch

from pa_npu.attention.layout import PrefixLayout

Span = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Rows:
    """Packed rows as ascending spans; a single span is taken as a view, several by an index cached per device."""

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

    def put_(self, x: torch.Tensor, rows: torch.Tensor, dim: int = 0) -> None:
        """Overwrite these rows of x along dim."""
        if self.span is not None:
            x.narrow(dim, self.span[0], self.span[1] - self.span[0]).copy_(rows)
        else:
            x.index_copy_(dim, self.index(x.device), rows)

    def add_(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Add to these rows of x; rows are distinct unless spans overlap."""
        if self.span is not None:
            x[self.span[0] : self.span[1]].add_(rows)
        else:
            x.index_add_(0, self.index(x.device), rows.to(x.dtype))


@dataclass(frozen=True, eq=False)
class Run:
    """`count` consecutive sequences of a call with the same lengths; they start at packed rows q_start and k_start."""

    count: int
    q_start: int
    q_length: int
    k_start: int
    k_length: int


@dataclass(frozen=True, eq=False)
class VarlenCall:
    """One variable-length attention call on packed tensors: query sequence i sees key sequence i and nothing else.

    causal: bottom-right aligned, the last query sees all keys; then no query sequence is longer than its keys.
    No sequence has length zero.
    """

    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    causal: bool
    _tensors: dict[tuple[str, torch.device], torch.Tensor] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def q_ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.q_lengths))

    @cached_property
    def k_ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.k_lengths))

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Consecutive sequences of equal lengths, which a kernel without varlen support takes as one batch."""
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

    def tensor(self, name: str, device: torch.device, build: Callable[[], torch.Tensor]) -> torch.Tensor:
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
class MergePlan:
    """One causal call over all segments, then cross calls whose results are merged into it by log-sum-exp.

    Every key row is in the causal call and in at most one cross call, so the gradient of a key is a sum of two terms.
    """

    causal: VarlenCall
    crosses: tuple[CrossCall, ...]


@dataclass(frozen=True, eq=False)
class GatherPlan:
    """One bottom-right causal call: the queries of each segment against the keys of its whole path, gathered.

    k_rows: path after path, so that a shared row occurs several times; None where nothing is shared.
    """

    k_rows: Rows | None
    call: VarlenCall


def merge_plan(layout: PrefixLayout, per_depth: bool) -> MergePlan:
    """The plan, kept with the layout.

    per_depth: one cross call per depth, for devices where a launch is dear and gathering rows is cheap; else one per
    inner segment, whose rows are views.
    """
    return layout.cached(("merge_plan", per_depth), lambda: _build_merge_plan(compress(layout), per_depth))


def _build_merge_plan(layout: PrefixLayout, per_depth: bool) -> MergePlan:
    lengths = tuple(length for length in layout.lengths if length)
    inner = [s for s, end in enumerate(layout.ends) if layout.starts[s] < end < layout.subtree_ends[s]]
    batches: dict[int, list[int]] = {}
    for segment in inner:
        batches.setdefault(layout.depths[segment] if per_depth else segment, []).append(segment)
    crosses = []
    for _, segments in sorted(batches.items()):
        q_spans = [(layout.ends[s], layout.subtree_ends[s]) for s in segments]
        k_spans = [(layout.starts[s], layout.ends[s]) for s in segments]
        call = VarlenCall(_lengths(q_spans), _lengths(k_spans), causal=False)
        crosses.append(CrossCall(Rows.of(q_spans), Rows.of(k_spans), call))
    return MergePlan(VarlenCall(lengths, lengths, causal=True), tuple(crosses))


def gather_plan(layout: PrefixLayout) -> GatherPlan:
    """The plan, kept with the layout."""
    return layout.cached("gather_plan", lambda: _build_gather_plan(compress(layout)))


def _build_gather_plan(layout: PrefixLayout) -> GatherPlan:
    segments = [segment for segment, length in enumerate(layout.lengths) if length]
    spans = [(layout.starts[s], layout.ends[s]) for s in segments]
    paths = [[(layout.starts[a], layout.ends[a]) for a in layout.path(s) if layout.lengths[a]] for s in segments]
    shared = any(len(path) > 1 for path in paths)
    k_rows = Rows(tuple(span for path in paths for span in path)) if shared else None
    k_lengths = tuple(layout.offsets[s] + layout.lengths[s] for s in segments)
    return GatherPlan(k_rows, VarlenCall(_lengths(spans), k_lengths, causal=True))


def compress(layout: PrefixLayout) -> PrefixLayout:
    """The same attention in fewer segments: only children are merged into their parents and empty inner segments dropped."""
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


def _lengths(spans: Sequence[Span]) -> tuple[int, ...]:
    return tuple(end - start for start, end in spans)

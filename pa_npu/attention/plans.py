"""AttentionPlan: the variable-length kernel calls that a PrefixLayout turns into.

The plans of a layout, one per form of attention, are made once and kept with it, since all layers
of a model use the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch

from pa_npu.attention.layout import PrefixLayout, compress
from pa_npu.attention.rows import Rows, Span


@dataclass(frozen=True, eq=False)
class Run:
    """`count` consecutive sequences of a call that have the same lengths.

    They start at the packed rows q_start and k_start.
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
    """One variable-length attention call on packed tensors.

    Query sequence i sees key sequence i and nothing else. No sequence has length zero.

    causal: aligned bottom-right, so that the last query sees all keys. Then no query sequence is
        longer than its keys.
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
        """Consecutive sequences of equal lengths.

        A kernel without varlen support takes each run as one batch.
        """
        runs: list[Run] = []
        q_start = 0
        k_start = 0
        for q_length, k_length in zip(self.q_lengths, self.k_lengths, strict=True):
            last = runs[-1] if runs else None
            if last is not None and (last.q_length, last.k_length) == (q_length, k_length):
                runs[-1] = replace(last, count=last.count + 1)
            else:
                run = Run(
                    count=1,
                    q_start=q_start,
                    q_length=q_length,
                    k_start=k_start,
                    k_length=k_length,
                )
                runs.append(run)
            q_start += q_length
            k_start += k_length
        return tuple(runs)

    def cumulative(self, side: str, device: torch.device) -> torch.Tensor:
        """Returns the cumulative lengths with a leading 0, int32 [sequences + 1].

        side: "q" or "k".
        """
        ends = self.q_ends if side == "q" else self.k_ends
        return self.tensor(side, device, lambda: torch.tensor((0, *ends), dtype=torch.int32))

    def tensor(
        self, name: str, device: torch.device, build: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Returns an index tensor that belongs to the call.

        It is built once per device and kept with the call.
        """
        if (name, device) not in self._tensors:
            self._tensors[name, device] = build().to(device)
        return self._tensors[name, device]


@dataclass(frozen=True, eq=False)
class CrossCall:
    """A call of the queries below some segments against the keys of these segments.

    All the keys are visible.
    """

    q_rows: Rows
    k_rows: Rows
    call: VarlenCall


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """A causal call over all segments, and cross calls that are merged into it by log-sum-exp.

    k_rows: the rows that the call takes as its keys, path after path, so that a shared row occurs
        several times. None: all rows as they are. Then every key row is in the call and in at most
        one cross call, so that the gradient of a key is a sum of two terms.
    """

    call: VarlenCall
    k_rows: Rows | None = None
    crosses: tuple[CrossCall, ...] = ()


def merge_plan(layout: PrefixLayout, per_depth: bool) -> AttentionPlan:
    """Returns the plan of the merge form, which is kept with the layout.

    The causal call takes the queries of each segment against the segment's keys, and the cross
    calls take the queries below a segment against its keys.

    per_depth: one cross call per depth, for devices where a launch is dear and gathering rows is
        cheap. Otherwise there is one per inner segment, whose rows are views.
    """

    def build() -> AttentionPlan:
        return _build_merge_plan(compress(layout), per_depth)

    return layout.cached(("merge_plan", per_depth), build)


def _build_merge_plan(layout: PrefixLayout, per_depth: bool) -> AttentionPlan:
    lengths = tuple(length for length in layout.lengths if length)
    batches: dict[int, list[int]] = {}
    for segment, end in enumerate(layout.ends):
        has_keys = layout.starts[segment] < end
        has_queries_below = end < layout.subtree_ends[segment]
        if has_keys and has_queries_below:
            batch = layout.depths[segment] if per_depth else segment
            batches.setdefault(batch, []).append(segment)
    crosses = []
    for _, segments in sorted(batches.items()):
        q_spans = [(layout.ends[s], layout.subtree_ends[s]) for s in segments]
        k_spans = [(layout.starts[s], layout.ends[s]) for s in segments]
        call = VarlenCall(_lengths(q_spans), _lengths(k_spans), causal=False)
        crosses.append(CrossCall(Rows.from_spans(q_spans), Rows.from_spans(k_spans), call))
    return AttentionPlan(VarlenCall(lengths, lengths, causal=True), crosses=tuple(crosses))


def gather_plan(layout: PrefixLayout) -> AttentionPlan:
    """Returns the plan of the gather form, which is kept with the layout.

    Its only call takes the queries of each segment against the gathered keys of the segment's whole
    path, causal and aligned bottom-right.
    """
    return layout.cached("gather_plan", lambda: _build_gather_plan(compress(layout)))


def _build_gather_plan(layout: PrefixLayout) -> AttentionPlan:
    segments = [segment for segment, length in enumerate(layout.lengths) if length]
    q_spans = [(layout.starts[s], layout.ends[s]) for s in segments]
    k_spans: list[Span] = []
    for segment in segments:
        for ancestor in layout.path(segment):
            if layout.lengths[ancestor]:
                k_spans.append((layout.starts[ancestor], layout.ends[ancestor]))
    k_lengths = tuple(layout.offsets[s] + layout.lengths[s] for s in segments)
    call = VarlenCall(_lengths(q_spans), k_lengths, causal=True)
    # Without shared segments the keys are the rows as they are.
    is_shared = len(k_spans) > len(segments)
    return AttentionPlan(call, k_rows=Rows(tuple(k_spans)) if is_shared else None)


def rank_gather_plan(layout: PrefixLayout, own: Sequence[Span]) -> AttentionPlan:
    """Returns the plan of the gather form for the queries of some rows against the keys of all.

    own: the rows, as ascending spans; the plan's query rows are their rows one after another.
    """
    q_lengths: list[int] = []
    k_lengths: list[int] = []
    k_spans: list[Span] = []
    merged = compress(layout)
    for chunk in _chunks(merged, own):
        path = [
            (merged.starts[ancestor], merged.ends[ancestor])
            for ancestor in merged.path(chunk.segment)[:-1]
            if merged.lengths[ancestor]
        ]
        path.append((merged.starts[chunk.segment], chunk.end))
        q_lengths.append(chunk.end - chunk.start)
        k_lengths.append(sum(_lengths(path)))
        k_spans += path
    call = VarlenCall(tuple(q_lengths), tuple(k_lengths), causal=True)
    return AttentionPlan(call, k_rows=Rows(tuple(k_spans)))


def rank_merge_plan(layout: PrefixLayout, own: Sequence[Span], per_depth: bool) -> AttentionPlan:
    """Returns the plan of the merge form for the queries of some rows against the keys of all.

    The causal call takes each chunk of a segment against its own keys. Cross calls take the queries
    below a segment against its keys, and those of a chunk against the earlier keys of its segment.

    own: the rows, as ascending spans; the plan's query rows are their rows one after another.
    per_depth: as in merge_plan. The chunks' earlier keys are one call more.
    """
    merged = compress(layout)
    chunks = _chunks(merged, own)
    below: dict[int, list[tuple[Span, Span]]] = {}
    earlier: list[tuple[Span, Span]] = []
    for segment, end in enumerate(merged.ends):
        queries = _queries_in(chunks, end, merged.subtree_ends[segment])
        keys = (merged.starts[segment], end)
        if keys[0] < end and queries[0] < queries[1]:
            batch = merged.depths[segment] if per_depth else segment
            below.setdefault(batch, []).append((queries, keys))
    for chunk in chunks:
        start = merged.starts[chunk.segment]
        if start < chunk.start:
            queries = (chunk.first, chunk.first + chunk.end - chunk.start)
            earlier.append((queries, (start, chunk.start)))
    batches = [pairs for _, pairs in sorted(below.items())]
    if per_depth:
        batches += [earlier] if earlier else []
    else:
        batches += [[pair] for pair in earlier]
    crosses = []
    for pairs in batches:
        q_spans = [queries for queries, _ in pairs]
        k_spans = [keys for _, keys in pairs]
        call = VarlenCall(_lengths(q_spans), _lengths(k_spans), causal=False)
        crosses.append(CrossCall(Rows.from_spans(q_spans), Rows(tuple(k_spans)), call))
    lengths = tuple(chunk.end - chunk.start for chunk in chunks)
    k_rows = Rows.from_spans([(chunk.start, chunk.end) for chunk in chunks])
    call = VarlenCall(lengths, lengths, causal=True)
    return AttentionPlan(call, k_rows=k_rows, crosses=tuple(crosses))


@dataclass(frozen=True)
class _Chunk:
    """Rows [start, end) of one segment. first: the number of the first one among the chosen rows."""

    segment: int
    start: int
    end: int
    first: int


def _chunks(layout: PrefixLayout, own: Sequence[Span]) -> list[_Chunk]:
    """Returns the spans `own`, cut where a segment ends."""
    chunks = []
    first = 0
    segment = 0
    for span_start, span_end in own:
        start = span_start
        while start < span_end:
            while layout.ends[segment] <= start:
                segment += 1
            end = min(span_end, layout.ends[segment])
            chunks.append(_Chunk(segment, start, end, first))
            first += end - start
            start = end
    return chunks


def _queries_in(chunks: Sequence[_Chunk], start: int, end: int) -> Span:
    """Returns which of the chosen rows lie in the packed rows [start, end), as one span."""
    inside = [chunk for chunk in chunks if start <= chunk.start and chunk.end <= end]
    if not inside:
        return 0, 0
    last = inside[-1]
    return inside[0].first, last.first + last.end - last.start


def _lengths(spans: Sequence[Span]) -> tuple[int, ...]:
    return tuple(end - start for start, end in spans)

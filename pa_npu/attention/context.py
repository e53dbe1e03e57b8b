"""Context parallelism: attention of one rank's rows against the keys and values of all ranks.

    context = ContextGroup(process_group)       the ranks that share a sequence
    rows = context.rows_of(layout)              RankRows, which stands in for the layout
    shared_prompt_attention(q, k, v, rows)      q, k, v of this rank's rows

Each rank has the rows that `division.divide` gives it. Keys and values are gathered over the group
in every layer, in pieces of heads: the next piece is on the wire while attention over one is
computed. Only a rank's own keys and values are kept for the backward, which gathers them again and
gives their gradients back to their ranks, summed in fp32, once per piece. So a rank holds 1/C of
every activation, beside one or two pieces of heads of the whole sequence.

Every rank of a group calls attention in the same order, in the backward and in a recomputed forward
too; each call is collective. Sums over ranks have a fixed order, so that a run repeats to the bit.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from pa_npu.attention.calls import attend, gradients
from pa_npu.attention.division import Division, divide
from pa_npu.attention.kept import KeepsTensors
from pa_npu.attention.kernels.base import Partial, VarlenKernel
from pa_npu.attention.layout import PrefixLayout
from pa_npu.attention.plans import AttentionPlan, rank_gather_plan, rank_merge_plan
from pa_npu.platform.pieces import pieces_of_heads

# named so from torch 2.13 on
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, eq=False)
class ContextGroup:
    """The ranks that share a packed sequence, as one of them sees it.

    multiple: the rows of a rank are padded to a multiple of it, as sequence parallelism needs.
    """

    group: dist.ProcessGroup
    multiple: int = 1

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def rows_of(self, layout: PrefixLayout) -> RankRows:
        """Returns this rank's rows of a packed sequence, which are kept with its layout."""

        def build() -> RankRows:
            return RankRows(divide(layout, self.size, self.multiple), self.rank, self)

        return layout.cached(("rank rows", self.size, self.rank, self.multiple), build)

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Sums a tensor over the group, in place."""
        dist.all_reduce(values, group=self.group)
        return values


@dataclass(frozen=True, eq=False)
class RankRows(KeepsTensors):
    """One rank's rows of a packed sequence, in place of the sequence's PrefixLayout.

    division: of the whole sequence. rank: whose rows. group: over which keys and values are
    gathered; None for a rank that is not computed with, as in a plan.
    """

    division: Division
    rank: int
    group: ContextGroup | None = None
    _cache: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def total(self) -> int:
        """Number of this rank's rows, padding included."""
        return self.division.rows_per_rank

    @property
    def padding(self) -> int:
        """Number of rows at the end that stand for nothing."""
        return self.division.padding(self.rank)

    @property
    def longest(self) -> int:
        """Length of the longest sequence, shared part included."""
        return self.division.layout.longest

    @property
    def layout(self) -> PrefixLayout:
        """The whole packed sequence."""
        return self.division.layout

    def row_numbers(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Returns the packed row behind each of this rank's rows, int64 [total].

        Padding rows have numbers from division.num_rows on.
        """
        return self.tensor("row_numbers", device, lambda: self.division.rows[self.rank])

    def position_ids(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Returns the position of every row inside its own sequence, int64 [total]."""

        def build() -> torch.Tensor:
            return self.layout.position_ids()[self.division.rows[self.rank]]

        return self.tensor("position_ids", device, build)

    def places(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Returns the number that each packed row has on this rank, int64 [layout.total]; -1 for
        rows of other ranks.
        """

        def build() -> torch.Tensor:
            number = self.division.places - self.rank * self.total
            is_own = (number >= 0) & (number < self.total)
            return torch.where(is_own, number, -1)

        return self.tensor("places", device, build)

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Sums a tensor over the ranks that share the sequence, in place. Collective."""
        return _group_of(self).sum_over_ranks(values)

    def plan(self, *, gathers: bool, per_depth: bool) -> AttentionPlan:
        """Returns the kernel calls of this rank's queries against the keys of all rows."""
        spans = self.division.spans[self.rank]
        if gathers:
            return self.cached("gather plan", lambda: rank_gather_plan(self.layout, spans))
        return self.cached(
            ("merge plan", per_depth), lambda: rank_merge_plan(self.layout, spans, per_depth)
        )


def attention_of_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: RankRows,
    scale: float,
    kernel: VarlenKernel,
    *,
    gathers: bool,
) -> torch.Tensor:
    """Computes this rank's rows of attention over the whole sequence; collective.

    q [rows.total, heads, head_dim], k and v [rows.total, kv_heads, head_dim] -> [rows.total, heads,
    head_dim]. gathers: by the gather form instead of the merge form.
    """
    plan = rows.plan(gathers=gathers, per_depth=kernel.per_depth)
    out: torch.Tensor = _AttentionOfRows.apply(q, k, v, rows, plan, scale, kernel)
    return out


def gathered_keys(x: torch.Tensor, rows: RankRows) -> torch.Tensor:
    """Gathers keys or values of all rows, [rows.total, ...] -> [rows.layout.total, ...], in packed
    order; collective, and so is the backward.
    """
    whole: torch.Tensor = _Gathered.apply(x, rows)
    return whole


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: RankRows) -> torch.Tensor:
        ctx.rows = rows
        ctx.dtype = x.dtype
        return _Gather(rows, x[None]).wait()[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        return _Scatter(ctx.rows, [wide]).wait()[0].to(ctx.dtype), None


class _Gather:
    """Tensors of this rank's rows, [n, rows.total, ...], on their way to all ranks."""

    def __init__(self, rows: RankRows, own: torch.Tensor) -> None:
        self._rows = rows
        group = _group_of(rows)
        self._own = own.contiguous()
        size = group.size
        self._parts = torch.empty(
            (size * len(own), *own.shape[1:]), dtype=own.dtype, device=own.device
        )
        self._work = _all_gather(self._parts, self._own, group=group.group, async_op=True)

    def wait(self) -> torch.Tensor:
        """Returns [n, rows.layout.total, ...], in packed order. To be called once: it releases what
        came over the wire.
        """
        self._work.wait()
        parts = self._parts.flatten(0, 1)
        num_tensors = len(self._own)
        del self._parts, self._own, self._work
        places = _places_by_rank(self._rows, num_tensors, parts.device)
        whole = parts.index_select(0, places.flatten())
        return whole.unflatten(0, places.shape)


class _Scatter:
    """Gradients of all rows, n tensors [rows.layout.total, ...] in packed order, on their way to the
    ranks that have the rows, where they are summed.
    """

    def __init__(self, rows: RankRows, whole: Sequence[torch.Tensor]) -> None:
        group = _group_of(rows)
        first = whole[0]
        places = _places_by_rank(rows, len(whole), first.device)
        self._brought = first.new_empty(places.numel(), *first.shape[1:])
        for place, gradient in zip(places, whole, strict=True):
            self._brought.index_copy_(0, place, gradient)
        self._own = first.new_empty(len(whole), rows.total, *first.shape[1:])
        self._work = _reduce_scatter(
            self._own.view(-1), self._brought.view(-1), group=group.group, async_op=True
        )

    def wait(self) -> torch.Tensor:
        """Returns [n, rows.total, ...]. To be called once: it releases what went over the wire."""
        self._work.wait()
        own = self._own
        del self._brought, self._own, self._work
        return own


def _places_by_rank(rows: RankRows, num_tensors: int, device: torch.device) -> torch.Tensor:
    """Returns the place of each tensor's packed rows among [ranks x tensors x rows of a rank] rows,
    the order in which collectives pass them; int64 [num_tensors, rows.layout.total].
    """

    def build() -> torch.Tensor:
        places = rows.division.places
        before = (places // rows.total) * (num_tensors - 1) * rows.total
        return torch.stack([places + before + number * rows.total for number in range(num_tensors)])

    return rows.tensor(f"places of {num_tensors} tensors by rank", device, build)


def _group_of(rows: RankRows) -> ContextGroup:
    if rows.group is None:
        raise ValueError("rows: these rows of a rank have no process group to gather keys over")
    return rows.group


class _AttentionOfRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: RankRows,
        plan: AttentionPlan,
        scale: float,
        kernel: VarlenKernel,
    ) -> torch.Tensor:
        kv = torch.stack((k, v))
        pieces = pieces_of_heads(k.shape[1], kv.numel() * kv.element_size() * rows.division.size)
        per_head = q.shape[1] // k.shape[1]
        outs = []
        stats = []
        gather = _Gather(rows, kv[:, :, pieces[0]])
        for number, piece in enumerate(pieces):
            keys, values = gather.wait()
            if number + 1 < len(pieces):
                gather = _Gather(rows, kv[:, :, pieces[number + 1]])
            result = attend(_heads(q, piece, per_head), keys, values, plan, scale, kernel)
            outs.append(result.out)
            stats.append(result.stats)
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
        ctx.save_for_backward(q, kv, out, *(part for piece in stats for part in piece))
        ctx.rows = rows
        ctx.plan = plan
        ctx.scale = scale
        ctx.kernel = kernel
        ctx.pieces = pieces
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, kv, out, *stats = ctx.saved_tensors
        rows: RankRows = ctx.rows
        plan: AttentionPlan = ctx.plan
        pieces: list[slice] = ctx.pieces
        per_head = q.shape[1] // kv.shape[2]
        per_piece = len(stats) // len(pieces)
        dqs = []
        own: list[torch.Tensor] = []
        scatter: _Scatter | None = None
        gather = _Gather(rows, kv[:, :, pieces[0]])
        for number, piece in enumerate(pieces):
            keys, values = gather.wait()
            if number + 1 < len(pieces):
                gather = _Gather(rows, kv[:, :, pieces[number + 1]])
            piece_stats = tuple(stats[number * per_piece : (number + 1) * per_piece])
            result = Partial(_heads(out, piece, per_head), piece_stats, plan.call)
            dq, dk, dv = gradients(
                _heads(grad, piece, per_head),
                _heads(q, piece, per_head),
                keys,
                values,
                result,
                plan,
                ctx.scale,
                ctx.kernel,
                wide_sums=True,
            )
            del keys, values
            dqs.append(dq)
            if scatter is not None:
                own.append(scatter.wait())
            scatter = _Scatter(rows, (dk, dv))
            del dk, dv
        assert scatter is not None, "there is a piece"
        own.append(scatter.wait())
        dk, dv = (torch.cat(own, dim=2) if len(own) > 1 else own[0]).to(kv.dtype)
        dq = dqs[0] if len(dqs) == 1 else torch.cat(dqs, dim=1)
        return dq, dk, dv, None, None, None, None


def _heads(x: torch.Tensor, piece: slice, per_head: int) -> torch.Tensor:
    """Returns the query heads of a piece of key/value heads, [rows, heads of the piece, ...]."""
    heads = x[:, piece.start * per_head : piece.stop * per_head]
    return heads.contiguous()

"""Depth first: rows of a packed sequence behind others that are computed once, and whose keys are kept.

    kept = KeptKeys(rows=4096)
    stem = PathRows(PrefixLayout((4096,), (-1,)), own=kept)     the shared beginning: its pass keeps
                                                                every layer's keys and values
    piece = PathRows(whole, stems=(kept,))                      stands in for the layout of the rows
                                                                behind it, of which whole has both
    shared_prompt_attention(q, k, v, piece, layer=7)            q, k, v of the piece's rows

A group that does not fit into one microbatch is computed so: its stem forward, then its pieces one
after another, forward and backward, then the stem backward. The gradients that pieces have for the
kept keys and values are summed in fp32, and enter where the stem computed these: `keep` is the
identity whose backward adds the sums. So a stem's backward may begin with a gradient of zero at its
output, and works under recomputation, which calls `keep` again. One path of the tree of prefixes is
in memory at a time.

A stem may itself stand behind stems. Sums have a fixed order, so that a run repeats to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from pa_npu.attention.calls import attend, gradients
from pa_npu.attention.kernels.base import Partial, VarlenKernel
from pa_npu.attention.layout import PrefixLayout
from pa_npu.attention.plans import AttentionPlan, rank_gather_plan, rank_merge_plan
from pa_npu.errors import InvariantViolation

LayerKey = tuple[str, int]
"""A model's name and the number of one of its layers."""
Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, or their gradients, [rows, kv_heads, head_dim] each."""


class KeptKeys:
    """The keys and values that one stem has kept, and the sums of the gradients that came for them,
    by model and layer.

    rows: of the stem.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._pairs: dict[LayerKey, Pair] = {}
        self._sums: dict[LayerKey, Pair] = {}
        # layers whose keys have a gradient, until it has been taken
        self._open: set[LayerKey] = set()

    def keep(self, layer: LayerKey, k: torch.Tensor, v: torch.Tensor) -> Pair:
        """Keeps a layer's keys and values, and returns them; the sums of their gradients enter
        there. A recomputed pass returns what it is given.
        """
        if layer not in self._pairs:
            self._pairs[layer] = (_alone(k), _alone(v))
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            self._open.add(layer)
        kept: Pair = _Keep.apply(k, v, self, layer)
        return kept

    def pair(self, layer: LayerKey) -> Pair:
        """Returns what a layer has kept. Raises ValueError if it has not computed the stem."""
        if layer not in self._pairs:
            model, number = layer
            raise ValueError(
                f"layer {number} of {model} has kept no keys of the {self.rows} rows before these; "
                "compute the stem first, by the same models"
            )
        return self._pairs[layer]

    def add_gradients(self, layer: LayerKey, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Adds gradients in fp32 (fp64 for fp64), [rows, kv_heads, head_dim], to the sums."""
        sums = self._sums.get(layer)
        if sums is None:
            self._sums[layer] = (dk.clone(), dv.clone())
            return
        sums[0].add_(dk)
        sums[1].add_(dv)

    def take_gradients(self, layer: LayerKey) -> Pair | None:
        """Returns a layer's sums and forgets them; None if nothing came."""
        self._open.discard(layer)
        return self._sums.pop(layer, None)

    def release(self) -> None:
        """Forgets everything. Raises InvariantViolation if gradients came that no backward of the
        stem has taken (I7).
        """
        left = sorted(self._open & self._sums.keys())
        self._pairs.clear()
        self._sums.clear()
        self._open.clear()
        if left:
            model, number = left[0]
            raise InvariantViolation(
                f"I7 gradient: the pieces behind a stem of {self.rows} rows have left gradients for "
                f"its keys in {len(left)} layers, first in layer {number} of {model}, and the stem "
                "ended without its backward; this is an error of the training backend"
            )


def _alone(x: torch.Tensor) -> torch.Tensor:
    """Returns x without its graph, in memory that holds nothing else."""
    x = x.detach()
    return x if x.untyped_storage().nbytes() == x.numel() * x.element_size() else x.clone()


class _Keep(torch.autograd.Function):
    """The identity; adds the sums of the pieces' gradients in the backward."""

    @staticmethod
    def forward(
        ctx: Any, k: torch.Tensor, v: torch.Tensor, kept: KeptKeys, layer: LayerKey
    ) -> Pair:
        ctx.kept = kept
        ctx.layer = layer
        return k.view_as(k), v.view_as(v)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dk: torch.Tensor, dv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        sums = ctx.kept.take_gradients(ctx.layer)
        if sums is None:
            return dk, dv, None, None
        return sums[0].add_(dk).to(dk.dtype), sums[1].add_(dv).to(dv.dtype), None, None


@dataclass(frozen=True, eq=False)
class PathRows:
    """The rows of a packed sequence behind its first ones, in place of the sequence's PrefixLayout.

    layout: of the whole sequence: the rows of `stems` one after another, then these.
    stems: keys and values of the rows before these.
    own: keeps the keys and values of these rows, for others behind them; None for the last ones.
    model: the model that computes, which has keys and values of its own.
    """

    layout: PrefixLayout
    stems: tuple[KeptKeys, ...] = ()
    own: KeptKeys | None = None
    model: str = "policy"

    @property
    def first(self) -> int:
        """Number of rows before these."""
        return sum(stem.rows for stem in self.stems)

    @property
    def total(self) -> int:
        """Number of these rows, padding included."""
        return self.layout.total - self.first

    @property
    def padding(self) -> int:
        """Number of rows at the end that stand for nothing."""
        return self.layout.padding

    @property
    def longest(self) -> int:
        """Length of the longest sequence, from its first row on."""
        return self.layout.longest

    def position_ids(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Returns the position of every row inside its own sequence, int64 [total]."""
        return self.layout.position_ids(device)[self.first :]

    def of_model(self, name: str) -> PathRows:
        """Returns the same rows, as the model `name` computes them."""
        return replace(self, model=name)

    def keep(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> Pair:
        """Keeps these rows' keys and values where others come behind them, and returns them."""
        if self.own is None:
            return k, v
        return self.own.keep((self.model, layer), k, v)

    def whole(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> Pair:
        """Returns keys and values of the whole sequence. k, v: of these rows."""
        pairs = [stem.pair((self.model, layer)) for stem in self.stems]
        keys = torch.cat([*(pair[0] for pair in pairs), k])
        values = torch.cat([*(pair[1] for pair in pairs), v])
        return keys, values

    def give_back(self, dk: torch.Tensor, dv: torch.Tensor, layer: int) -> Pair:
        """Adds the gradients of the stems' keys and values to their sums, and returns those of
        these rows. dk, dv: of the whole sequence.
        """
        wide = torch.promote_types(dk.dtype, torch.float32)
        start = 0
        for stem in self.stems:
            rows = slice(start, start + stem.rows)
            stem.add_gradients((self.model, layer), dk[rows].to(wide), dv[rows].to(wide))
            start += stem.rows
        return dk[start:], dv[start:]

    def plan(self, *, gathers: bool, per_depth: bool) -> AttentionPlan:
        """Returns the kernel calls of these rows' queries against the keys of the whole sequence."""
        spans = [(self.first, self.layout.total)]

        def build() -> AttentionPlan:
            if gathers:
                return rank_gather_plan(self.layout, spans)
            return rank_merge_plan(self.layout, spans, per_depth)

        return self.layout.cached(("path plan", self.first, gathers, per_depth), build)


def of_model(layout: Any, name: str) -> Any:
    """Returns the layout as the model `name` computes it: of kept keys, its own."""
    return layout.of_model(name) if isinstance(layout, PathRows) else layout


def whole_keys(k: torch.Tensor, v: torch.Tensor, rows: PathRows, layer: int) -> Pair:
    """Returns keys and values of the whole sequence, differentiable in k and v; the gradients of
    the others are added to the stems' sums.
    """
    whole: Pair = _Whole.apply(k, v, rows, layer)
    return whole


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: torch.Tensor, v: torch.Tensor, rows: PathRows, layer: int) -> Pair:
        ctx.rows = rows
        ctx.layer = layer
        return rows.whole(k, v, layer)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dk: torch.Tensor, dv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        return *ctx.rows.give_back(dk, dv, ctx.layer), None, None


def attention_on_path(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: PathRows,
    layer: int,
    scale: float,
    kernel: VarlenKernel,
    *,
    gathers: bool,
) -> torch.Tensor:
    """Computes attention of rows behind stems.

    q [rows.total, heads, head_dim], k and v [rows.total, kv_heads, head_dim] -> [rows.total, heads,
    head_dim]. gathers: by the gather form instead of the merge form.

    Nothing of the stems is kept for the backward, which puts their keys before these again: a copy
    per layer and piece would be as large as the stem.
    """
    plan = rows.plan(gathers=gathers, per_depth=kernel.per_depth)
    out: torch.Tensor = _AttentionOnPath.apply(q, k, v, rows, layer, plan, scale, kernel)
    return out


class _AttentionOnPath(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: PathRows,
        layer: int,
        plan: AttentionPlan,
        scale: float,
        kernel: VarlenKernel,
    ) -> torch.Tensor:
        keys, values = rows.whole(k, v, layer)
        result = attend(q, keys, values, plan, scale, kernel)
        ctx.save_for_backward(q, k, v, result.out, *result.stats)
        ctx.rows = rows
        ctx.layer = layer
        ctx.plan = plan
        ctx.scale = scale
        ctx.kernel = kernel
        return result.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, *stats = ctx.saved_tensors
        rows: PathRows = ctx.rows
        plan: AttentionPlan = ctx.plan
        keys, values = rows.whole(k, v, ctx.layer)
        result = Partial(out, tuple(stats), plan.call)
        dq, dk, dv = gradients(
            grad, q, keys, values, result, plan, ctx.scale, ctx.kernel, wide_sums=True
        )
        own_dk, own_dv = rows.give_back(dk, dv, ctx.layer)
        return dq, own_dk.to(k.dtype), own_dv.to(v.dtype), None, None, None, None, None

"""Gather form: every segment's queries against the gathered keys of its whole path, in one bottom-right causal call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from pa_npu.attention.kernels.base import Partial, VarlenKernel
from pa_npu.attention.layout import PrefixLayout
from pa_npu.attention.plan import GatherPlan, gather_plan


def gather_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: PrefixLayout,
    scale: float,
    kernel: VarlenKernel,
    segments: Sequence[int] | None = None,
) -> torch.Tensor:
    """Shapes as in shared_prompt_attention. Costs a copy of the shared keys and values per sequence, and no merge.

    segments: compute only the queries of these segments of the layout (a context-parallel rank's own, ascending); q and
    the result then hold just their rows, while k and v hold all rows.
    """
    return _Gather.apply(q, k, v, gather_plan(layout, segments), scale, kernel)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: GatherPlan,
        scale: float,
        kernel: VarlenKernel,
    ) -> torch.Tensor:
        result = kernel.forward(q, _take(plan, k), _take(plan, v), plan.call, scale)
        ctx.save_for_backward(q, k, v, result.out, *result.stats)
        ctx.plan, ctx.scale, ctx.kernel = plan, scale, kernel
        return result.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, *stats = ctx.saved_tensors
        plan: GatherPlan = ctx.plan
        result = Partial(out, tuple(stats), plan.call)
        dq, dk, dv = ctx.kernel.backward(grad, q, _take(plan, k), _take(plan, v), result, ctx.scale)
        if plan.k_rows is None:
            return dq, dk, dv, None, None, None
        return dq, _sum_rows(plan, dk, k), _sum_rows(plan, dv, v), None, None, None


def _take(plan: GatherPlan, x: torch.Tensor) -> torch.Tensor:
    return x if plan.k_rows is None else plan.k_rows.take(x)


def _sum_rows(plan: GatherPlan, gathered: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Gradients of a row that was gathered several times, summed in fp32 since a sum of G terms loses bits in bf16."""
    assert plan.k_rows is not None
    total = torch.zeros(like.shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    plan.k_rows.add_(total, gathered)
    return total.to(like.dtype)

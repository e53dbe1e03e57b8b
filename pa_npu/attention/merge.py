"""Merge form: a causal call over all segments and cross calls to their ancestors, merged by log-sum-exp."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from pa_npu.attention.kernels.base import VarlenKernel
from pa_npu.attention.layout import PrefixLayout
from pa_npu.attention.plan import MergePlan, merge_plan


def merge_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PrefixLayout, scale: float, kernel: VarlenKernel
) -> torch.Tensor:
    """Shapes as in shared_prompt_attention. Running output and gradients stay in q's dtype: a row is rounded once per
    ancestor depth."""
    return _Merge.apply(q, k, v, merge_plan(layout, kernel.per_depth), scale, kernel)


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: MergePlan,
        scale: float,
        kernel: VarlenKernel,
    ) -> torch.Tensor:
        out, stats = kernel.forward(q, k, v, plan.causal, scale)
        for cross in plan.crosses:
            part, part_stats = kernel.forward(
                cross.q_rows.take(q), cross.k_rows.take(k), cross.k_rows.take(v), cross.call, scale
            )
            kernel.merge(out, stats, part, part_stats, cross.q_rows)
        ctx.save_for_backward(q, k, v, out, *stats)
        ctx.plan, ctx.scale, ctx.kernel = plan, scale, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, *stats = ctx.saved_tensors
        kernel, scale = ctx.kernel, ctx.scale
        dq, dk, dv = kernel.backward(grad, q, k, v, out, tuple(stats), ctx.plan.causal, scale)
        for cross in ctx.plan.crosses:
            q_rows, k_rows = cross.q_rows, cross.k_rows
            parts = kernel.backward(
                q_rows.take(grad),
                q_rows.take(q),
                k_rows.take(k),
                k_rows.take(v),
                q_rows.take(out),
                kernel.take(tuple(stats), q_rows),
                cross.call,
                scale,
            )
            for total, part, rows in zip((dq, dk, dv), parts, (q_rows, k_rows, k_rows), strict=True):
                rows.add_(total, part)
        return dq, dk, dv, None, None, None

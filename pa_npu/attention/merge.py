"""Merge form: a causal call over all segments and cross calls to their ancestors, merged by log-sum-exp."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from pa_npu.attention.kernels.base import Partial, VarlenKernel
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
        running = kernel.forward(q, k, v, plan.causal, scale)
        for cross in plan.crosses:
            keys, values = cross.k_rows.take(k), cross.k_rows.take(v)
            kernel.merge(running, kernel.forward(cross.q_rows.take(q), keys, values, cross.call, scale), cross)
        ctx.save_for_backward(q, k, v, running.out, *running.stats)
        ctx.plan, ctx.scale, ctx.kernel = plan, scale, kernel
        return running.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, *stats = ctx.saved_tensors
        plan, scale, kernel = ctx.plan, ctx.scale, ctx.kernel
        result = Partial(out, tuple(stats), plan.causal)
        dq, dk, dv = kernel.backward(grad, q, k, v, result, scale)
        for cross in plan.crosses:
            q_rows, k_rows = cross.q_rows, cross.k_rows
            part = kernel.select(result, cross)
            keys, values = k_rows.take(k), k_rows.take(v)
            parts = kernel.backward(q_rows.take(grad), q_rows.take(q), keys, values, part, scale)
            for total, addend, rows in zip((dq, dk, dv), parts, (q_rows, k_rows, k_rows), strict=True):
                rows.add_(total, addend)
        return dq, dk, dv, None, None, None

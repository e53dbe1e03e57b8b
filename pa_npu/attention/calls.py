"""Runs the kernel calls of an AttentionPlan: forward, and the gradients of queries, keys and values."""

from __future__ import annotations

import torch

from pa_npu.attention.kernels.base import Partial, VarlenKernel
from pa_npu.attention.plans import AttentionPlan
from pa_npu.attention.rows import Rows


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    kernel: VarlenKernel,
) -> Partial:
    """Returns the plan's calls, merged. q [query rows, heads, head_dim]; k, v [key rows, kv_heads,
    head_dim].
    """
    running = kernel.forward(q, _call_keys(plan, k), _call_keys(plan, v), plan.call, scale)
    for cross in plan.crosses:
        queries = cross.q_rows.take(q)
        keys = cross.k_rows.take(k)
        values = cross.k_rows.take(v)
        part = kernel.forward(queries, keys, values, cross.call, scale)
        kernel.merge(running, part, cross)
    return running


def gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    result: Partial,
    plan: AttentionPlan,
    scale: float,
    kernel: VarlenKernel,
    *,
    wide_sums: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of q, k and v. result: what `attend` returned.

    wide_sums: leave the gradients of k and v in fp32 (fp64 for fp64), in which they are summed over
        calls; for plans whose call takes chosen keys. Otherwise they have k's type.
    """
    keys = _call_keys(plan, k)
    values = _call_keys(plan, v)
    dq, dk, dv = kernel.backward(grad, q, keys, values, result, scale)
    if plan.k_rows is not None:
        dk = _sum_rows(plan.k_rows, dk, k)
        dv = _sum_rows(plan.k_rows, dv, v)
        if not wide_sums:
            dk = dk.to(k.dtype)
            dv = dv.to(v.dtype)
    for cross in plan.crosses:
        part = kernel.select(result, cross)
        part_grad = cross.q_rows.take(grad)
        queries = cross.q_rows.take(q)
        keys = cross.k_rows.take(k)
        values = cross.k_rows.take(v)
        part_dq, part_dk, part_dv = kernel.backward(part_grad, queries, keys, values, part, scale)
        cross.q_rows.add_(dq, part_dq)
        cross.k_rows.add_(dk, part_dk)
        cross.k_rows.add_(dv, part_dv)
    return dq, dk, dv


def _call_keys(plan: AttentionPlan, x: torch.Tensor) -> torch.Tensor:
    """Returns the rows of the keys or values `x` that the plan's causal call takes."""
    if plan.k_rows is None:
        return x
    return plan.k_rows.take(x)


def _sum_rows(rows: Rows, gathered: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Sums the gradients of rows that were gathered several times.

    It sums in fp32, since a sum of G terms loses bits in bf16.
    """
    total = torch.zeros(
        like.shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device
    )
    rows.add_(total, gathered)
    return total

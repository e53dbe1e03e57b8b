"""shared_prompt_attention, which checks its input and chooses form and kernel.

The kernel knows nothing of prefixes. The two forms use it in different ways:

gather   every segment's queries against the gathered keys of its whole path, in one bottom-right
         causal call
merge    a causal call over all segments and cross calls to their ancestors, merged by log-sum-exp
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from pa_npu.attention.calls import attend, gradients
from pa_npu.attention.context import RankRows, attention_of_rows, gathered_keys
from pa_npu.attention.kernels.base import Partial, VarlenKernel
from pa_npu.attention.layout import PrefixLayout
from pa_npu.attention.plans import AttentionPlan, gather_plan, merge_plan
from pa_npu.attention.stems import PathRows, attention_on_path, whole_keys

IMPLEMENTATIONS = ("auto", "dense", "merge", "gather")
# Module and class, imported when the kernel is first needed.
_KERNELS = {
    "cpu-flash": ("pa_npu.attention.kernels.cpu", "CpuFlash"),
    "cuda-flash": ("pa_npu.attention.kernels.cuda", "CudaFlash"),
    "npu-fusion": ("pa_npu.attention.kernels.npu", "NpuFusion"),
    "portable": ("pa_npu.attention.kernels.portable", "Portable"),
}


def shared_prompt_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: PrefixLayout | RankRows | PathRows,
    *,
    scale: float | None = None,
    impl: str = "auto",
    layer: int | None = None,
) -> torch.Tensor:
    """Computes attention in which a token sees its segment's ancestors and, causally, its segment.

    Args:
        q: [total, heads, head_dim].
        k: [total, kv_heads, head_dim], where kv_heads divides heads (GQA).
        v: the same shape as k.
        layout: of the `total` packed tokens; or RankRows, where q, k and v have those rows of a
            longer sequence whose other rows are on other ranks (pa_npu.attention.context). Then the
            call is collective, and so is its backward. Or PathRows, where the rows before these
            were computed earlier and have kept their keys (pa_npu.attention.stems).
        scale: factor of the scores, head_dim ** -0.5 by default.
        impl: dense (the reference, with scores [heads, total, total]), merge, gather, or auto,
            which takes the faster of merge and gather for this layout on this platform. There is no
            fallback from one to another.
        layer: number of the calling layer, which PathRows need to find its keys.

    Returns [total, heads, head_dim] in q's dtype, differentiable in q, k and v. Raises ValueError
    naming what it cannot take.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl: {impl!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    _check(q, k, v, layout)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if isinstance(layout, PathRows):
        if layer is None:
            raise ValueError("layer: rows behind kept keys need the number of the calling layer")
        k, v = layout.keep(k, v, layer)
        if layout.stems:
            return _behind_stems(q, k, v, layout, layer, scale, impl)
        layout = layout.layout
    if impl == "dense":
        if isinstance(layout, RankRows):
            keys = gathered_keys(k, layout)
            values = gathered_keys(v, layout)
            rows = layout.row_numbers(q.device)
            return dense_attention(q, keys, values, layout.layout, scale, rows)
        return dense_attention(q, k, v, layout, scale)
    if layout.total == 0:
        return q * 1.0
    kernel = kernel_for(q)
    if isinstance(layout, RankRows):
        gathers = impl == "gather" or (impl == "auto" and kernel.prefers_gather(layout.layout))
        return attention_of_rows(q, k, v, layout, scale, kernel, gathers=gathers)
    if impl == "gather" or (impl == "auto" and kernel.prefers_gather(layout)):
        return gather_attention(q, k, v, layout, scale, kernel)
    return merge_attention(q, k, v, layout, scale, kernel)


def _behind_stems(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: PathRows,
    layer: int,
    scale: float,
    impl: str,
) -> torch.Tensor:
    """Computes the form `impl` for rows before which there are others, whose keys are kept."""
    if impl == "dense":
        keys, values = whole_keys(k, v, rows, layer)
        numbers = torch.arange(rows.first, rows.layout.total, device=q.device)
        return dense_attention(q, keys, values, rows.layout, scale, numbers)
    kernel = kernel_for(q)
    gathers = impl == "gather" or (impl == "auto" and kernel.prefers_gather(rows.layout))
    return attention_on_path(q, k, v, rows, layer, scale, kernel, gathers=gathers)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PrefixLayout | RankRows | PathRows
) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 3 or tensor.shape[0] != layout.total:
            if isinstance(layout, RankRows):
                counted = f"the rows of rank {layout.rank} of {layout.division.size}"
            elif isinstance(layout, PathRows):
                counted = f"the rows behind the first {layout.first}"
            else:
                counted = f"the sum of the layout's segments 0 to {len(layout.lengths) - 1}"
            raise ValueError(
                f"{name}: shape {tuple(tensor.shape)} must be [tokens, heads, head_dim] with "
                f"{layout.total} tokens, {counted}"
            )
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name}: {tensor.dtype} on {tensor.device} must match q, which is {q.dtype} on "
                f"{q.device}"
            )
    if k.shape != v.shape or k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} must have one shape and q's head_dim "
            f"{q.shape[-1]}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q: {q.shape[1]} heads must be a multiple of the {k.shape[1]} key/value heads"
        )


def gather_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: PrefixLayout,
    scale: float,
    kernel: VarlenKernel,
) -> torch.Tensor:
    """Computes the gather form; shapes are those of shared_prompt_attention.

    It costs a copy of the shared keys and values per sequence, and no merge.
    """
    return _Attention.apply(q, k, v, gather_plan(layout), scale, kernel)


def merge_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: PrefixLayout,
    scale: float,
    kernel: VarlenKernel,
) -> torch.Tensor:
    """Computes the merge form; shapes are those of shared_prompt_attention.

    Running output and gradients stay in q's dtype: a row is rounded once per ancestor depth.
    """
    return _Attention.apply(q, k, v, merge_plan(layout, kernel.per_depth), scale, kernel)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: AttentionPlan,
        scale: float,
        kernel: VarlenKernel,
    ) -> torch.Tensor:
        result = attend(q, k, v, plan, scale, kernel)
        ctx.save_for_backward(q, k, v, result.out, *result.stats)
        ctx.plan = plan
        ctx.scale = scale
        ctx.kernel = kernel
        return result.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, *stats = ctx.saved_tensors
        plan: AttentionPlan = ctx.plan
        result = Partial(out, tuple(stats), plan.call)
        dq, dk, dv = gradients(grad, q, k, v, result, plan, ctx.scale, ctx.kernel)
        return dq, dk, dv, None, None, None


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: PrefixLayout,
    scale: float,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes softmax(q k^T scale + mask) v, written out.

    q [rows, heads, head_dim], k and v [total, kv_heads, head_dim] -> [rows, heads, head_dim]. The
    scores [heads, rows, total] are in fp32 (fp64 for fp64).

    rows: int64 [rows], the packed rows that q has; None for all.
    """
    total, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    accumulate = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(accumulate).view(total, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("ignd,jgd->gnij", grouped, k.to(accumulate)) * scale
    mask = layout.dense_mask(q.device)
    if rows is not None:
        mask = mask[rows]
    scores = scores.masked_fill(~mask, float("-inf"))
    out = torch.einsum("gnij,jgd->ignd", scores.softmax(-1), v.to(accumulate))
    return out.reshape(total, heads, head_dim).to(q.dtype)


def kernel_for(q: torch.Tensor) -> VarlenKernel:
    """Returns the kernel for q [tokens, heads, head_dim].

    Raises ValueError for a device without one.
    """
    return _load(kernel_name(q))


def kernel_name(q: torch.Tensor) -> str:
    """Returns the name of the kernel for q.

    CUDA's flash operators take fp16 and bf16 only; the portable one does the rest.
    """
    if q.device.type == "cpu":
        return "cpu-flash"
    if q.device.type == "npu":
        return "npu-fusion"
    if q.device.type == "cuda":
        from pa_npu.attention.kernels.cuda import CudaFlash

        return "cuda-flash" if CudaFlash.supports(q) else "portable"
    raise ValueError(
        f"q: no attention kernel for device {q.device}; known are cpu, cuda and npu, or use "
        "impl=dense"
    )


@cache
def _load(name: str) -> VarlenKernel:
    module, class_name = _KERNELS[name]
    return getattr(import_module(module), class_name)()


@dataclass(frozen=True)
class AttentionKernels:
    """The kernels that attention uses, for records.

    kernel: of varlen calls: a name of _KERNELS, "dense", or transformers' own.
    merge: what merges partial results; "none" where nothing is merged.
    fallback: why `merge` is not the fast one of this platform; empty if it is, or if there is no
        other.
    """

    kernel: str
    merge: str
    fallback: str = ""


def attention_kernels(
    device: torch.device, dtype: torch.dtype, heads: int, head_dim: int, implementation: str
) -> AttentionKernels:
    """Returns the kernels for q [tokens, heads, head_dim] of this type on this device.

    implementation: attention.implementation.
    """
    if implementation == "dense":
        return AttentionKernels("dense", "none")
    if implementation in ("sdpa", "eager"):
        return AttentionKernels(f"transformers {implementation}", "none")
    kernel = kernel_name(torch.empty(1, heads, head_dim, dtype=dtype, device=device))
    if kernel == "npu-fusion":
        from pa_npu.attention.lse_merge import kernel_obstacle

        obstacle = kernel_obstacle(device, dtype, head_dim)
        if obstacle:
            return AttentionKernels(kernel, "torch", fallback=obstacle)
        return AttentionKernels(kernel, "ascendc")
    if kernel == "cuda-flash":
        from pa_npu.attention.kernels.cuda import merge_name

        merge = merge_name()
        fallback = "" if merge == "triton" else "triton is not installed"
        return AttentionKernels(kernel, merge, fallback)
    return AttentionKernels(kernel, "torch")

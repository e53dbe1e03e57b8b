"""shared_prompt_attention: the one entry point; it checks its input and chooses form and kernel."""

from __future__ import annotations

import torch

from pa_npu.attention.dense import dense_attention
from pa_npu.attention.forms import gather_attention, merge_attention
from pa_npu.attention.kernels.choice import kernel_for
from pa_npu.attention.layout import PrefixLayout

IMPLEMENTATIONS = ("auto", "dense", "merge", "gather")


def shared_prompt_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: PrefixLayout,
    *,
    scale: float | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Attention in which every token sees its segment's ancestors and, causally, its own segment.

    q [total, heads, head_dim]; k, v [total, kv_heads, head_dim] with kv_heads dividing heads (GQA).
    scale: factor of the scores, head_dim ** -0.5 by default.
    impl: dense (reference, [heads, total, total] scores), merge, gather, or auto, which takes the faster of merge and
        gather for this layout on this platform. There is no fallback from one to another.
    Returns [total, heads, head_dim] in q's dtype, differentiable in q, k and v.
    Raises ValueError naming what it cannot take.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl: {impl!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    _check(q, k, v, layout)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if impl == "dense":
        return dense_attention(q, k, v, layout, scale)
    if layout.total == 0:
        return q * 1.0
    kernel = kernel_for(q)
    if impl == "gather" or (impl == "auto" and kernel.prefers_gather(layout)):
        return gather_attention(q, k, v, layout, scale, kernel)
    return merge_attention(q, k, v, layout, scale, kernel)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PrefixLayout) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 3 or tensor.shape[0] != layout.total:
            raise ValueError(
                f"{name}: shape {tuple(tensor.shape)} must be [tokens, heads, head_dim] with {layout.total} tokens, "
                f"the sum of the layout's segments 0 to {len(layout.lengths) - 1}"
            )
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name}: {tensor.dtype} on {tensor.device} must match q, which is {q.dtype} on {q.device}"
            )
    if k.shape != v.shape or k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} must have one shape and q's head_dim {q.shape[-1]}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q: {q.shape[1]} heads must be a multiple of the {k.shape[1]} key/value heads")

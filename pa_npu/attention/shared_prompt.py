"""shared_prompt_attention: the one entry point; it checks its input and chooses form and kernel."""

from __future__ import annotations

import torch

from pa_npu.attention.dense import dense_attention
from pa_npu.attention.layout import PrefixLayout

IMPLEMENTATIONS = ("auto", "dense")


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
    Returns [total, heads, head_dim] in q's dtype, differentiable in q, k and v. Raises ValueError on input it cannot take.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl: {impl!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    _check(q, k, v, layout)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return dense_attention(q, k, v, layout, scale)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PrefixLayout) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 3 or tensor.shape[0] != layout.total:
            raise ValueError(
                f"{name}: shape {tuple(tensor.shape)} must be [tokens, heads, head_dim] with the layout's {layout.total} "
                f"tokens (segments 0 to {len(layout.lengths) - 1})"
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

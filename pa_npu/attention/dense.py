"""Dense form of shared-prompt attention: the full masked score matrix, as the reference on every device."""

from __future__ import annotations

import torch

from pa_npu.attention.layout import PrefixLayout


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PrefixLayout, scale: float
) -> torch.Tensor:
    """Softmax(q k^T scale + mask) v written out; [heads, total, total] scores in fp32 (fp64 for fp64).

    q [total, heads, head_dim], k and v [total, kv_heads, head_dim] -> [total, heads, head_dim].
    """
    total, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    accumulate = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(accumulate).view(total, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("ignd,jgd->gnij", grouped, k.to(accumulate)) * scale
    scores = scores.masked_fill(~layout.dense_mask(q.device), float("-inf"))
    out = torch.einsum("gnij,jgd->ignd", scores.softmax(-1), v.to(accumulate))
    return out.reshape(total, heads, head_dim).to(q.dtype)

"""CPU kernel: torch's blocked flash attention, one call per run of equally long sequences."""

from __future__ import annotations

from functools import cache

import torch

from pa_npu.attention.kernels.base import MergesByLse, Partial
from pa_npu.attention.layout import PrefixLayout
from pa_npu.attention.plans import Run, VarlenCall

# Elements: 1 MiB in fp32.
_MAX_KEPT_MASK = 2**18
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuFlash(MergesByLse):
    """Stats are (log-sum-exp [rows, heads],).

    Two traps of the operator: its causal mask is aligned top-left, so unequal lengths need an
    explicit mask; an empty query kills the process with SIGFPE, which is why a VarlenCall has no
    empty sequences.
    """

    per_depth = False  # a cross call per segment works on views, without gathering rows

    def prefers_gather(self, layout: PrefixLayout) -> bool:
        # Forward and backward on one core, fp32, heads of 64, gather over merge for (P, R, G): 14
        # query and 2 kv heads (8,32,8) 1.25x, (16,64,8) 1.14, (64,64,8) 1.04, (64,256,8) 1.06,
        # (128,64,8) 1.03, (128,256,8) 1.02; 8 and 2 (64,384,4) 1.02, (128,128,8) 0.99, (128,384,4)
        # 0.93, (256,64,8) 0.96, (256,256,4) 0.93; (256,1024,4) 0.76. The explicit mask of long
        # sequences computes what a causal call skips; short prompts make merging dear.
        return 0 < max(layout.offsets) <= 128 and layout.longest < 512

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: VarlenCall, scale: float
    ) -> Partial:
        k = _expand_heads(k, q.shape[1])
        v = _expand_heads(v, q.shape[1])
        outs = []
        lses = []
        for run in call.runs:
            mask, causal = _mask(call, run, q)
            out, lse = _forward(
                _batch_q(q, run), run.keys(k), run.keys(v), 0.0, causal, attn_mask=mask, scale=scale
            )
            outs.append(_unbatch(out))
            lses.append(lse.transpose(1, 2).flatten(0, 1))
        return Partial(_join(outs), (_join(lses),), call)

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        result: Partial,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        kv_heads = k.shape[1]
        k = _expand_heads(k, q.shape[1])
        v = _expand_heads(v, q.shape[1])
        grads = []
        for run in result.call.runs:
            mask, causal = _mask(result.call, run, q)
            parts = _backward(
                _batch_q(grad, run),
                _batch_q(q, run),
                run.keys(k),
                run.keys(v),
                _batch_q(result.out, run),
                _batch_q(result.stats[0], run),
                0.0,
                causal,
                attn_mask=mask,
                scale=scale,
            )
            grads.append([_unbatch(part) for part in parts])
        dq, dk, dv = (_join([parts[side] for parts in grads]) for side in range(3))
        return dq, _sum_heads(dk, kv_heads), _sum_heads(dv, kv_heads)


def _batch_q(x: torch.Tensor, run: Run) -> torch.Tensor:
    """[rows, heads(, head_dim)] -> [count, heads, length(, head_dim)], a view."""
    x = x.narrow(0, run.q_start, run.count * run.q_length)
    return x.view(run.count, run.q_length, *x.shape[1:]).transpose(1, 2)


def _unbatch(x: torch.Tensor) -> torch.Tensor:
    """[count, heads, length, head_dim] -> [rows, heads, head_dim]; a view, since the operator's
    memory is row-major.
    """
    return x.transpose(1, 2).flatten(0, 1)


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _mask(call: VarlenCall, run: Run, like: torch.Tensor) -> tuple[torch.Tensor | None, bool]:
    """Returns the operator's mask and causal flag for a bottom-right causal run.

    All layers share a mask, unless it is large.
    """
    if not call.causal or run.q_length == run.k_length:
        return None, call.causal

    def build() -> torch.Tensor:
        blocked = torch.ones(run.q_length, run.k_length, dtype=torch.bool).triu(
            run.k_length - run.q_length + 1
        )
        return torch.zeros(blocked.shape, dtype=like.dtype).masked_fill_(blocked, float("-inf"))

    if run.q_length * run.k_length > _MAX_KEPT_MASK:
        return build(), False
    return call.tensor(
        f"mask of {run.q_length} x {run.k_length}, {like.dtype}", like.device, build
    ), False


@cache
def _has_gqa() -> bool:
    """Returns True if the operator takes fewer key/value heads than query heads.

    Newer torch does; older torch reads out of bounds or raises. One tiny call decides. It stays in
    bounds because the spare heads exist in memory.
    """
    q = torch.arange(8.0).view(1, 4, 1, 2)
    v = torch.arange(16.0).view(1, 4, 2, 2)
    try:
        out, _ = _forward(q, v[:, :2], v[:, :2])
    except RuntimeError:
        return False
    expected, _ = _forward(q, v[:, [0, 0, 1, 1]], v[:, [0, 0, 1, 1]])
    return torch.equal(out, expected)


def _expand_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeats key/value heads for the queries that share them, unless the operator can do it."""
    if x.shape[1] == heads or _has_gqa():
        return x
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _sum_heads(grad: torch.Tensor, kv_heads: int) -> torch.Tensor:
    if grad.shape[1] == kv_heads:
        return grad
    return grad.unflatten(1, (kv_heads, -1)).sum(2)

"""Portable kernel: attention as matrix products, for what a platform's own kernel does not take."""

from __future__ import annotations

import torch

from pa_npu.attention.kernels.base import MergesByLse, Partial
from pa_npu.attention.layout import PrefixLayout
from pa_npu.attention.plans import Run, VarlenCall

# elements of a block of scores (256 MiB in fp32); longer queries are taken in blocks
MAX_SCORES = 2**26


class Portable(MergesByLse):
    """Stats are (log-sum-exp [rows, heads],). Any device and floating dtype; scores and sums in
    fp32, fp64 for fp64.

    The backward is that of FlashAttention (Dao et al. 2022, algorithm 4) without the tiling over
    keys.
    """

    per_depth = False

    def prefers_gather(self, layout: PrefixLayout) -> bool:
        # Not measured. The portable kernel is there for correctness; merge needs less memory.
        return False

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: VarlenCall, scale: float
    ) -> Partial:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=wide, device=q.device)
        kv_heads = k.shape[1]
        for run in call.runs:
            keys = run.keys(k).to(wide)
            values = run.keys(v).to(wide)
            for first, stop in _blocks(run, q.shape[1]):
                scores = _scores(
                    _batch_q(q, run, kv_heads, first, stop), keys, run, call.causal, first, scale
                )
                block_lse = scores.logsumexp(-1)
                block = (scores - block_lse.unsqueeze(-1)).exp_() @ values.unsqueeze(2)
                _put(out, run, first, stop, block)
                _put(lse, run, first, stop, block_lse)
        return Partial(out, (lse,), call)

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        result: Partial,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        kv_heads = k.shape[1]
        dq = torch.empty_like(q)
        dk = torch.empty_like(k)
        dv = torch.empty_like(v)
        for run in result.call.runs:
            keys = run.keys(k).to(wide)
            values = run.keys(v).to(wide)
            dkeys = torch.zeros_like(keys)
            dvalues = torch.zeros_like(values)
            for first, stop in _blocks(run, q.shape[1]):
                queries, grads, outs, lse = (
                    _batch_q(x, run, kv_heads, first, stop)
                    for x in (q, grad, result.out, result.stats[0])
                )
                probabilities = (
                    _scores(queries, keys, run, result.call.causal, first, scale)
                    .sub_(lse.unsqueeze(-1))
                    .exp_()
                )
                correction = (grads * outs).sum(-1, keepdim=True)
                dscores = (
                    (grads @ values.unsqueeze(2).mT)
                    .sub_(correction)
                    .mul_(probabilities)
                    .mul_(scale)
                )
                _put(dq, run, first, stop, dscores @ keys.unsqueeze(2))
                dkeys += (dscores.mT @ queries).sum(2)
                dvalues += (probabilities.mT @ grads).sum(2)
            rows = slice(run.k_start, run.k_start + run.count * run.k_length)
            dk[rows] = dkeys.transpose(1, 2).flatten(0, 1).to(k.dtype)
            dv[rows] = dvalues.transpose(1, 2).flatten(0, 1).to(v.dtype)
        return dq, dk, dv


def _blocks(run: Run, heads: int) -> list[tuple[int, int]]:
    """Query rows [first, stop) of every sequence of the run whose scores fit."""
    step = max(1, MAX_SCORES // (run.count * heads * run.k_length))
    return [(first, min(first + step, run.q_length)) for first in range(0, run.q_length, step)]


def _batch_q(x: torch.Tensor, run: Run, kv_heads: int, first: int, stop: int) -> torch.Tensor:
    """[rows, heads(, head_dim)] -> fp32 [count, kv_heads, heads per kv head, stop - first(,
    head_dim)].
    """
    x = x.narrow(0, run.q_start, run.count * run.q_length).unflatten(0, (run.count, run.q_length))[
        :, first:stop
    ]
    return (
        x.transpose(1, 2)
        .unflatten(1, (kv_heads, -1))
        .to(torch.promote_types(x.dtype, torch.float32))
    )


def _scores(
    queries: torch.Tensor, keys: torch.Tensor, run: Run, causal: bool, first: int, scale: float
) -> torch.Tensor:
    """Masked scores [count, kv_heads, heads per kv head, rows, k_length]; query `first` is the
    block's first.
    """
    scores = (queries @ keys.unsqueeze(2).mT) * scale
    if causal:
        rows, columns = scores.shape[-2:]
        visible = run.k_length - run.q_length + first
        blocked = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).triu(
            visible + 1
        )
        scores.masked_fill_(blocked, float("-inf"))
    return scores


def _put(x: torch.Tensor, run: Run, first: int, stop: int, block: torch.Tensor) -> None:
    """Writes a block of the run into packed rows, the inverse of _batch_q."""
    target = x.narrow(0, run.q_start, run.count * run.q_length).unflatten(
        0, (run.count, run.q_length)
    )
    target[:, first:stop] = block.flatten(1, 2).transpose(1, 2).to(x.dtype)

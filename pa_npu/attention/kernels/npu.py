"""Ascend kernel: npu_fusion_attention and its gradient in TND layout.

Partial results are merged by the Ascend C operator or by torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch

from pa_npu.attention.kernels.base import Partial
from pa_npu.attention.layout import PrefixLayout
from pa_npu.attention.lse_merge import lse_merge_
from pa_npu.attention.plans import CrossCall, VarlenCall
from pa_npu.errors import UserError

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 768
MAX_SEQUENCES = 1024  # of one TND call
CAUSAL = 3  # sparse_mode: bottom-right causal with the compressed mask below
MASK_SIZE = 2048  # the operator wants this upper triangle whatever the lengths are


@dataclass(frozen=True)
class StatsLayout:
    """How the operator lays out its statistics [rows, heads, 8].

    argument: what to pass as softmax_layout, None for the default.
    memory: "TND" as the shape says, or "NTD": [heads, length, 8] per sequence of the call, one
        after another, though the shape says otherwise. NTD is the default, and the only layout
        before CANN 8.3.
    """

    argument: str | None
    memory: str


class NpuFusion:
    """Stats are (maximum, sum of exponentials), fp32 [rows, heads, 8] of eight equal copies, see
    StatsLayout.
    """

    per_depth = True

    def prefers_gather(self, layout: PrefixLayout) -> bool:
        # Not measured yet. By arithmetic merge moves less: gather copies the shared keys and values
        # per response.
        return False

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: VarlenCall, scale: float
    ) -> Partial:
        _check(q, call)
        out, maximum, total, *_ = torch.ops.npu.npu_fusion_attention(
            q, k, v, q.shape[1], "TND", scale=scale, **_arguments(call, q)
        )
        return Partial(out, (maximum, total), call)

    def merge(self, running: Partial, part: Partial, cross: CrossCall) -> None:
        maximum, total = running.stats
        part_maximum, part_total = part.stats
        is_ntd = stats_layout(running.out.device, running.out.dtype).memory == "NTD"
        lengths = (running.call.q_lengths, part.call.q_lengths) if is_ntd else ()
        lse_merge_(
            running.out,
            maximum,
            total,
            part.out,
            part_maximum,
            part_total,
            cross.q_rows.spans,
            *lengths,
        )

    def select(self, running: Partial, cross: CrossCall) -> Partial:
        out = cross.q_rows.take(running.out)
        if stats_layout(out.device, out.dtype).memory == "TND":
            return Partial(
                out, tuple(cross.q_rows.take(stats) for stats in running.stats), cross.call
            )
        heads = out.shape[1]
        index = cross.call.tensor(
            f"ntd_rows_{heads}", out.device, lambda: _ntd_rows(running.call, cross, heads)
        )
        stats = tuple(
            x.flatten(0, 1).index_select(0, index).view(-1, heads, x.shape[-1])
            for x in running.stats
        )
        return Partial(out, stats, cross.call)

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        result: Partial,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        maximum, total = result.stats
        dq, dk, dv, *_ = torch.ops.npu.npu_fusion_attention_grad(
            q,
            k,
            v,
            grad.contiguous(),
            q.shape[1],
            "TND",
            softmax_max=maximum,
            softmax_sum=total,
            attention_in=result.out,
            scale_value=scale,
            **_arguments(result.call, q),
        )
        return dq, dk, dv


def _check(q: torch.Tensor, call: VarlenCall) -> None:
    if q.dtype not in DTYPES:
        raise ValueError(
            f"q: npu_fusion_attention takes {DTYPES}, not {q.dtype}; cast, or use impl=dense"
        )
    if q.shape[-1] > MAX_HEAD_DIM:
        raise ValueError(
            f"q: head_dim {q.shape[-1]} exceeds npu_fusion_attention's {MAX_HEAD_DIM}; use "
            "impl=dense"
        )
    if len(call.q_lengths) > MAX_SEQUENCES:
        raise ValueError(
            f"segment {MAX_SEQUENCES}: npu_fusion_attention takes {MAX_SEQUENCES} sequences in one "
            f"call, the layout has {len(call.q_lengths)}; put fewer responses into a microbatch"
        )


def _arguments(call: VarlenCall, q: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments that forward and gradient share.

    Without a mask the operator ignores sparse_mode.
    """
    arguments: dict[str, Any] = {
        "actual_seq_qlen": list(call.q_ends),
        "actual_seq_kvlen": list(call.k_ends),
        "atten_mask": _causal_mask(q.device) if call.causal else None,
        "sparse_mode": CAUSAL if call.causal else 0,
    }
    layout = stats_layout(q.device, q.dtype)
    if layout.argument is not None:
        arguments["softmax_layout"] = layout.argument
    return arguments


@cache
def _causal_mask(device: torch.device) -> torch.Tensor:
    """bool [2048, 2048], True above the diagonal: what must not be seen."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool).triu(1).to(device)


def _ntd_rows(running: VarlenCall, cross: CrossCall, heads: int) -> torch.Tensor:
    """Returns for each statistic of the cross call its place in the NTD memory of the running call.

    The statistics of the cross call are in the order of its NTD memory.
    """
    rows = torch.cat([torch.arange(start, end) for start, end in cross.q_rows.spans])
    index = torch.empty(len(rows) * heads, dtype=torch.int64)
    index[_ntd_places(cross.call.q_lengths, heads).flatten()] = _ntd_places(
        running.q_lengths, heads
    )[rows].flatten()
    return index


def _ntd_places(lengths: tuple[int, ...], heads: int) -> torch.Tensor:
    """Returns where NTD memory holds the statistic of a row and head, int64 [rows, heads]."""
    starts = torch.tensor([0, *accumulate(lengths)][:-1]).repeat_interleave(torch.tensor(lengths))
    length = torch.tensor(lengths).repeat_interleave(torch.tensor(lengths))
    within = torch.arange(len(starts)) - starts
    return (starts * heads + within)[:, None] + torch.arange(heads) * length[:, None]


@cache
def stats_layout(device: torch.device, dtype: torch.dtype) -> StatsLayout:
    """Find the layout that the operator on this device uses for queries of `dtype`, by one tiny
    call whose maxima are known.

    fp32 keeps to the default, because with another layout the operator leaves the templates that
    are deterministic. An operator without the argument, or a CANN without the kernel behind it
    (aclnnFlashAttentionVarLenScoreV4), has only the default. Raises UserError if the maxima are in
    neither layout.
    """
    known = {
        argument.name for argument in torch.ops.npu.npu_fusion_attention.default._schema.arguments
    }
    if "softmax_layout" in known and dtype != torch.float32:
        try:
            return StatsLayout("TND", _memory(device, dtype, {"softmax_layout": "TND"}))
        except RuntimeError as error:
            if "softmax_layout" not in str(error):
                raise
    return StatsLayout(None, _memory(device, dtype, {}))


def _memory(device: torch.device, dtype: torch.dtype, keywords: dict[str, str]) -> str:
    """Returns the layout of the statistics in memory, TND or NTD.

    Raises UserError if it is neither, RuntimeError as torch_npu does when it takes no `keywords`.
    """
    lengths = (2, 3)
    heads = 2
    # There is one key per sequence and head: the maximum of row t and head n is their score, which
    # is 1, 2, ... in TND order.
    scores = torch.arange(1.0, 1 + sum(lengths) * heads).view(-1, heads)
    q = torch.zeros(sum(lengths), heads, 16)
    q[:, :, 0] = scores
    k = torch.zeros(len(lengths), 1, 16)
    k[:, :, 0] = 1.0
    q = q.to(dtype).to(device)
    k = k.to(dtype).to(device)
    _, maximum, *_ = torch.ops.npu.npu_fusion_attention(
        q,
        k,
        k,
        heads,
        "TND",
        scale=1.0,
        actual_seq_qlen=[2, 5],
        actual_seq_kvlen=[1, 2],
        **keywords,
    )
    maxima = maximum.cpu()[..., 0].flatten()
    if torch.equal(maxima, scores.flatten()):
        return "TND"
    if torch.equal(maxima[_ntd_places(lengths, heads).flatten()], scores.flatten()):
        return "NTD"
    raise UserError(
        "attention.implementation: npu_fusion_attention returned the softmax maxima "
        f"{maxima.tolist()} in an order that is neither TND nor NTD; use CANN 8.3 or later, or "
        "attention.implementation=dense"
    )

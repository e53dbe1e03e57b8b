"""VarlenKernel: what a platform has to provide for shared-prompt attention."""

from __future__ import annotations

from typing import Protocol

import torch

from pa_npu.attention.plan import Rows, VarlenCall

# What a kernel remembers about each row's softmax so that partial results can be merged and differentiated: the
# log-sum-exp, or maximum and sum. Its shape is the kernel's own affair; fp32, or fp64 where q is fp64.
Stats = tuple[torch.Tensor, ...]


class VarlenKernel(Protocol):
    """Variable-length attention on packed tensors, in parts.

    Shapes: q, out, grad [query rows, heads, head_dim]; k, v [key rows, kv_heads, head_dim].
    The backward of a part takes the MERGED out and stats: its softmax is then normalised over all parts, so that the
    parts' gradients simply add up (exact; the trick of ring attention).
    """

    name: str
    per_depth: bool  # whether the merge plan should have one cross call per depth (see plan.merge_plan)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: VarlenCall, scale: float
    ) -> tuple[torch.Tensor, Stats]:
        """Output and stats of one call."""
        ...

    def take(self, stats: Stats, rows: Rows) -> Stats:
        """The stats of some rows."""
        ...

    def merge(self, out: torch.Tensor, stats: Stats, part: torch.Tensor, part_stats: Stats, rows: Rows) -> None:
        """Merge a partial result for some rows into the running result, in place."""
        ...

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        stats: Stats,
        call: VarlenCall,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of q, k and v of one call, from the merged out and stats of its query rows."""
        ...

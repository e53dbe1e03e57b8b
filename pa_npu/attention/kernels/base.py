"""VarlenKernel: what a platform provides for shared-prompt attention, and code that kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from pa_npu.attention.layout import PrefixLayout
from pa_npu.attention.plans import CrossCall, VarlenCall
from pa_npu.attention.rows import Rows


@dataclass(frozen=True, eq=False)
class Partial:
    """Attention of some query rows over some of their keys.

    out: [query rows, heads, head_dim].
    stats: what a kernel keeps of each row's softmax, so that partial results can be merged
        and differentiated: the log-sum-exp, or maximum and sum. Each kernel decides on the number
        and layout of these tensors.
    call: the call that computed it, which says how the rows are cut into sequences.
    """

    out: torch.Tensor
    stats: tuple[torch.Tensor, ...]
    call: VarlenCall


class VarlenKernel(Protocol):
    """Variable-length attention on packed tensors, in parts.

    Shapes: q, grad [query rows, heads, head_dim]; k, v [key rows, kv_heads, head_dim].
    """

    # True if the merge plan should have one cross call per depth (see plans.merge_plan).
    per_depth: bool

    def prefers_gather(self, layout: PrefixLayout) -> bool:
        """Returns True if the gather form was measured to be faster here than the merge form."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: VarlenCall, scale: float
    ) -> Partial:
        """Output and stats of one call."""

    def merge(self, running: Partial, part: Partial, cross: CrossCall) -> None:
        """Merge the result of a cross call into the running result over all rows, in place."""

    def select(self, running: Partial, cross: CrossCall) -> Partial:
        """Returns the rows of the running result that a cross call computed.

        They are in the form that the backward of the cross call needs.
        """

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        result: Partial,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of q, k and v of result.call.

        `result` holds the MERGED output and stats: the part's softmax is then normalised over all
        parts, so that the gradients of the parts simply add up (exact, as in ring attention).
        """


def merge_lse(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor, rows: Rows
) -> None:
    """Merges two partial attention results by log-sum-exp, on every device.

    Updates out [T, heads, head_dim] and lse [T, heads] in place at `rows` by a part over disjoint
    keys.

    The weights of the two sides are sigmoids of the difference of their log-sum-exps, so one
    interpolation does it. The running side always has a visible key (a causal part sees itself), so
    the difference is never inf - inf.
    """
    old_lse = rows.take(lse)
    weight = torch.sigmoid(part_lse - old_lse).unsqueeze(-1)
    old = rows.take(out)
    if out.dtype == weight.dtype and rows.span is not None:
        old.lerp_(part, weight)
    else:
        rows.put_(
            out, torch.lerp(old.to(weight.dtype), part.to(weight.dtype), weight).to(out.dtype)
        )
    rows.put_(lse, torch.logaddexp(old_lse, part_lse))


class MergesByLse:
    """Merging of kernels whose stats are (log-sum-exp [rows, heads],)."""

    def merge(self, running: Partial, part: Partial, cross: CrossCall) -> None:
        merge_lse(running.out, running.stats[0], part.out, part.stats[0], cross.q_rows)

    def select(self, running: Partial, cross: CrossCall) -> Partial:
        return Partial(
            cross.q_rows.take(running.out), (cross.q_rows.take(running.stats[0]),), cross.call
        )

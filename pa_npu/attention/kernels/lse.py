"""Merging two partial attention results by log-sum-exp, in plain torch for every device."""

from __future__ import annotations

import torch

from pa_npu.attention.plan import Rows


def merge_lse(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor, rows: Rows) -> None:
    """Update out [T, heads, head_dim] and lse [T, heads] in place at `rows` by a part over disjoint keys.

    The weights of the two sides are sigmoids of the difference of their log-sum-exps, so one interpolation does it. The
    running side always has a visible key (a causal part sees itself), so the difference is never inf - inf.
    """
    old_lse = rows.take(lse)
    weight = torch.sigmoid(part_lse - old_lse).unsqueeze(-1)
    old = rows.take(out)
    if out.dtype == weight.dtype and rows.span is not None:
        old.lerp_(part, weight)
    else:
        rows.put_(out, torch.lerp(old.to(weight.dtype), part.to(weight.dtype), weight).to(out.dtype))
    rows.put_(lse, torch.logaddexp(old_lse, part_lse))

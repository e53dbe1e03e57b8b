"""The sum of gradients over shards, with what every rank brings to it and what is left of it counted (invariant I7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pa_npu.algorithm.update_sums import ReducedGradient

# named so from torch 2.13 on
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CountedReduceScatter:
    """FSDP2's reduce-scatter of one group of parameters; torch's `ReduceScatter` interface. Counts until `restart`."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin another update."""
        self.own: torch.Tensor | None = None
        self.squares: torch.Tensor | None = None
        self.reduced: torch.Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        own, squares = input_tensor.sum(dtype=torch.float32), input_tensor.float().square().sum()
        _reduce_scatter(output_tensor, input_tensor, group=group, op=op)
        reduced = output_tensor.sum(dtype=torch.float32)
        if self.own is None or self.squares is None or self.reduced is None:
            self.own, self.squares, self.reduced = own, squares, reduced
        else:
            self.own, self.squares, self.reduced = self.own + own, self.squares + squares, self.reduced + reduced


def counted(reductions: Sequence[CountedReduceScatter], device: torch.device) -> ReducedGradient:
    """The update's counts, a bucket for each group of parameters; NaN where nothing was reduced."""
    missing = torch.full((), torch.nan, device=device)

    def column(name: str) -> torch.Tensor:
        values = [getattr(one, name) for one in reductions]
        return torch.stack([missing if value is None else value for value in values])

    return ReducedGradient(column("own"), column("squares"), column("reduced"))

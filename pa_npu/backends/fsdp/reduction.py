"""The sum of gradients over shards, with a sample of what every rank brings to it and of what is left counted (invariant I7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pa_npu.algorithm.update_sums import SAMPLED_EVERY, ReducedGradient

# named so from torch 2.13 on
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CountedReduceScatter:
    """FSDP2's reduce-scatter of one group of parameters; torch's `ReduceScatter` interface. Counts until `restart`.

    copies: replicas of the shards, over which FSDP2 sums what was scattered. `take_reduced` is its hook behind both.
    """

    def __init__(self, copies: int) -> None:
        self._copies = copies
        self._input: torch.Tensor | None = None
        self.restart()

    def restart(self) -> None:
        """Begin another update."""
        self.own: torch.Tensor | None = None
        self.squares: torch.Tensor | None = None
        self.reduced: torch.Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the input, then for the output."""
        memory = torch.empty(*size, dtype=dtype, device=device)
        self._input = memory if self._input is None else self._input
        return memory

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        _reduce_scatter(output_tensor, input_tensor, group=group, op=op)

    def take_reduced(self, reduced: torch.Tensor) -> None:
        own, self._input = self._input, None
        assert own is not None, "its memory was allocated here"
        # of every rank's chunk the elements that this rank takes of its own, once it is reduced
        sample = own.view(-1, len(reduced))[:, ::SAMPLED_EVERY].float()
        self.own = _plus(self.own, sample.sum())
        self.squares = _plus(self.squares, sample.square().sum())
        self.reduced = _plus(self.reduced, reduced[::SAMPLED_EVERY].sum(dtype=torch.float32) / self._copies)


def _plus(total: torch.Tensor | None, more: torch.Tensor) -> torch.Tensor:
    return more if total is None else total + more


def counted(reductions: Sequence[CountedReduceScatter], device: torch.device) -> ReducedGradient:
    """The update's counts, a bucket for each group of parameters; NaN where nothing was reduced."""
    missing = torch.full((), torch.nan, device=device)

    def column(name: str) -> torch.Tensor:
        values = [getattr(one, name) for one in reductions]
        return torch.stack([missing if value is None else value for value in values])

    return ReducedGradient(column("own"), column("squares"), column("reduced"))

"""Reductions over process groups of torch, as most backends have them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class GroupReductions:
    """Reductions (algorithm.update_sums). replica_group, stage_group: None where this rank is alone.

    gradient_group: None where it is replica_group.
    """

    replica_group: dist.ProcessGroup | None = None
    stage_group: dist.ProcessGroup | None = None
    gradient_group: dist.ProcessGroup | None = None

    def replicas(self, values: torch.Tensor, *, largest: bool = False) -> torch.Tensor:
        return values if self.replica_group is None else _reduce(values, largest, self.replica_group)

    def gradients(self, values: torch.Tensor) -> torch.Tensor:
        return self.replicas(values) if self.gradient_group is None else _reduce(values, False, self.gradient_group)

    def stages(self, values: torch.Tensor, *, largest: bool = False) -> torch.Tensor:
        return values if self.stage_group is None else _reduce(values, largest, self.stage_group)

    def ranks(self, values: torch.Tensor, *, largest: bool = False) -> torch.Tensor:
        return _reduce(values, largest, None)


def _reduce(values: torch.Tensor, largest: bool, group: dist.ProcessGroup | None) -> torch.Tensor:
    dist.all_reduce(values, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return values

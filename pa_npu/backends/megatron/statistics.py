"""Sums over an update's microbatches, reduced over the ranks that hold them into the numbers of a report."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from pa_npu.samples.microbatch import Microbatch


@dataclass
class IterationTotals:
    """What one replica has consumed for one update; equal on all its ranks, because every stage reads every microbatch."""

    tokens_response: int = 0
    tokens_computed: int = 0
    num_responses: int = 0
    num_microbatches: int = 0

    def add(self, microbatch: Microbatch) -> None:
        self.tokens_response += microbatch.num_response_tokens
        self.tokens_computed += microbatch.num_computed_tokens
        self.num_responses += microbatch.num_sequences
        self.num_microbatches += 1

    def over_replicas(self, device: torch.device) -> IterationTotals:
        """The totals of all replicas (collective over the data-parallel group)."""
        values = torch.tensor(
            [self.tokens_response, self.tokens_computed, self.num_responses, self.num_microbatches],
            dtype=torch.int64,
            device=device,
        )
        dist.all_reduce(values, group=parallel_state.get_data_parallel_group())
        return IterationTotals(*(int(v) for v in values.tolist()))


@dataclass
class MetricSums:
    """Named sums and maxima that only the last pipeline stage computes."""

    names: tuple[str, ...]
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    difference_max: torch.Tensor | None = None

    def add(self, metrics: dict[str, torch.Tensor], difference_max: torch.Tensor) -> None:
        for name in self.names:
            value = metrics[name].float()
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.difference_max = (
            difference_max if self.difference_max is None else torch.maximum(self.difference_max, difference_max)
        )

    def over_ranks(self, device: torch.device) -> tuple[dict[str, float], float]:
        """Sums over replicas and the overall maximum, known to every rank afterwards (collective over data and pipeline groups)."""
        zero = torch.zeros((), device=device)
        vector = torch.stack([self.sums.get(name, zero) for name in self.names])
        largest = zero.clone() if self.difference_max is None else self.difference_max.float().clone()
        # stages other than the last hold zeros, so the sum over the pipeline is a broadcast of the last stage's values
        for group in (parallel_state.get_data_parallel_group(), parallel_state.get_pipeline_model_parallel_group()):
            dist.all_reduce(vector, group=group)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return dict(zip(self.names, vector.tolist(), strict=True)), float(largest)


def mean_over_world(values: dict[str, float], device: torch.device) -> dict[str, float]:
    """The mean of each value over all trainer ranks."""
    vector = torch.tensor(list(values.values()), dtype=torch.float32, device=device)
    dist.all_reduce(vector)
    return dict(zip(values, (vector / dist.get_world_size()).tolist(), strict=True))

"""Sums of gradients before and after Megatron's reduction over replicas, for a check to add up (I7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pa_npu.algorithm.update_sums import SAMPLED_EVERY, ReducedGradient
from pa_npu.config.mesh import Place


class WatchedReduction:
    """Notes sums of each bucket of a rank's DistributedDataParallel, right before its reduction begins and after it ends."""

    def __init__(self, ddp: Any, place: Place) -> None:
        mesh = place.mesh
        self._groups = [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]
        replicas, copies = (mesh.data, place.replica), (mesh.expert_data, place.coordinate("expert_data"))
        self._shares = {id(group): replicas for group in ddp.bucket_groups}
        self._shares |= {id(group): copies for group in ddp.expert_parallel_bucket_groups}
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._after: dict[int, torch.Tensor] = {}
        for group in self._groups:
            self._watch(group, group.start_grad_sync, group.finish_grad_sync)

    def take(self) -> ReducedGradient:
        """Returns the sums of the reduction that has ended, and forgets them."""
        buckets = [bucket for group in self._groups for bucket in group.buckets]
        none = torch.full((), torch.nan, device=buckets[0].grad_data.device)
        own = [self._before.get(id(bucket), (none, none)) for bucket in buckets]
        reduced = [self._after.get(id(bucket), none) for bucket in buckets]
        self._before, self._after = {}, {}
        sums, squares = zip(*own, strict=True)
        return ReducedGradient(torch.stack(sums), torch.stack(squares), torch.stack(reduced))

    def _watch(self, group: Any, start: Callable[..., None], finish: Callable[..., None]) -> None:
        def noted_start(*args: Any, **kwargs: Any) -> None:
            self._note_own(group)
            start(*args, **kwargs)

        def noted_finish(*args: Any, **kwargs: Any) -> None:
            finish(*args, **kwargs)
            self._note_reduced(group)

        group.start_grad_sync, group.finish_grad_sync = noted_start, noted_finish

    def _note_own(self, group: Any) -> None:
        for bucket in group.buckets:
            sample = bucket.grad_data[::SAMPLED_EVERY]
            self._before[id(bucket)] = sample.sum(), sample.square().sum()

    def _note_reduced(self, group: Any) -> None:
        """A rank's share is the part that the distributed optimizer would step on it."""
        for bucket in group.buckets:
            gradient = bucket.grad_data
            ranks, rank = self._shares[id(group)]
            size = -(-gradient.numel() // ranks)
            start = size * rank
            self._after[id(bucket)] = gradient[start + -start % SAMPLED_EVERY : start + size : SAMPLED_EVERY].sum()


def gradient_size(ddp: Any) -> torch.Tensor:
    """The norm of a sample of what this rank's gradient buffers hold."""
    buffers = [*ddp.buffers, *ddp.expert_parallel_buffers]
    return torch.stack([torch.linalg.vector_norm(buffer.grad_data[::SAMPLED_EVERY]) for buffer in buffers]).norm()

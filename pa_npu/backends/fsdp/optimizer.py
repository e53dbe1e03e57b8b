"""AdamW over sharded fp32 weights, gradients clipped by their norm over all ranks, and the learning rate by updates."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from pa_npu.algorithm.update_sums import SAMPLED_EVERY
from pa_npu.config.schema import Config

_MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedAdamW:
    """The optimizer of one rank. Weights of one dimension, norms and biases, are not decayed.

    summed_in: type in which squares are summed for the norm; HCCL sums no fp64.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], config: Config, summed_in: torch.dtype) -> None:
        options = config.optimizer
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._config = config
        self._summed_in = summed_in
        self.updates = 0
        groups = [
            {"params": [p for p in self._parameters if p.dim() > 1], "weight_decay": options.weight_decay},
            {"params": [p for p in self._parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=options.learning_rate,
            betas=options.betas,
            eps=options.epsilon,
            foreach=True,
        )
        # made now, so that every checkpoint holds it and every one can be loaded
        for parameter in self._parameters:
            moments = {name: torch.zeros_like(parameter.detach()) for name in _MOMENTS}
            self.adamw.state[parameter] = {"step": torch.zeros(()), **moments}

    @torch.no_grad()
    def moments(self) -> list[torch.Tensor]:
        """This rank's shards of them."""
        return [local(state[name]) for state in self.adamw.state.values() for name in _MOMENTS]

    def resume(self, updates: int) -> None:
        """Go on after so many updates; the moments are loaded elsewhere."""
        self.updates = updates
        for state in self.adamw.state.values():
            state["step"].fill_(updates)

    def zero_grad(self) -> None:
        self.adamw.zero_grad(set_to_none=True)

    @torch.no_grad()
    def gradient_size(self) -> torch.Tensor:
        """The norm of a sample of this rank's shards of the gradient."""
        samples = [gradient.flatten()[::SAMPLED_EVERY] for gradient in self._gradients()]
        return torch.stack([torch.linalg.vector_norm(sample) for sample in samples]).norm()

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        for gradient in self._gradients():
            gradient.mul_(factor)

    @torch.no_grad()
    def step(self, shard_group: dist.ProcessGroup | None) -> tuple[float, float]:
        """Clip and apply; shard_group: ranks whose shards make the whole.

        Returns (gradient norm before clipping, learning rate).
        """
        squares = [gradient.to(self._summed_in).square().sum() for gradient in self._gradients()]
        total = torch.stack(squares).sum()
        if shard_group is not None:
            dist.all_reduce(total, group=shard_group)
        norm = math.sqrt(float(total.item()))
        most = self._config.optimizer.clip_grad
        if most and norm > most:
            self.scale_gradients(most / (norm + 1e-6))
        self.updates += 1
        rate = learning_rate(self._config, self.updates)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        if math.isfinite(norm):
            self.adamw.step()
        return norm, rate

    def _gradients(self) -> list[torch.Tensor]:
        return [local(p.grad) for p in self._parameters if p.grad is not None]


def learning_rate(config: Config, update: int) -> float:
    """The rate of an update, from 1: linear warm-up, then decay to the last iteration's. Update 1 of a warm-up of n has 1/n."""
    options = config.optimizer
    warmup, last = config.updates(options.warmup_iterations), config.updates(config.schedule.iterations)
    most, least = options.learning_rate, options.min_learning_rate
    if warmup and update <= warmup:
        return most * update / warmup
    last = max(last, warmup + 1)
    if options.decay == "constant":
        return most
    if update > last:
        return least
    share = (update - warmup) / (last - warmup)
    if options.decay == "linear":
        return least + (most - least) * (1.0 - share)
    return least + (most - least) * 0.5 * (math.cos(math.pi * share) + 1.0)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""The optimizer of a model stage: Megatron's mixed-precision (distributed) AdamW, and sums of the gradients that it gets (I7)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pa_npu.algorithm.update_sums import SAMPLED_EVERY, ReducedGradient
from pa_npu.backends.optimizer import learning_rate
from pa_npu.config.mesh import Place
from pa_npu.config.schema import Config


def build_optimizer(ddp: Any, config: Config) -> Any:
    """AdamW with fp32 master weights. The gradient norm is computed always; clip_grad=0 only never scales by it."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    bf16 = config.model.dtype == "bf16"
    options = config.optimizer
    megatron_config = OptimizerConfig(
        optimizer="adam",
        lr=options.learning_rate,
        min_lr=options.min_learning_rate,
        weight_decay=options.weight_decay,
        adam_beta1=options.betas[0],
        adam_beta2=options.betas[1],
        adam_eps=options.epsilon,
        clip_grad=options.clip_grad or math.inf,
        bf16=bf16,
        use_distributed_optimizer=config.trainer.distributed_optimizer,
    )
    return get_megatron_optimizer(megatron_config, [ddp])


def set_rates(optimizer: Any, config: Config, update: int) -> float:
    """Give every parameter group its learning rate in an update, which is returned, and weight decay where it belongs (not on norms
    and biases)."""
    rate = learning_rate(config, update)
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = rate, config.optimizer.weight_decay * group.get("wd_mult", 1.0)
    return rate


def state_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """The tensors that nothing but a step reads: moments, and weights in fp32 where the model has another type."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for name in ("shard_fp32_from_float16_groups", "fp32_from_float16_groups"):
            for group in getattr(part, name, ()):
                yield from group
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value) and value.dim())


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

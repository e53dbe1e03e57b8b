"""Megatron's mixed-precision (distributed) AdamW and the learning-rate schedule around a model stage."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

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


def build_scheduler(optimizer: Any, config: Config) -> Any:
    """Linear warm-up, then decay to the last iteration, counted in updates.

    Also applies weight decay only where it belongs (not on norms and biases).

    Step it before the optimizer: update 1 of a warm-up of n then has 1/n of the peak, and no update has rate 0.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    options = config.optimizer
    warmup, last = config.updates(options.warmup_iterations), config.updates(config.schedule.iterations)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.learning_rate,
        min_lr=options.min_learning_rate,
        lr_warmup_steps=warmup,
        lr_decay_steps=max(last, warmup + 1),
        lr_decay_style=options.decay,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=last,
        wd_incr_style="constant",
    )


def state_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """The tensors that nothing but a step reads: moments, and weights in fp32 where the model has another type."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for name in ("shard_fp32_from_float16_groups", "fp32_from_float16_groups"):
            for group in getattr(part, name, ()):
                yield from group
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value) and value.dim())

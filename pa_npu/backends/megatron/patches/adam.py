"""AdamW in the shape that Megatron's optimizers expect (that of apex): the step count lives in the parameter group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class FusedAdamW(torch.optim.Optimizer):
    """Decoupled-weight-decay Adam through torch's fused kernel.

    torch.optim.AdamW keeps a `step` tensor per parameter, which Megatron's distributed optimizer cannot reshard when a
    checkpoint is loaded; here the state of a parameter is `exp_avg` and `exp_avg_sq` alone.
    Formula: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", algorithm 2, with a constant schedule.
    """

    step_dtype = torch.float32
    """Type of the step count handed to the kernel; NPU's kernel wants int64."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        **_: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("closure: FusedAdamW takes none; compute the gradients before step()")
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            step = torch.full((), group["step"], dtype=self.step_dtype, device=params[0].device)
            self.fused_update(group, params, step)

    def fused_update(self, group: dict[str, Any], params: list[torch.Tensor], step: torch.Tensor) -> None:
        """Update `params` of one group in place; `step` counts from 1."""
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(
            params,
            [p.grad for p in params if p.grad is not None],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            [step] * len(params),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


class NpuAdamW(FusedAdamW):
    """FusedAdamW as Ascend's kernel takes it: an int64 step, one parameter per call."""

    step_dtype = torch.int64

    def fused_update(self, group: dict[str, Any], params: list[torch.Tensor], step: torch.Tensor) -> None:
        for parameter in params:
            super().fused_update(group, [parameter], step)

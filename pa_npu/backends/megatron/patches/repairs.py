"""Changes to megatron-core that its own pins, new torch or numpy, or a device without CUDA make necessary; see `table`."""

from __future__ import annotations

import functools
import inspect
import queue
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch

from pa_npu.errors import PaNpuError


def restore_numpy_product() -> None:
    import numpy as np

    if not hasattr(np, "product"):
        np.product = np.prod  # type: ignore[attr-defined]


def replace_megatron_jit() -> None:
    """Keep Megatron from compiling about 20 helpers at its import, which gains nothing outside
    CUDA. Before its import.
    """
    name = "megatron.core.jit"
    module: Any = types.ModuleType(name)
    module.jit_fuser = module.noop_decorator = lambda function: function
    module.enable_jit_fuser = module.disable_jit_fuser = lambda *args, **kwargs: None
    sys.modules.setdefault(name, module)


def answer_cuda_types(kind: str) -> None:
    """Megatron's optimizers compare param.type() with CUDA's type names: give them, and only them,
    the renamed one.
    """
    original = torch.Tensor.type

    def rename(name: str) -> str:
        return (
            name.replace("npu", "cuda")
            if kind == "npu"
            else name.replace("torch.", "torch.cuda.", 1)
        )

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return (
            rename(result) if isinstance(result, str) and caller.startswith("megatron.") else result
        )

    setattr(torch.Tensor, "type", type_)  # noqa: B010 - mypy refuses a plain assignment to a method


def install_adam(kind: str) -> None:
    """Make Megatron's optimizers use our apex-shaped Adam and treat it as apex's, unless the device
    has one of its own.

    On cuda that is apex's or TransformerEngine's, on npu MindSpeed's. Raises PaNpuError where
    MindSpeed came too late.
    """
    if kind != "cpu" and has_fused_adam():
        return
    if "mindspeed.megatron_adaptor" in sys.modules:
        raise PaNpuError(
            "MindSpeed was imported but Megatron still uses torch's AdamW: its patches came too "
            "late; import nothing of megatron before patches.table.prepare()"
        )
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed

    adam = NpuAdamW if kind == "npu" else FusedAdamW
    for module in (optimizer, distributed):
        _set_if_present(module, "Adam", adam)
        _set_if_present(module, "HAVE_APEX_OR_TE", True)
        _set_if_present(module, "USING_PYTORCH_OPTIMIZER", False)


def has_fused_adam() -> bool:
    """True when Megatron found the Adam of TransformerEngine or apex (or MindSpeed's, which takes
    apex's place).
    """
    import megatron.core.optimizer as optimizer

    return not issubclass(optimizer.Adam, torch.optim.AdamW)


def _set_if_present(module: Any, name: str, value: Any) -> None:
    if hasattr(module, name):
        setattr(module, name, value)


class FusedAdamW(torch.optim.Optimizer):
    """Decoupled-weight-decay Adam through torch's fused kernel, in the shape that Megatron's
    optimizers expect, that of apex.

    torch.optim.AdamW keeps a `step` tensor per parameter, which Megatron's distributed optimizer
    cannot reshard when a checkpoint is loaded; here the state of a parameter is `exp_avg` and
    `exp_avg_sq` alone.
    Formula: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", algorithm 2, with a
    constant schedule.
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
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
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

    def fused_update(
        self, group: dict[str, Any], params: list[torch.Tensor], step: torch.Tensor
    ) -> None:
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

    def fused_update(
        self, group: dict[str, Any], params: list[torch.Tensor], step: torch.Tensor
    ) -> None:
        for parameter in params:
            super().fused_update(group, [parameter], step)


def fix_write_item() -> None:
    """torch >= 2.7 added a required argument to the private function that Megatron calls to write a
    shard.
    """
    import torch.distributed.checkpoint.filesystem as torch_filesystem

    try:
        import megatron.core.dist_checkpointing.strategies.filesystem_async as megatron_filesystem
    except ImportError as error:
        raise PaNpuError(
            f"megatron-core's checkpointing cannot be imported ({error}); install psutil"
        ) from error
    original = torch_filesystem._write_item
    parameters = inspect.signature(original).parameters
    if "serialization_format" not in parameters or not hasattr(megatron_filesystem, "_write_item"):
        return
    position = list(parameters).index("serialization_format")

    @functools.wraps(original)
    def write_item(*args: Any, **kwargs: Any) -> Any:
        if len(args) <= position:
            kwargs.setdefault(
                "serialization_format", torch_filesystem.SerializationFormat.TORCH_SAVE
            )
        return original(*args, **kwargs)

    megatron_filesystem._write_item = write_item


def fix_empty_fp8_shards() -> None:
    """Without TransformerEngine the distributed optimizer's fp8 copy raises even when no parameter
    is fp8.
    """
    import megatron.core.fp8_utils as fp8

    if getattr(fp8, "HAVE_TE", False) or not hasattr(fp8, "_quantize_param_shard_impl"):
        return
    original = fp8._quantize_param_shard_impl

    def quantize(model_params: Any, *args: Any, **kwargs: Any) -> Any:
        return original(model_params, *args, **kwargs) if len(model_params) else None

    fp8._quantize_param_shard_impl = quantize


def replace_results_queue() -> None:
    """A queue that nobody uses, in whose place Megatron would start a server process when it plans
    a checkpoint.
    """
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async

    _set_if_present(filesystem_async, "_results_queue", queue.SimpleQueue())

"""A mixture's experts inside a vLLM worker after new weights were loaded. Imports torch only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def undo_waking(worker: Any) -> None:
    """Give parameters the layout in which this was first called: a reload takes them as they were then.

    vllm-ascend transposes experts as a worker wakes (0.23), for weights that are loaded without a reload.
    """
    model = worker.model_runner.model
    layouts = {name: _layout(parameter) for name, parameter in model.named_parameters()}
    before = worker.__dict__.setdefault("_pa_layouts", layouts)
    for name, layout in layouts.items():
        place, _, own = name.rpartition(".")
        parameter = model.get_parameter(name)
        if parameter.dim() == 3 and layout != before.get(name) == _layout(parameter.transpose(1, 2)):
            as_before = torch.nn.Parameter(parameter.data.transpose(1, 2), requires_grad=False)
            setattr(model.get_submodule(place), own, as_before)


def _layout(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    return tensor.shape, tensor.stride()


def pack_again(model: torch.nn.Module) -> None:
    """Bring experts into the layout of their kernel.

    vLLM's CPU experts are packed for their kernel when it is made, and by a reload never again (0.32): log-probs are off by 0.06
    after one of equal weights, by 3 after one of new ones. Kernels of devices are given their layout by the reload itself.
    """
    for experts, kernel in _cpu_experts(model):
        kernel.process_weights_after_loading(experts)


def _cpu_experts(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Any]]:
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        weight = getattr(module, "w13_weight", None)
        if kernel is not None and weight is not None and weight.device.type == "cpu":
            yield module, kernel.fused_experts

"""A mixture's experts inside a vLLM worker after new weights were loaded. Imports torch only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


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

"""A table of device kinds for Megatron, by the platform's name: deterministic kernels and fused operations.

The process-wide changes per kind are in `patches`. A new device kind is a row here and its patches there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pa_npu.errors import UserError
from pa_npu.platform.base import FusedOps, Platform


@dataclass(frozen=True)
class Device:
    """has_deterministic_mode: whether TransformerConfig.deterministic_mode follows run.deterministic; the embedding's backward
    then uses an indexed sum instead of atomics. ops: the platform's fused operations as this backend's layers call them.
    """

    has_deterministic_mode: bool
    ops: Callable[[FusedOps], FusedOps] = lambda ops: ops


class CompiledSwiglu:
    """The platform's operations with Megatron's compiled SwiGLU, which fuses what torch runs as two kernels."""

    def __init__(self, ops: FusedOps) -> None:
        self.rms_norm, self.rotary, self.grouped_linear = ops.rms_norm, ops.rotary, ops.grouped_linear

    def swiglu(self, x: torch.Tensor) -> torch.Tensor:
        from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

        activated: torch.Tensor = bias_swiglu_impl(x, None)
        return activated


_DEVICES = {
    "npu": Device(has_deterministic_mode=True),
    "cuda": Device(has_deterministic_mode=True, ops=CompiledSwiglu),
    "cpu": Device(has_deterministic_mode=False),  # its kernels are deterministic anyway
}


def device_of(platform: Platform) -> Device:
    """Raises UserError for a platform that this backend does not run on."""
    if platform.name not in _DEVICES:
        raise UserError(
            f"trainer.backend: megatron does not run on {platform.name}; set run.device to one of {', '.join(_DEVICES)}"
        )
    return _DEVICES[platform.name]

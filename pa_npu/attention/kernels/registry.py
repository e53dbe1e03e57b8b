"""The one place that maps a tensor's device and dtype to a varlen kernel."""

from __future__ import annotations

import torch

from pa_npu.attention.kernels.base import VarlenKernel


def kernel_for(q: torch.Tensor) -> VarlenKernel:
    """The kernel for q [tokens, heads, head_dim]. Raises ValueError for a device or dtype without one."""
    if q.device.type == "cpu":
        from pa_npu.attention.kernels.cpu import CpuFlash

        return CpuFlash()
    raise ValueError(f"q: no attention kernel for device {q.device}")

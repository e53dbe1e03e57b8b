"""Which kernel computes attention on a device, loaded when it is first needed."""

from __future__ import annotations

from functools import cache
from importlib import import_module

import torch

from pa_npu.attention.kernels.base import VarlenKernel

_KERNELS = {
    "cpu-flash": ("pa_npu.attention.kernels.cpu", "CpuFlash"),
    "cuda-flash": ("pa_npu.attention.kernels.cuda", "CudaFlash"),
    "npu-fusion": ("pa_npu.attention.kernels.npu", "NpuFusion"),
    "portable": ("pa_npu.attention.kernels.portable", "Portable"),
}


def kernel_for(q: torch.Tensor) -> VarlenKernel:
    """The kernel for q [tokens, heads, head_dim]. Raises ValueError for a device without one."""
    return _load(kernel_name(q))


def kernel_name(q: torch.Tensor) -> str:
    """Name of the kernel for q. CUDA's flash operators take fp16 and bf16 only; the portable one does the rest."""
    if q.device.type == "cpu":
        return "cpu-flash"
    if q.device.type == "npu":
        return "npu-fusion"
    if q.device.type == "cuda":
        from pa_npu.attention.kernels.cuda import CudaFlash

        return "cuda-flash" if CudaFlash.supports(q) else "portable"
    raise ValueError(f"q: no attention kernel for device {q.device}; known are cpu, cuda and npu, or use impl=dense")


@cache
def _load(name: str) -> VarlenKernel:
    module, kernel = _KERNELS[name]
    return getattr(import_module(module), kernel)()

"""Which kernels attention will run with, asked for before the first microbatch: so that a fallback is said once, and recorded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pa_npu.attention.forms import kernel_name


@dataclass(frozen=True)
class AttentionKernels:
    """kernel: of varlen calls, a name of kernels/base.py, or "dense". merge: what merges partial results; "none" for dense.

    fallback: why `merge` is not the fast one of this platform; empty where it is, or where there is no other.
    """

    kernel: str
    merge: str
    fallback: str = ""


def attention_kernels(
    device: torch.device, dtype: torch.dtype, heads: int, head_dim: int, implementation: str
) -> AttentionKernels:
    """For q [tokens, heads, head_dim] of this type on this device. implementation: attention.implementation."""
    if implementation == "dense":
        return AttentionKernels("dense", "none")
    if implementation in ("sdpa", "eager"):
        return AttentionKernels(f"transformers {implementation}", "none")
    kernel = kernel_name(torch.empty(1, heads, head_dim, dtype=dtype, device=device))
    if kernel == "npu-fusion":
        from pa_npu.attention.lse_merge import kernel_obstacle

        obstacle = kernel_obstacle(device, dtype, head_dim)
        return AttentionKernels(kernel, "torch" if obstacle else "ascendc", obstacle or "")
    if kernel == "cuda-flash":
        from pa_npu.attention.kernels.cuda import merge_name

        merge = merge_name()
        return AttentionKernels(kernel, merge, "" if merge == "triton" else "triton is not installed")
    return AttentionKernels(kernel, "torch")

"""FusedOps on Ascend: the fused kernels of torch_npu, called directly rather than through MindSpeed's switches."""

from __future__ import annotations

import torch


class NpuOps:
    """npu_rms_norm, npu_rotary_mul and npu_swiglu; each has its own backward in torch_npu."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        import torch_npu

        normed: torch.Tensor = torch_npu.npu_rms_norm(x, weight, epsilon=eps)[0]
        return normed

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        import torch_npu

        # SBND with cos and sin as S1 1D: the kernel takes four dimensions, the batch is one packed sequence
        rotated: torch.Tensor = torch_npu.npu_rotary_mul(x.unsqueeze(1), cos.unsqueeze(1), sin.unsqueeze(1))
        return rotated.squeeze(1)

    def swiglu(self, x: torch.Tensor) -> torch.Tensor:
        import torch_npu

        activated: torch.Tensor = torch_npu.npu_swiglu(x, dim=-1)
        return activated

"""FusedOps on Ascend: the fused kernels of torch_npu, called directly rather than through MindSpeed's switches."""

from __future__ import annotations

import torch


class NpuOps:
    """npu_rms_norm and npu_rotary_mul; both have their own backward in torch_npu."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        import torch_npu

        normed: torch.Tensor = torch_npu.npu_rms_norm(x, weight, epsilon=eps)[0]
        return normed

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        import torch_npu

        # SBND with cos and sin as S1 1D: the kernel takes four dimensions, the batch is one packed sequence
        rotated: torch.Tensor = torch_npu.npu_rotary_mul(x.unsqueeze(1), cos.unsqueeze(1), sin.unsqueeze(1))
        return rotated.squeeze(1)

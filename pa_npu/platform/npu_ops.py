"""FusedOps on Ascend: the fused kernels of torch_npu, called directly rather than through MindSpeed's switches."""

from __future__ import annotations

from typing import Any

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

    def grouped_linear(self, rows: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
        return _GroupedLinear.apply(rows, weight, counts)


class _GroupedLinear(torch.autograd.Function):
    """npu_grouped_matmul, which has no backward in torch_npu. group_type 0 divides rows, 2 the dimension that is summed over."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.ends = torch.tensor(counts, dtype=torch.int64, device=rows.device).cumsum(0)
        return _grouped_matmul(rows, weight.transpose(-2, -1), ctx.ends, 0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows, weight = ctx.saved_tensors
        return (
            _grouped_matmul(grads[0], weight, ctx.ends, 0),
            _grouped_matmul(grads[0].t(), rows, ctx.ends, 2),
            None,
        )


def _grouped_matmul(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, group_type: int) -> torch.Tensor:
    """ends: cumulative, on the device. split_item 3: one tensor comes out."""
    import torch_npu

    found: list[torch.Tensor] = torch_npu.npu_grouped_matmul(
        [x], [weight], group_list=ends, group_type=group_type, group_list_type=0, split_item=3
    )
    return found[0]

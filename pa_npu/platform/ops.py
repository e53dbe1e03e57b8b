"""FusedOps in plain torch: for platforms without kernels of their own, and the others' reference."""

from __future__ import annotations

from typing import Any

import torch


class TorchOps:
    """RMSNorm, rotary and SwiGLU as autograd functions with closed-form backwards: fewer kept
    tensors than composed ops.
    """

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return _RMSNorm.apply(x, weight, eps)

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return _Rotary.apply(x, cos, sin)

    def swiglu(self, x: torch.Tensor) -> torch.Tensor:
        return _SwiGLU.apply(x)

    def grouped_linear(
        self, rows: torch.Tensor, weight: torch.Tensor, counts: list[int]
    ) -> torch.Tensor:
        """Multiplies one group after another, groups without rows too, so that every weight has a
        gradient.
        """
        parts = zip(rows.split(counts), weight.unbind(), strict=True)
        return torch.cat(
            [torch.mm(group_rows, group_weight.t()) for group_rows, group_weight in parts]
        )


class _RMSNorm(torch.autograd.Function):
    """y = w * n with n = x / rms(x) rounded to x's type first, as HF and vLLM do.

    Keeps x and one number per row.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        inverse_rms = (
            torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        )
        ctx.save_for_backward(x, weight, inverse_rms)
        return (wide * inverse_rms).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (grad,) = grads
        x, weight, inverse_rms = ctx.saved_tensors
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * inverse_rms
        grad_wide = grad.to(wide.dtype)
        products = (grad_wide * normed).view(-1, x.shape[-1])
        grad_weight = products.sum(0).to(weight.dtype)
        # d/dx of x / rms(x): the gradient's component along n is removed
        wide_weight = weight.to(wide.dtype)
        along = torch.mv(products, wide_weight).div_(x.shape[-1]).view_as(inverse_rms)
        grad_x = (grad_wide * wide_weight).addcmul_(normed, along, value=-1).mul_(inverse_rms)
        return grad_x.to(x.dtype), grad_weight, None


class _Rotary(torch.autograd.Function):
    """(a, b) -> (a cos - b sin, b cos + a sin) on the two halves of the last dimension.

    Keeps no activations.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, sin, -1.0), None, None


class _SwiGLU(torch.autograd.Function):
    """silu(a) * b for the halves (a, b) of the last dimension. Keeps the input alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        (grad,) = grads
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        torch.mul(grad, torch.nn.functional.silu(gate), out=grad_up)
        return grad_x


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    half = x.shape[-1] // 2
    cos = cos[..., :half]
    sin = sin[..., :half]
    first = x[..., :half]
    second = x[..., half:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.mul(first, cos, out=out[..., :half])
    torch.mul(second, cos, out=out[..., half:])
    out[..., :half].addcmul_(second, sin, value=-sign)
    out[..., half:].addcmul_(first, sin, value=sign)
    return out

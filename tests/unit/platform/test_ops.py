"""RMSNorm, rotary and AdamW against independent formulas, forward and backward."""

from __future__ import annotations

import pytest
import torch

from pa_npu.backends.megatron.patches.repairs import FusedAdamW
from pa_npu.platform.cuda import CudaOps
from pa_npu.platform.ops import TorchOps

EPS = 1e-6
ALL_OPS = [TorchOps(), CudaOps()]


def hf_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


def hf_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def angles(tokens: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    half = torch.rand(tokens, 1, head_dim // 2, dtype=dtype) * 6
    both = torch.cat((half, half), -1)
    return both.cos(), both.sin()


@pytest.mark.parametrize("ops", ALL_OPS)
@pytest.mark.parametrize("shape", [(5, 1, 16), (5, 3, 8)])
def test_rms_norm_equals_its_formula(ops: TorchOps, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    ours = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (shape, shape[-1:])]
    theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
    down = torch.randn(shape, dtype=torch.float64)
    out, expected = ops.rms_norm(*ours, eps=EPS), hf_rms_norm(*theirs)
    assert (out - expected).abs().max() < 1e-14
    (out * down).sum().backward()
    (expected * down).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert (a.grad - b.grad).abs().max() < 1e-13


def test_rms_norm_in_bf16_rounds_as_transformers_does() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(7, 1, 32).bfloat16(), torch.randn(32).bfloat16()
    wide = x.float()
    expected = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).bfloat16()
    assert torch.equal(TorchOps().rms_norm(x, weight, EPS), expected)


@pytest.mark.parametrize("strided", [False, True])
def test_rotary_equals_its_formula(strided: bool) -> None:
    torch.manual_seed(0)
    x = (
        torch.randn(6, 3, 24, dtype=torch.float64)[..., ::2]
        if strided
        else torch.randn(6, 3, 12, dtype=torch.float64)
    )
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    cos, sin = angles(6, 12, torch.float64)
    down = torch.randn(6, 3, 12, dtype=torch.float64)
    out, expected = TorchOps().rotary(ours, cos, sin), hf_rotary(theirs, cos, sin)
    assert (out - expected).abs().max() < 1e-15
    (out * down).sum().backward()
    (expected * down).sum().backward()
    assert (ours.grad - theirs.grad).abs().max() < 1e-15


def test_adamw_equals_torch() -> None:
    torch.manual_seed(0)
    start = [torch.randn(4, 3), torch.randn(5)]
    ours, theirs = ([tensor.clone().requires_grad_() for tensor in start] for _ in range(2))
    settings = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizers = FusedAdamW(ours, **settings), torch.optim.AdamW(theirs, **settings)
    for _ in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() < 1e-6
    assert all(set(state) == {"exp_avg", "exp_avg_sq"} for state in optimizers[0].state.values())
    assert optimizers[0].param_groups[0]["step"] == 4

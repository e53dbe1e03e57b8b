"""The simulator itself: strictness, and its references against autograd."""

from __future__ import annotations

import threading

import pytest
import torch

from pa_npu.platform.npu import NpuOps
from tests.npu_sim.reference_ops import all_references, ntd_to_tnd, tnd_to_ntd
from tests.npu_sim.simulator import NpuSim, cpu_alias


@pytest.fixture
def sim() -> NpuSim:
    return NpuSim(all_references())


def test_refuses_operands_on_two_devices(sim):
    with sim:
        x = torch.ones(3, device="npu")
        with pytest.raises(RuntimeError, match=r"aten::add.*together with npu"):
            x + torch.ones(3)
        with pytest.raises(RuntimeError, match=r"aten::add_.*together with npu"):
            torch.ones(3).add_(x)
        # what a real NPU takes: a scalar tensor of the host, a copy between devices, operands on
        # one device
        assert (x + torch.tensor(1.0)).cpu().tolist() == [2.0, 2.0, 2.0]
        assert x.copy_(torch.full((3,), 4.0)).cpu().tolist() == [4.0, 4.0, 4.0]
        assert (x + torch.ones(3).to("npu")).cpu().tolist() == [5.0, 5.0, 5.0]


def test_refuses_an_operator_without_a_reference():
    with NpuSim({}), pytest.raises(NotImplementedError, match="npu::npu_swiglu"):
        torch.ops.npu.npu_swiglu(torch.ones(2, 4, device="npu"))


def test_is_active_in_threads_that_are_started_meanwhile(sim):
    actual = []

    def compute():
        actual.append((torch.ones(3, device="npu") + 1).cpu())

    with sim:
        thread = threading.Thread(target=compute, name="inside")
        thread.start()
        thread.join(10)
    assert actual[0].tolist() == [2.0, 2.0, 2.0] and sim.calls["aten::add"]


def test_alias_keeps_the_memory():
    with NpuSim({}):
        x = torch.full((4096,), 3.0, device="npu")
        alias = cpu_alias(x)
        del x
        others = [torch.zeros(4096, device="npu") for _ in range(4)]
    assert alias.eq(3.0).all() and others


def test_ntd_memory_is_heads_first_per_sequence():
    stats = torch.arange(5.0)[:, None, None] * 10 + torch.arange(2.0)[None, :, None].expand(5, 2, 8)
    moved = tnd_to_ntd(stats, [2, 3])
    assert moved.shape == stats.shape
    assert moved.flatten(0, 1)[:, 0].tolist() == [0, 10, 1, 11, 20, 30, 40, 21, 31, 41]
    assert torch.equal(ntd_to_tnd(moved, [2, 3]), stats)


def test_fused_norm_and_rotary_agree_with_the_formulas_and_their_gradients(sim):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(6, 3, 8, generator=generator), torch.randn(8, generator=generator)
    angles = torch.randn(6, 1, 4, generator=generator).repeat(1, 1, 2)
    grad = torch.randn(6, 3, 8, generator=generator)

    def formula(x, weight, cos, sin):
        normed = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
        first, second = normed.chunk(2, -1)
        return normed * cos + torch.cat((-second, first), -1) * sin

    def gradients(function, *inputs):
        leaves = [value.requires_grad_() for value in inputs]
        out = function(*leaves)
        out.backward(grad.to(out))
        return [value.detach().double().cpu() for value in (out, leaves[0].grad, leaves[1].grad)]

    expected = gradients(
        formula, *(value.double() for value in (x, weight, angles.cos(), angles.sin()))
    )
    with sim:
        ops = NpuOps()
        actual = gradients(
            lambda x, weight, cos, sin: ops.rotary(ops.rms_norm(x, weight, 1e-5), cos, sin),
            *(value.to("npu") for value in (x, weight, angles.cos(), angles.sin())),
        )
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).abs().max() < 1e-5

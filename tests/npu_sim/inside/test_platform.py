"""The npu platform's device functions over the stub runtime."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path

import pytest
import torch
import torch_npu

from pa_npu import platform as platforms
from tests.npu_sim.reference_ops import all_references
from tests.npu_sim.simulator import NpuSim


def test_side_stream_of_a_thread_is_not_the_training_stream() -> None:
    platform = platforms.get("npu")
    platform.set_device(0)
    npu = torch.npu  # type: ignore[attr-defined]
    seen = []

    def background() -> None:
        with platform.side_stream():
            seen.append(npu.current_stream())
        seen.append(npu.current_stream())

    thread = threading.Thread(target=background, name="background")
    thread.start()
    thread.join(10)
    inside, after = seen
    assert inside != npu.default_stream() and inside != npu.current_stream()
    assert after == npu.default_stream()


def test_profile_asks_torch_npu_for_host_and_device_activities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stub runtime cannot profile: the recorder is replaced, its arguments and the handler are
    torch_npu's own.
    """
    asked = {}

    signature = inspect.signature(torch_npu.profiler.profile)
    monkeypatch.setattr(
        torch_npu.profiler,
        "profile",
        lambda **inputs: asked.update(signature.bind(**inputs).arguments),
    )
    platforms.get("npu").profile(tmp_path / "profile", "iteration_000001_rank0")
    activity = torch_npu.profiler.ProfilerActivity
    assert set(asked["activities"]) == {activity.CPU, activity.NPU} and callable(
        asked["on_trace_ready"]
    )


def test_a_gathers_gradient_is_the_cpus() -> None:
    """A router takes some of its probabilities, here one of them twice, and others not at all."""
    values, index = torch.randn(5, 8), torch.tensor([[0, 3], [3, 0], [7, 7], [1, 2], [4, 4]])
    actual = []
    for name in ("cpu", "npu"):
        device = platforms.get(name).device(0)
        with NpuSim(all_references()):
            own = values.to(device).detach().requires_grad_()
            own.gather(-1, index.to(device)).square().sum().backward()
            actual.append(own.grad.cpu())
    torch.testing.assert_close(*actual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 2, 0], [0, 0, 0, 0]])
def test_grouped_products_and_their_gradients_are_those_of_one_group_after_another(
    counts: list[int], dtype: torch.dtype
) -> None:
    """Groups without rows too, also all of them, as on a rank whose experts no token takes: their
    gradient is zero.
    """
    generator = torch.Generator().manual_seed(1)
    shapes = (sum(counts), 6), (len(counts), 4, 6), (sum(counts), 4)
    rows, weight, down = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    actual = []
    for name in ("cpu", "npu"):
        platform = platforms.get(name)
        with NpuSim(all_references()) as sim:
            own = [
                tensor.to(platform.device(0)).detach().requires_grad_() for tensor in (rows, weight)
            ]
            out = platform.ops.grouped_linear(own[0], own[1], counts)
            out.backward(down.to(platform.device(0)))
            actual.append([out.detach().cpu(), *(tensor.grad.cpu() for tensor in own)])
        assert (sim.calls["npu::npu_grouped_matmul"] == 3) == (name == "npu" and any(counts))
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-6
    for ours, expected in zip(*reversed(actual), strict=True):
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)

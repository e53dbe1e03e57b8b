"""The CPU platform: CUDA's names lead to the CPU, nothing else changes, and memory, seeds and devices are real."""

from __future__ import annotations

import io

import pytest
import torch

from pa_npu.backends.megatron.patches.table import prepare, require_no_megatron
from pa_npu.errors import PaNpuError
from tests.helpers.megatron import PLATFORM


def test_cuda_requests_give_cpu_tensors() -> None:
    for tensor in (
        torch.zeros(3, device="cuda"),
        torch.tensor([1.0], device="cuda:0"),
        torch.empty_like(torch.zeros(2), device=torch.device("cuda", 0)),
        torch.arange(3, device=torch.cuda.current_device()),
        torch.zeros(3).cuda(),
        torch.zeros(3).to("cuda"),
        torch.zeros(3).to(device="cuda", dtype=torch.float16),
        torch.zeros(3, pin_memory=True),
    ):
        assert tensor.device.type == "cpu"
    assert next(torch.nn.Linear(2, 2).cuda().parameters()).device.type == "cpu"
    assert not torch.cuda.is_available()


def test_other_requests_are_untouched() -> None:
    assert torch.zeros(2, device="meta").device.type == "meta"
    with torch.device("meta"):
        assert torch.zeros(2).device.type == "meta"
        assert torch.nn.Linear(2, 2).weight.device.type == "meta"
    assert torch.zeros(2).to(torch.float64).dtype == torch.float64
    assert torch.zeros(2).to("meta").device.type == "meta"
    assert torch.zeros(2).type() == "torch.FloatTensor", "CUDA's type names are for Megatron only"
    file = io.BytesIO()
    torch.save(torch.ones(2), file)
    file.seek(0)
    assert torch.equal(torch.load(file), torch.ones(2))


def test_megatron_prepared_too_late_is_an_error() -> None:
    prepare(PLATFORM.name)  # a second call does nothing
    with pytest.raises(PaNpuError, match="before any import of it"):
        require_no_megatron("test")


def test_seeds_repeat() -> None:
    PLATFORM.seed_all(5)
    first = torch.rand(3)
    PLATFORM.seed_all(5)
    assert torch.equal(first, torch.rand(3))


def test_memory_and_devices_are_plausible() -> None:
    assert 50 * 2**20 < PLATFORM.memory_bytes() < PLATFORM.total_memory_bytes()
    assert PLATFORM.device_count() >= 1
    assert PLATFORM.device(3) == torch.device("cpu")


def test_deterministic_switch() -> None:
    PLATFORM.set_deterministic(True)
    assert torch.are_deterministic_algorithms_enabled()
    PLATFORM.set_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()


def test_side_stream_is_a_context_that_changes_nothing() -> None:
    with PLATFORM.side_stream():
        assert torch.ones(2).sum() == 2

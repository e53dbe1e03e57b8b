"""The kernel of attention is known before it runs, and a fallback comes with its reason."""

from __future__ import annotations

import pytest
import torch

from pa_npu.attention import forms as runs_on
from pa_npu.attention.forms import AttentionKernels, attention_kernels
from pa_npu.attention.kernels import cuda

CPU = torch.device("cpu")


def test_on_the_cpu_the_flash_kernel_merges_by_torch_which_is_no_fallback() -> None:
    assert attention_kernels(CPU, torch.float32, 4, 32, "auto") == AttentionKernels(
        "cpu-flash", "torch", ""
    )
    assert attention_kernels(CPU, torch.float32, 4, 32, "dense") == AttentionKernels(
        "dense", "none", ""
    )
    assert attention_kernels(CPU, torch.float32, 4, 32, "sdpa").kernel == "transformers sdpa"


def test_without_the_platforms_merge_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_on, "kernel_name", lambda q: "cuda-flash")
    for triton, expected in (
        (None, ("torch", "triton is not installed")),
        (object(), ("triton", "")),
    ):
        monkeypatch.setattr(cuda, "_triton_merge", lambda found=triton: found)
        kernels = attention_kernels(CPU, torch.bfloat16, 4, 128, "merge")
        assert (kernels.merge, kernels.fallback) == expected
    monkeypatch.setattr(runs_on, "kernel_name", lambda q: "npu-fusion")
    for obstacle, merge in (("not built", "torch"), (None, "ascendc")):
        monkeypatch.setattr(
            "pa_npu.attention.lse_merge.kernel_obstacle", lambda *_, found=obstacle: found
        )
        kernels = attention_kernels(CPU, torch.bfloat16, 4, 128, "auto")
        assert (kernels.merge, kernels.fallback) == (merge, obstacle or "")

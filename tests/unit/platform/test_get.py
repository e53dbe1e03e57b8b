"""Choosing a platform: what is there is given, what is missing is named, the user's environment is left alone."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import get_args

import pytest
import torch

from pa_npu import platform as platforms
from pa_npu.errors import UserError
from pa_npu.platform.base import Role
from pa_npu.platform.cuda import CudaPlatform


def run_python(code: str, **environment: str) -> str:
    """Standard output of a fresh interpreter."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "/usr/bin:/bin", **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_importing_the_package_imports_no_torch() -> None:
    assert run_python("import sys, pa_npu.platform; print('torch' in sys.modules)") == "False"


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_cuda_that_is_not_there_is_refused_with_the_reason() -> None:
    with pytest.raises(
        UserError, match=r"run\.device: cuda cannot be used: .*without CUDA; install the cuda extra"
    ):
        platforms.get("cuda")


def test_npu_that_is_not_there_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = platforms.importlib.util.find_spec
    monkeypatch.setattr(
        platforms.importlib.util, "find_spec", lambda n: None if n == "torch_npu" else find_spec(n)
    )
    with pytest.raises(
        UserError, match=r"run\.device: npu cannot be used: torch_npu is not installed"
    ):
        platforms.get("npu")


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(UserError, match="'tpu' is not one of auto, npu, cuda, cpu"):
        platforms.get("tpu")


@pytest.mark.parametrize(
    ("present", "expected"),
    [({"npu", "cuda", "cpu"}, "npu"), ({"cuda", "cpu"}, "cuda"), ({"cpu"}, "cpu")],
)
def test_auto_prefers_npu_then_cuda(
    present: set[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platforms, "missing", lambda kind: None if kind in present else "absent")
    monkeypatch.setattr(platforms, "_create", lambda kind: kind)
    assert platforms.get("auto") == expected


def test_environment_defaults_never_override_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    for platform in (platforms.get("cpu"), CudaPlatform()):
        assert platform.environment("trainer")["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
        for role in get_args(Role):
            for name in platform.environment(role):
                monkeypatch.setenv(name, "mine")
                assert name not in platform.environment(role)
                monkeypatch.delenv(name)
    assert platforms.get("cpu").environment("trainer")["OMP_NUM_THREADS"] == "1"

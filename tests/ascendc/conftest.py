"""Fixtures of the Ascend C tests: libraries compiled once with g++ into a cache directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from ops.ascendc.cpu_model.runner import LseMergeModel

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "ascendc"


@pytest.fixture(scope="session")
def cache() -> Path:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed; the CPU model needs it")
    return CACHE


@pytest.fixture(scope="session")
def model(cache: Path) -> LseMergeModel:
    return LseMergeModel.build(cache)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

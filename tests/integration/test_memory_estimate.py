"""The memory that the planner counts for a trainer is what the allocator measures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
SMALL = ("--hidden", "256", "--layers", "4", "--vocab", "2048", "--prompt", "64", "--response", "64", "--chunk", "256")


def test_the_estimate_is_what_the_allocator_measures() -> None:
    """fp32 with and without recomputation, bf16: state exactly, the peak within a tenth."""
    argv = [sys.executable, "-m", "tools.bench_memory", *SMALL, "--cases", "3", "--json"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == 3
    for row in rows:
        assert row["state_estimated"] == pytest.approx(row["state"], rel=0.01), row
        assert row["peak_estimated"] == pytest.approx(row["peak"], rel=0.1), row
        assert row["peak"] > 1.2 * row["state"], f"activations must show in what is compared: {row}"

"""tools/bench_control_path.py runs, and its figures are consistent with one another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.nightly]
ROOT = Path(__file__).resolve().parents[2]


def test_benchmark_of_the_control_path_counts_what_it_moved(tmp_path):
    options = [
        "--rows",
        "2x16",
        "--seconds",
        "0.2",
        "--engines",
        "1",
        "--json",
        str(tmp_path / "rows.json"),
    ]
    command = [
        sys.executable,
        str(ROOT / "tools" / "bench_control_path.py"),
        *options,
        "--markdown",
        str(tmp_path / "t.md"),
    ]
    subprocess.run(command, check=True, timeout=120, cwd=tmp_path)
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert row["groups"] >= 64 and row["groups"] % 64 == 0, "whole iterations"
    assert row["cpu_s"] > 0 and row["seconds"] >= 0.2
    parts = row["decode_us"] + row["group_us"] + row["bytes_us"] + row["put_us"]
    assert parts > 0, row
    rate = row["groups"] * 2 * 16 / row["seconds"]
    assert f"| 2 x 16 | {rate / 16:,.0f} | {rate:,.0f} |" in (tmp_path / "t.md").read_text()

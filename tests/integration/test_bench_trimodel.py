"""tools/bench_trimodel.py runs on two stages, and its figures are consistent with one another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# test_trimodel_parallel.py compares the passes
pytestmark = [pytest.mark.integration, pytest.mark.nightly]
ROOT = Path(__file__).resolve().parents[2]


def test_benchmark_of_the_tri_model_pass_compares_equal_work(tmp_path: Path) -> None:
    options = [
        "--stages",
        "2",
        "--hidden",
        "64",
        "--groups",
        "3",
        "--prompt",
        "8",
        "--response",
        "4",
        "--repeats",
        "1",
    ]
    command = [sys.executable, str(ROOT / "tools" / "bench_trimodel.py"), *options]
    files = ["--json", str(tmp_path / "rows.json"), "--markdown", str(tmp_path / "table.md")]
    subprocess.run([*command, *files], check=True, timeout=150, cwd=tmp_path)
    result = json.loads((tmp_path / "rows.json").read_text())
    assert result["differences"] == {"PP2": 0.0}, "one pass must compute what three passes compute"
    three, one = result["rows"]
    assert (three["name"], one["name"]) == ("three passes", "one pass")
    # 3 microbatches: 3 forward passes and 1 backward pass, against one of each; shapes travel in
    # messages of their own
    assert three["messages"] == 2 * (3 * 3 + 3) and one["messages"] == 2 * (3 + 3)
    assert three["sent_bytes"] < one["sent_bytes"] < 2 * three["sent_bytes"], (
        "the frozen part comes back as zeros"
    )
    for row in (three, one):
        assert 0 < row["least_s"] <= row["seconds"] <= row["most_s"] and 0 < row["waiting"] < 1
        assert row["streamed_s"] > 0 and row["memory_bytes"] > 0
    assert "| PP2 | one pass |" in (tmp_path / "table.md").read_text()

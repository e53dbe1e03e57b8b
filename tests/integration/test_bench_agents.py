"""tools/bench_agents.py runs, sends the same requests both ways, and its figures are consistent with one another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.nightly]
ROOT = Path(__file__).resolve().parents[2]


def test_benchmark_of_the_gateway_measures_equal_loads_and_soaks(tmp_path: Path) -> None:
    options = ["--sessions", "12", "--at-once", "4", "--turns", "3", "--tokens", "8", "--step-ms", "2", "--soak", "24"]
    command = [
        sys.executable,
        str(ROOT / "tools" / "bench_agents.py"),
        *options,
        "--json",
        str(tmp_path / "figures.json"),
    ]
    said = subprocess.run(command, check=True, timeout=280, cwd=tmp_path, capture_output=True, text=True).stdout
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["requests"] == [36, 36], "every session has three answers, either way"
    assert figures["cpu_ms"] > 0 and f"overhead {figures['overhead_ms']:.2f} ms" in said
    assert [done for done, _ in figures["soak_rss_mib"]] == [0, 23] and all(
        mib > 0 for _, mib in figures["soak_rss_mib"]
    )

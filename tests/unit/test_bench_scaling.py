"""tools/bench_scaling.py and bench_memory_peaks.py: a small sweep with everything real but engines and trainers; tables, plot."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from tools import bench_scaling
from tools.bench_memory_peaks import render
from tools.bench_scaling import Row, draw, keeping_up


def test_the_ideal_is_that_of_the_slower_side() -> None:
    fast = Row("engines", 8, 4, 1.0, 1000.0, 0.1)
    assert fast.generate_s == pytest.approx(2.56) and fast.train_s == pytest.approx(16 * 0.08)
    assert fast.ideal_tokens_per_s == pytest.approx(64 * 1024 / 2.56)
    slow = Row("replicas", 8, 1, 1.0, 1000.0, 0.1)
    assert slow.ideal_tokens_per_s == pytest.approx(64 * 1024 / (64 * 0.08))
    for engines in (1, 2, 4, 64):
        assert engines * bench_scaling.GROUPS_PER_ENGINE % keeping_up(engines) == 0, "replicas divide the groups"
        assert Row("", engines, keeping_up(engines), 1, 1, 0).train_s <= 0.5 * fast.generate_s + 0.1


def test_both_sweeps_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [Row("engines", n, n, 3.0, 3000.0 * n, 0.1) for n in (1, 2)] + [
        Row("replicas", 2, n, 3.0, 900.0, 0.1) for n in (1, 2)
    ]
    assert {path.suffix for path in draw(rows, tmp_path / "scaling")} == {".png", ".svg"}


def test_a_small_job_reaches_what_its_engines_and_replicas_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator, its store and HTTP are real. Loose bounds: the machine may be busy."""
    monkeypatch.setattr(bench_scaling, "GROUPS_PER_ENGINE", 4)
    out = tmp_path / "rows.json"
    assert bench_scaling.main(["--engines", "2", "--replicas", "", "--iterations", "2", "--json", str(out)]) == 0
    (row,) = [Row(**row) for row in json.loads(out.read_text())]
    assert (row.sweep, row.engines, row.replicas) == ("engines", 2, 1)
    assert 0.2 < row.of_ideal <= 1.001 and 0 < row.coordinator < 1


def test_both_sweeps_are_measured_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines grow with as many replicas as keep up; then replicas, with the most engines."""

    def measure(directory: Path, sweep: str, engines: int, replicas: int, iterations: int) -> Row:
        assert iterations == 3
        return Row(sweep, engines, replicas, 3.0, 1000.0 * engines, 0.25)

    monkeypatch.setattr(bench_scaling, "measure", measure)
    monkeypatch.setattr(bench_scaling.subprocess, "run", lambda *_, **__: None)  # no model is needed
    files = ["--json", str(tmp_path / "rows.json"), "--markdown", str(tmp_path / "table.md")]
    assert bench_scaling.main(["--engines", "1,4", "--replicas", "2,8", "--iterations", "3", *files]) == 0
    rows = [Row(**row) for row in json.loads((tmp_path / "rows.json").read_text())]
    found = [(row.sweep, row.engines, row.replicas) for row in rows]
    assert found == [("engines", 1, 1), ("engines", 4, 2), ("replicas", 4, 2), ("replicas", 4, 8)]
    text = (tmp_path / "table.md").read_text()
    assert "| engines | 4 | 2 |" in text and "| replicas | 4 | 8 | 3.00 | 4,000 |" in text


def test_the_memory_table_has_what_the_rows_have() -> None:
    rows = {"synchronous": {"memory_engine_host_bytes": 2.0**30}, "periodic": {"memory_coordinator_bytes": 2.0**20}}
    text = render(rows, argparse.Namespace(groups=16, response=64, prompt=256))
    assert "| schedule | engine, host | coordinator |" in text
    assert "| synchronous | 1,024 | - |" in text and "| periodic | - | 1 |" in text

"""Benchmarks of agents run, compare equal work, and have figures that are consistent with one another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.nightly]
ROOT = Path(__file__).resolve().parents[2]


def test_benchmark_of_the_gateway_measures_equal_loads_and_soaks(tmp_path: Path) -> None:
    options = [
        "--sessions",
        "12",
        "--at-once",
        "4",
        "--turns",
        "3",
        "--tokens",
        "8",
        "--step-ms",
        "2",
        "--soak",
        "24",
    ]
    command = [
        sys.executable,
        str(ROOT / "tools" / "bench_agents.py"),
        *options,
        "--json",
        str(tmp_path / "figures.json"),
    ]
    output = subprocess.run(
        command, check=True, timeout=280, cwd=tmp_path, capture_output=True, text=True
    ).stdout
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["requests"] == [36, 36], "every session has three answers, either way"
    assert figures["cpu_ms"] > 0 and f"overhead {figures['overhead_ms']:.2f} ms" in output
    assert [done for done, _ in figures["soak_rss_mib"]] == [0, 23] and all(
        mib > 0 for _, mib in figures["soak_rss_mib"]
    )


def test_benchmark_of_trees_computes_unique_tokens_and_has_the_gradient_of_separate_sequences(
    tmp_path: Path,
) -> None:
    options = [
        "--trees",
        "--prompt",
        "96",
        "--response",
        "64",
        "--responses",
        "2",
        "--groups",
        "1",
        "--repetitions",
        "1",
    ]
    command = [sys.executable, str(ROOT / "tools" / "bench_trainer.py"), *options, "--json"]
    output = subprocess.run(
        command, check=True, timeout=280, cwd=tmp_path, capture_output=True, text=True
    ).stdout
    rows = json.loads(output.splitlines()[-1])
    assert {kind: row["samples"] for kind, row in rows.items()} == {
        "no branches": 2,
        "last turn tried three times": 6,
        "last turn tried eight times": 16,
        "two sub-agents": 6,
        "context compacted": 4,
    }
    shown, written = 32, 64
    turns = {
        "no branches": 4,
        "last turn tried three times": 5,
        "two sub-agents": 5,
        "context compacted": 6,
    }
    for kind, row in rows.items():
        (loss, norm), (apart_loss, apart_norm) = row["first"]["trees"], row["first"]["separate"]
        assert loss == pytest.approx(apart_loss, rel=1e-4, abs=1e-6) and norm == pytest.approx(
            apart_norm, rel=1e-4
        ), kind
        assert row["ideal"] > 1 and norm > 0
        if kind in turns:  # the system prompt once for the group, every turn once
            assert row["tokens"]["trees"] == 96 + 2 * turns[kind] * (shown + written), kind

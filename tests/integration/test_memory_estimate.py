"""The memory that the planner counts for a trainer is what the allocator measures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
SMALL = (
    "--hidden",
    "256",
    "--layers",
    "4",
    "--vocab",
    "2048",
    "--prompt",
    "64",
    "--response",
    "64",
    "--chunk",
    "256",
)

# logits of a chunk, which no context group divides, are small beside the activations
LONG = ["--long", "--vocab", "1024", "--chunk", "128", "--tokens", "4096", "--context", "1", "2"]


def measured(*arguments: str) -> list[dict[str, float]]:
    argv = [sys.executable, "-m", "tools.bench_memory", *arguments, "--json"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("cases", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_the_estimate_is_what_the_allocator_measures(cases: int) -> None:
    """fp32, at night also with recomputation and bf16: state exactly, the peak within a tenth."""
    rows = measured(*SMALL, "--backends", "megatron", "--cases", str(cases))
    assert len(rows) == cases
    for row in rows:
        assert row["state_estimated"] == pytest.approx(row["state"], rel=0.01), row
        assert row["peak_estimated"] == pytest.approx(row["peak"], rel=0.1), row
        assert row["peak"] > 1.2 * row["state"], f"activations must show in what is compared: {row}"


@pytest.mark.nightly  # Megatron's is above
@pytest.mark.parametrize("cases", [1, 6])
def test_the_estimate_of_sharded_trainers_is_what_the_allocator_measures(cases: int) -> None:
    """The peak within a tenth; gradients, which the estimate counts as state, come and go there."""
    rows = measured(*SMALL, "--backends", "fsdp", "--cases", str(cases))
    assert len(rows) == cases
    for row in rows:
        assert row["peak_estimated"] == pytest.approx(row["peak"], rel=0.1), row
        assert row["peak"] > 1.2 * row["state"], f"activations must show in what is compared: {row}"


@pytest.mark.nightly
def test_activations_of_ranks_that_share_a_sequence_fall_with_their_number_as_estimated() -> None:
    """Of 4,096 tokens on one rank and on two, by what a microbatch takes beyond the state."""
    rows = measured(*LONG)
    assert [(row["recompute"], row["context"]) for row in rows] == [
        ("none", 1),
        ("none", 2),
        ("full", 1),
        ("full", 2),
    ]
    for alone, shared in (rows[:2], rows[2:]):
        of_one = alone["peak"] - alone["state"]
        of_two = shared["peak"] - shared["state"]
        assert 2 * of_two == pytest.approx(of_one, rel=0.1), shared["recompute"]
        for row in (alone, shared):
            assert row["peak_estimated"] == pytest.approx(row["peak"], rel=0.1), row

#!/usr/bin/env python
"""Measures the gain of engines that swap to a version one after another: blocking, delayed and rolling publishes.

Stand-in engines of a set speed with heavy-tailed response lengths, trainers that sleep, one real
coordinator, as in tools/bench_scaling.py, one version behind (schedule.max_staleness=1). Modes take
turns, round by round.

    python tools/bench_swap.py [--engines 8] [--rounds 2] [--iterations 8] [--markdown FILE]

tail waste: the share of the engines' capacity that is idle because nothing of the iteration is left
to give out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# run as a file, this folder's parent is not on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.bench_scaling import (
    GROUPS_PER_ENGINE,
    LENGTH,
    RESPONSES,
    ROOT,
    STEP_S,
    WAIT_S,
    WINDOW,
    Job,
    keeping_up,
)
from tools.hardware import processor

MEDIAN = 40.0  # tokens of a response; the longest are cut at LENGTH
WARMUP = 2
MODES: dict[str, dict[str, str]] = {
    "blocking": {"mode": "blocking"},
    "delayed, together": {"mode": "delayed"},
    "delayed, rolling": {"mode": "rolling"},
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--iterations",
        type=int,
        default=8,
        help=f"of a round, the first {WARMUP} of which are left out",
    )
    parser.add_argument("--markdown", type=Path, help="write the table there")
    args = parser.parse_args(arguments)
    records_by_mode: dict[str, list[dict[str, Any]]] = {name: [] for name in MODES}
    with tempfile.TemporaryDirectory(prefix="bench_swap_") as scratch:
        make = [
            sys.executable,
            str(ROOT / "tools" / "make_tiny_model.py"),
            "--out",
            scratch,
            "--random",
        ]
        make += ["--train-questions", "2048", "--test-questions", "1"]
        subprocess.run(make, check=True, timeout=WAIT_S, stdout=subprocess.DEVNULL)
        for _ in range(args.rounds):
            for name, publish in MODES.items():
                records_by_mode[name] += records_of(
                    Path(scratch), args.engines, publish, args.iterations
                )
                print(
                    f"# {name}: {[round(record['iteration_s'], 2) for record in records_by_mode[name]]}",
                    file=sys.stderr,
                    flush=True,
                )
    text = render(records_by_mode, args.engines)
    print(text)
    if args.markdown:
        args.markdown.write_text(text + "\n", encoding="utf-8")
    return 0


def records_of(
    directory: Path, engines: int, publish: dict[str, str], iterations: int
) -> list[dict[str, Any]]:
    """Runs one job and returns the records of its iterations after the warm-up."""
    with contextlib.ExitStack() as stack:
        schedule = {"max_staleness": 1}
        job = Job(
            directory,
            stack,
            engines,
            keeping_up(engines),
            MEDIAN,
            schedule=schedule,
            publish=dict(publish),
        )
        for _ in range(iterations + 1):
            job.publish()
            job.train()
        job.publish()
        return job.records(iterations)[WARMUP:]


def render(records_by_mode: dict[str, list[dict[str, Any]]], engines: int) -> str:
    def median(name: str, key: str) -> float:
        return float(statistics.median(record[key] for record in records_by_mode[name]))

    first = median(next(iter(records_by_mode)), "iteration_s")
    lines = [
        f"{engines} stand-in engines of {1000 * STEP_S:g} ms per decode step, {WINDOW} sequences "
        f"in flight on each; {GROUPS_PER_ENGINE} groups of {RESPONSES} responses per engine and "
        f"iteration, of {MEDIAN:g} tokens in the median and {LENGTH} at most; one version behind; "
        f"medians of {len(next(iter(records_by_mode.values())))} iterations; {processor()}, {os.cpu_count()} "
        "cores.",
        "",
        "| publish | iteration s | x | tail waste |",
        "|---|---:|---:|---:|",
    ]
    for name in records_by_mode:
        seconds = median(name, "iteration_s")
        lines.append(
            f"| {name} | {seconds:.2f} | {first / seconds:.2f} | {median(name, 'tail_waste'):.0%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

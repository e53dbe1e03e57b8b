#!/usr/bin/env python
"""How long the border between two iterations is, part by part, from the timelines of runs.

    python tools/bench_border.py RUN [RUN ...] [--skip 3] [--json FILE]

The border of a run begins when the last optimizer step of an iteration is over on rank 0, and ends
when the first group of the next one is asked for: no engine generates and nothing trains in it.
Evaluations lie in none of those that are counted. The runs need clocks that agree, as those of one
machine do. Medians over iterations, milliseconds:

    step       the optimizer's step, before the border
    check      from there until rank 0 sends the first bucket: reports, checks, what trainers wait
               for engines
    send       rank 0 sends
    verdict    from its last bucket until the coordinator knows that all engines hold the version
    begin      from there until the first group is asked for: the schedule of the iteration is
               chosen
    border     the last four
    iteration  from the first group to the first group of the next iteration
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pa_npu.telemetry.chrome_trace import read_spans, spans_of
from pa_npu.telemetry.timeline import DIRECTORY

COLUMNS = ("iteration", "step", "check", "send", "verdict", "begin", "border")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    parser.add_argument("--skip", type=int, default=3, help="first iterations that are left out")
    parser.add_argument(
        "--json", type=Path, help="write the borders of all iterations to this file"
    )
    arguments = parser.parse_args(argv)
    borders_of_runs = {str(run): borders(run, arguments.skip) for run in arguments.runs}
    print(table(borders_of_runs))
    if arguments.json:
        arguments.json.write_text(json.dumps(borders_of_runs, indent=1) + "\n", encoding="utf-8")
    return 0


def borders(run: Path, skip: int) -> list[dict[str, float]]:
    """Returns the parts of the border before each iteration from `skip` on, in seconds.

    Raises SystemExit where there is no timeline.
    """
    trainer, coordinator = (_events(run, name) for name in ("trainer-0", "coordinator"))
    steps = sorted((span["start"], span["end"]) for span in trainer if span["name"] == "step")
    sent = spans_of(trainer, "publish", "version")
    published = {
        version: span["end"]
        for version, span in spans_of(coordinator, "publish", "version").items()
    }
    evaluated = spans_of(coordinator, "evaluate", "version").keys()
    first: dict[int, float] = {}
    for event in coordinator:
        iteration = event["args"].get("iteration")
        if event["name"].startswith("group ") and isinstance(iteration, int):
            first[iteration] = min(first.get(iteration, event["start"]), event["start"])
    rows = []
    for version in range(max(1, skip), max(first, default=0) + 1):
        before = [step for step in steps if version in sent and step[1] < sent[version]["end"]]
        is_complete = version in published and version in first and version - 1 in first
        if version in evaluated or not before or not is_complete:
            continue
        began, ended = before[-1]
        marks = [
            ended,
            sent[version]["start"],
            sent[version]["end"],
            published[version],
            first[version],
        ]
        parts = dict(zip(COLUMNS[2:6], (b - a for a, b in pairwise(marks)), strict=True))
        iteration_s = first[version] - first[version - 1]
        rows.append(
            {"iteration": iteration_s, "step": ended - began, **parts, "border": marks[-1] - ended}
        )
    return rows


def table(borders_of_runs: dict[str, list[dict[str, float]]]) -> str:
    lines = ["| run | " + " | ".join(f"{name} ms" for name in COLUMNS) + " | of the iteration |"]
    lines.append("|---" * (len(COLUMNS) + 2) + "|")
    for name, rows in borders_of_runs.items():
        if not rows:
            raise SystemExit(
                f"bench_border: {name}: no border without an evaluation in it; run more iterations"
            )
        medians = [statistics.median(row[column] for row in rows) for column in COLUMNS]
        share = statistics.median(row["border"] / row["iteration"] for row in rows)
        lines.append(
            f"| {name} | "
            + " | ".join(f"{1e3 * median:.0f}" for median in medians)
            + f" | {share:.1%} |"
        )
    return "\n".join(lines)


def _events(run: Path, process: str) -> list[dict[str, Any]]:
    file = run / DIRECTORY / f"{process}.jsonl"
    if not file.is_file():
        raise SystemExit(f"bench_border: {file}: no timeline; name the directory of a run")
    return read_spans(file)


if __name__ == "__main__":
    raise SystemExit(main())

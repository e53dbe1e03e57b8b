#!/usr/bin/env python
"""Measures an iteration's peak of memory by kind of process: synchronous against periodic, and against max_staleness.

Real vLLM engines and a real trainer. One run has synchronous and periodic iterations in turn; each
value of schedule.max_staleness has a run of its own. The numbers are the records' own: peaks of
each iteration, border included (docs/output.md), here their mean over the iterations after the
warm-up. MiB, resident; the device's beside them where it has memory of its own.

    python tools/bench_memory_peaks.py [--staleness 1,2] [--iterations 10] [--groups 16] [--prompt 256] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pa_npu.telemetry.records import read_records
from pa_npu.telemetry.report import PEAKS, memory_peaks

# run as a file, this folder's parent is not on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.bench_schedule import RESPONSES, Bench, Case, default_args
from tools.hardware import processor

WARMUP = 4


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--staleness", default="1,2", help="values of schedule.max_staleness")
    parser.add_argument(
        "--iterations", type=int, default=10, help=f"per run, {WARMUP} of warm-up included"
    )
    parser.add_argument("--groups", type=int, default=16, help="of an iteration")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=64, help="tokens of a response")
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args(arguments)
    if args.iterations <= WARMUP + 1:
        parser.error(f"--iterations: {args.iterations} is not above {WARMUP + 1}")
    case = Case("memory", args.groups, prompt=args.prompt)
    rows: dict[str, Mapping[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench_memory_peaks_") as scratch:
        bench = Bench(Path(scratch), default_args(response=args.response))
        with bench.engines(1):
            directory = bench.run(
                case,
                args.prompt,
                args.iterations,
                [f"schedule.compare_iterations={args.iterations}"],
            )
            records = read_records(directory)[WARMUP:]
            for name, periodic in (("synchronous", False), ("periodic", True)):
                rows[name] = memory_peaks(
                    [record for record in records if record["periodic"] is periodic]
                )
            for k in (int(text) for text in args.staleness.split(",") if text):
                settings = [f"schedule.max_staleness={k}", "algorithm.importance_sampling=token"]
                directory = bench.run(case, args.prompt, args.iterations, settings)
                # the last k iterations are trained when nothing is generated any more
                rows[f"max_staleness={k}"] = memory_peaks(
                    read_records(directory)[WARMUP : args.iterations - k]
                )
    text = render(rows, args)
    print(text)
    if args.markdown:
        args.markdown.write_text(text + "\n", encoding="utf-8")
    return 0


def render(rows: Mapping[str, Mapping[str, float]], args: argparse.Namespace) -> str:
    kinds = [kind for kind in PEAKS if any(kind in row for row in rows.values())]
    lines = [
        f"One vLLM engine, one trainer rank, {len(os.sched_getaffinity(0))} cores ({processor()}); "
        f"{args.groups} groups of {RESPONSES} responses of {args.response} tokens to prompts of "
        f"{args.prompt}; MiB.",
        "",
        f"| schedule | {' | '.join(PEAKS[kind] for kind in kinds)} |",
        "|---|" + "---:|" * len(kinds),
    ]
    for name, row in rows.items():
        cells = [f"{row[kind] / 2**20:,.0f}" if kind in row else "-" for kind in kinds]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

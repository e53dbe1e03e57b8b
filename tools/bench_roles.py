#!/usr/bin/env python
"""Turns and roles in alternation, on two real cores: seconds and processor seconds of an iteration.

    python tools/bench_roles.py [--shapes long,short,free] [--rounds 3] [--iterations 6]
                                [--order prompt] [--json FILE] [--markdown FILE]

The shapes, the model and the settings are those of tools/bench_peers.py. A round runs turns and
then roles, or roles and then turns, so that neither always comes first. An iteration's processor
seconds are those of all processes of its run; other work on the machine lengthens iterations much
and them little. A ratio is of one round's medians: above 1 where roles are faster.

For paced devices, with and without something to move, see tools/bench_schedule.py --devices.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

# run as a file, this folder's parent is not on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pa_npu.telemetry.records import read_records
from tools.bench_peers import OURS, SHAPES, WARMUP, Bench
from tools.hardware import processor
from tools.processes import end_on_sigterm

SYSTEMS = {"turns": "colocate", "roles": "roles"}
SAMPLED_EVERY_S = 0.1


@dataclass(frozen=True)
class Run:
    """One run. seconds, processor_s: of each iteration after warm-up. changes: replicas that
    trained early, by iteration. groups: by iteration, of each replica where these may differ.
    """

    shape: str
    mode: str
    round: int
    seconds: list[float]
    processor_s: list[float]
    changes: list[int]
    groups: list[list[int]]


class ProcessorTime:
    """Processor seconds of all processes that this one has started, over time."""

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._totals_s: list[float] = []
        self._by_process: dict[psutil.Process, float] = {}
        self._ends = threading.Event()

    @contextlib.contextmanager
    def sampled(self) -> Iterator[None]:
        """Samples inside the block."""
        thread = threading.Thread(target=self._sample, name="processor time", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ends.set()
            thread.join()

    def between(self, begin_s: float, end_s: float) -> float:
        """Returns the processor seconds between two times of the wall clock."""
        return self._until(end_s) - self._until(begin_s)

    def _until(self, at_s: float) -> float:
        place = min(bisect.bisect_left(self._times_s, at_s), len(self._times_s) - 1)
        before = max(0, place - 1)
        span_s = self._times_s[place] - self._times_s[before]
        share = (at_s - self._times_s[before]) / span_s if span_s else 0.0
        grown_s = self._totals_s[place] - self._totals_s[before]
        return self._totals_s[before] + min(max(share, 0.0), 1.0) * grown_s

    def _sample(self) -> None:
        own = psutil.Process()
        while not self._ends.wait(SAMPLED_EVERY_S):
            for process in own.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    self._by_process[process] = times.user + times.system
            self._times_s.append(time.time())
            self._totals_s.append(sum(self._by_process.values()))


def measure(bench: Bench, shape: str, mode: str, number: int, args: argparse.Namespace) -> Run:
    """Runs a mode once. Raises SystemExit where the run fails."""
    processor_time = ProcessorTime()
    with processor_time.sampled():
        measured = bench.run(shape, SYSTEMS[mode], number, args.iterations)
    if measured.problem is not None:
        raise SystemExit(f"bench_roles: {mode}, {shape}: {measured.problem}")
    records: Sequence[dict[str, Any]] = read_records(bench.last_run)[WARMUP:]
    return Run(
        shape=shape,
        mode=mode,
        round=number,
        seconds=[record["iteration_s"] for record in records],
        processor_s=[
            processor_time.between(record["time"] - record["iteration_s"], record["time"])
            for record in records
        ],
        changes=[record.get("role_changes", 0) for record in records],
        groups=[record.get("replica_groups", []) for record in records],
    )


def render(runs: Sequence[Run], args: argparse.Namespace) -> str:
    """Returns a table in Markdown, a row for each shape and mode."""
    lines = [
        f"Two cores ({processor()}), schedule.order={args.order}; medians of all iterations after "
        "warm-up, with the first and the third quartile; ratios of turns over roles are medians "
        "over rounds, with the least and the largest.",
        "",
        "| shape | mode | iterations | s per iteration | processor s per iteration | role changes "
        "per iteration | turns / roles: s | turns / roles: processor s |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for shape in SHAPES:
        for mode in SYSTEMS:
            of_mode = [run for run in runs if run.shape == shape and run.mode == mode]
            if not of_mode:
                continue
            seconds = [value for run in of_mode for value in run.seconds]
            processor_s = [value for run in of_mode for value in run.processor_s]
            changes = [value for run in of_mode for value in run.changes]
            ratios = [_ratio(runs, shape, "seconds"), _ratio(runs, shape, "processor_s")]
            cells = [shape, mode, str(len(seconds)), _quartiles(seconds), _quartiles(processor_s)]
            cells.append(f"{statistics.mean(changes):.2f}")
            cells += ratios if mode == "roles" else ["", ""]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _quartiles(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.3f}"
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return f"{median:.3f} ({first:.3f} to {third:.3f})"


def _ratio(runs: Sequence[Run], shape: str, name: str) -> str:
    """Returns the ratios of each round's medians, turns over roles."""
    medians = {
        (run.round, run.mode): statistics.median(getattr(run, name))
        for run in runs
        if run.shape == shape
    }
    ratios = [
        medians[number, "turns"] / medians[number, "roles"]
        for number, mode in medians
        if mode == "roles" and (number, "turns") in medians
    ]
    if not ratios:
        return ""
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=",".join(SHAPES), help="which, by name")
    parser.add_argument("--rounds", type=int, default=3, help="of every shape")
    parser.add_argument(
        "--iterations", type=int, default=6, help=f"of a run, after {WARMUP} of warm-up"
    )
    parser.add_argument(
        "--order", choices=("completion", "prompt"), default="completion", help="schedule.order"
    )
    parser.add_argument("--json", type=Path, help="also write the runs there")
    parser.add_argument("--markdown", type=Path, help="also write the table there")
    args = parser.parse_args(arguments)
    shapes = args.shapes.split(",")
    if unknown := set(shapes) - SHAPES.keys():
        parser.error(f"--shapes: {', '.join(sorted(unknown))} not among {', '.join(SHAPES)}")
    end_on_sigterm()
    for system in SYSTEMS.values():
        OURS[system] = (*OURS[system], f"schedule.order={args.order}")
    runs: list[Run] = []
    with (
        tempfile.TemporaryDirectory(prefix="bench_roles_") as scratch,
        Bench(Path(scratch), list(SYSTEMS.values())) as bench,
    ):
        for number in range(args.rounds):
            for shape in shapes:
                modes = list(SYSTEMS) if number % 2 == 0 else list(reversed(SYSTEMS))
                for mode in modes:
                    runs.append(measure(bench, shape, mode, number, args))
                    print(f"# {runs[-1]}", file=sys.stderr, flush=True)
                    if args.json:
                        values = [asdict(run) for run in runs]
                        args.json.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    table = render(runs, args)
    print(table)
    if args.markdown:
        args.markdown.write_text(table + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

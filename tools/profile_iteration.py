#!/usr/bin/env python
"""Processor time of an iteration by process and by cause: decode, HTTP, packing, forward, waiting.

    python tools/profile_iteration.py [--shapes long,short,free] [--systems colocate]
                                      [--iterations 4] [--markdown FILE]

The shapes and systems are those of tools/bench_peers.py. Every process of the run samples itself
(iteration_profile/sitecustomize.py), which takes some percent of the run's own time. What is
counted is the processor time of threads, so that a busy machine lengthens the iterations and
changes the table little. Warm-up iterations are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pa_npu.telemetry.records import read_records
from tools.bench_peers import OURS, SHAPES, WARMUP, Bench
from tools.hardware import processor
from tools.iteration_profile.sitecustomize import VARIABLE
from tools.processes import end_on_sigterm

# A part of a process's command line, and what the table calls it.
PROCESSES = (
    ("EngineCore", "engine"),
    ("spawn_main", "engine"),
    ("api_server", "engine's API server"),
    ("pa_npu.engines.transformers", "engine"),
    ("pa_npu.trainer.main", "trainer"),
    ("pa_npu.coordinator.main", "coordinator"),
    ("pa_npu.launcher", "launcher"),
    ("pa_npu.rewards", "rewards"),
)
OTHER = "others"
LEAST_SHARE = 0.005  # causes below it are one row


@dataclass(frozen=True)
class Profile:
    """Processor seconds of an iteration, by (process, cause). iteration_s: its duration."""

    seconds: Mapping[tuple[str, str], float]
    iteration_s: float


def process_name(command: Sequence[str]) -> str:
    """Returns what the table calls a process with this command line."""
    line = " ".join(command)
    return next((name for part, name in PROCESSES if part in line), OTHER)


def read_profile(folder: Path, records: Sequence[Mapping[str, Any]]) -> Profile:
    """Returns the mean over the iterations of these records of what the files in `folder` say.

    A line belongs to the iterations if it was written between the begin of the first and the end of
    the last.
    """
    begin_s = records[0]["time"] - records[0]["iteration_s"]
    end_s = records[-1]["time"]
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for file in sorted(folder.glob("*.jsonl")):
        name = OTHER
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                event = json.loads(line)
            except json.JSONDecodeError:
                continue  # the last line of a process that was killed
            if "command" in event:
                name = process_name(event["command"])
            elif begin_s < event["time"] <= end_s:
                for cause, taken_s in event["causes"].items():
                    seconds[name, cause] += taken_s / len(records)
    return Profile(seconds, (end_s - begin_s) / len(records))


def render(profiles: Mapping[str, Profile]) -> str:
    """Returns a table in Markdown: a row for each process and cause, a column for each shape."""
    totals = {name: sum(profile.seconds.values()) for name, profile in profiles.items()}
    keys: dict[tuple[str, str], float] = {}
    for name, profile in profiles.items():
        for key, seconds in profile.seconds.items():
            share = seconds / max(totals[name], 1e-9)
            keys[key] = max(keys.get(key, 0.0), share)
    rows = sorted(
        (key for key, share in keys.items() if share >= LEAST_SHARE),
        key=lambda key: -keys[key],
    )
    lines = [
        "| process | cause | " + " | ".join(profiles) + " |",
        "|---|---|" + "---|" * len(profiles),
    ]
    for key in rows:
        cells = [
            f"{profile.seconds.get(key, 0.0):.3f} s "
            f"({profile.seconds.get(key, 0.0) / max(totals[name], 1e-9):.0%})"
            for name, profile in profiles.items()
        ]
        lines.append(f"| {key[0]} | {key[1]} | " + " | ".join(cells) + " |")
    sums = [f"{total:.3f} s" for total in totals.values()]
    lines.append("| all | all | " + " | ".join(sums) + " |")
    durations = [f"{profile.iteration_s:.2f} s" for profile in profiles.values()]
    lines.append("| an iteration | from publish to publish | " + " | ".join(durations) + " |")
    return "\n".join(lines)


def measure(bench: Bench, shape: str, system: str, iterations: int, scratch: Path) -> Profile:
    """Runs a system once. Raises SystemExit where the run fails."""
    folder = scratch / f"profile_{shape}_{system}"
    folder.mkdir()
    os.environ[VARIABLE] = str(folder)
    before = set(scratch.iterdir())
    measured = bench.run(shape, system, 0, iterations)
    if measured.problem:
        raise SystemExit(f"profile_iteration: {shape}, {system}: {measured.problem}")
    (directory,) = set(scratch.glob("run*")) - before
    return read_profile(folder, read_records(directory / "run")[WARMUP:])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=",".join(SHAPES), help="which, by name")
    parser.add_argument("--systems", default="colocate", help="which of this project's, by name")
    parser.add_argument("--iterations", type=int, default=4, help=f"after {WARMUP} of warm-up")
    parser.add_argument("--markdown", type=Path, help="also write the tables there")
    args = parser.parse_args(arguments)
    shapes, systems = args.shapes.split(","), args.systems.split(",")
    for option, values, known in (("--shapes", shapes, SHAPES), ("--systems", systems, OURS)):
        if unknown := set(values) - known.keys():
            parser.error(f"{option}: {', '.join(sorted(unknown))} not among {', '.join(known)}")
    end_on_sigterm()
    hook = str(Path(__file__).resolve().parent / "iteration_profile")
    paths = [hook, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    texts = [f"{len(os.sched_getaffinity(0))} cores ({processor()}); processor time an iteration"]
    for system in systems:
        profiles = {}
        with tempfile.TemporaryDirectory(prefix="profile_") as name:
            scratch = Path(name)
            with Bench(scratch, systems) as bench:  # engines that are attached are started anew
                for shape in shapes:
                    title = SHAPES[shape].title
                    profiles[title] = measure(bench, shape, system, args.iterations, scratch)
                    print(f"# {system}, {title}", file=sys.stderr, flush=True)
        texts.append(f"### {system}\n\n{render(profiles)}")
    text = "\n\n".join(texts)
    print(text)
    if args.markdown:
        args.markdown.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python
"""Measures what a stage before or beside the reward saves: held-out accuracy by iteration, and seconds, over seeds.

    python tools/bench_stages.py teacher [--seeds 1,2,3] [--iterations 10] [--set CASE:KEY=VALUE ...]
                                          [--work DIR] [--markdown FILE] [key=value ...]
    python tools/bench_stages.py nothing [--supervised 150] [--mistakes 0.65] [--iterations 10] ...

teacher: the student of configs/distill_tiny.yaml, which slips at sums, by
  GRPO          the reward alone
  distillation  the larger model that does not slip, alone
  both          the reward with algorithm.distill_coef=1
with equally many responses an iteration, 384. --set gives a case keys of its own, such as its
learning rate; without it all have the configurations'.

nothing: a model with random weights, by
  supervised    --supervised iterations of 128 rows, of which a share of --mistakes is wrong by one
  GRPO          --iterations of the reward, from random weights
  both          the first, then the second

Demonstrations are rarely faultless. With --mistakes=0 they teach all that there is to learn here,
and nothing is left for the reward.

Runs that are complete in --work are not made again. Accuracy is that of greedy answers to the 200
held-out questions. Seconds are those of iterations, publishing included, without the start of
processes and without evaluations.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# run as a file, this folder's parent is not on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pa_npu.telemetry.records import read_evaluations, read_records
from tools.make_tiny_model import write_demonstrations

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
REACHED = 0.95
"""Accuracy at which a student counts as having reached its teacher, which has 1."""
_ONE_STAGE = ("schedule.compare_iterations=0", "telemetry.trackers=[]", "checkpoint.every=0")
_IN_GROUPS = ("schedule.prompts_per_iteration=48", "rollout.responses_per_prompt=8")


@dataclass(frozen=True)
class Case:
    """A way to train, whose runs differ in their seed only.

    after: the name of the case whose exported model it begins with.
    """

    name: str
    config: str
    settings: tuple[str, ...] = ()
    after: str | None = None


@dataclass(frozen=True)
class Curve:
    """A run: accuracy by version, None where it was not evaluated, and seconds up to each version."""

    accuracy: tuple[float | None, ...]
    seconds: tuple[float, ...]

    def reached(self) -> int | None:
        """Returns the first version whose accuracy is REACHED; None if there is none."""
        for version, accuracy in enumerate(self.accuracy):
            if accuracy is not None and accuracy >= REACHED:
                return version
        return None


def cases_of(subject: str, iterations: int, supervised: int, model: str) -> list[Case]:
    length = f"schedule.iterations={iterations}"
    every = "schedule.evaluate_every=1"
    if subject == "teacher":
        both = ("algorithm.name=grpo", "algorithm.distill_coef=1", *_IN_GROUPS)
        return [
            Case("GRPO", "grpo_tiny.yaml", (length, every, *_IN_GROUPS)),
            Case("distillation", "distill_tiny.yaml", (length, every)),
            Case("both", "distill_tiny.yaml", (length, every, *both)),
        ]
    rows = (
        f"schedule.iterations={supervised}",
        f"schedule.evaluate_every={supervised}",
        "optimizer.learning_rate=3e-3",
        "optimizer.warmup_iterations=20",
    )
    reward = (length, every, *_IN_GROUPS)
    return [
        Case("supervised", "sft_tiny.yaml", (*rows, f"model.path={model}")),
        Case("GRPO", "grpo_tiny.yaml", (*reward, f"model.path={model}")),
        Case("both", "grpo_tiny.yaml", reward, after="supervised"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("subject", choices=("teacher", "nothing"))
    parser.add_argument("--seeds", default="1,2,3", help="values of run.seed")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--supervised", type=int, default=150, help="iterations of 128 rows")
    parser.add_argument(
        "--mistakes", type=float, default=0.65, help="share of supervised rows that are wrong"
    )
    parser.add_argument(
        "--model", default=".cache/tiny_random/model", help="with random weights, of nothing"
    )
    parser.add_argument("--cases", help="only these, such as GRPO,both")
    parser.add_argument(
        "--set", action="append", default=[], metavar="CASE:KEY=VALUE", help="a key of a case"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/stages"), help="of the runs")
    parser.add_argument("--markdown", type=Path, help="also write the table there")
    parser.add_argument("overrides", nargs="*", help="further keys of all runs, as key=value")
    args = parser.parse_intermixed_args(arguments)
    seeds = [int(text) for text in args.seeds.split(",")]
    cases = cases_of(args.subject, args.iterations, args.supervised, args.model)
    names = [case.name for case in cases]
    wanted = args.cases.split(",") if args.cases else names
    own: dict[str, list[str]] = {}
    for text in args.set:
        name, _, setting = text.partition(":")
        own.setdefault(name, []).append(setting)
    for name in (*wanted, *own):
        if name not in names:
            parser.error(f"{name!r} is not a case of {args.subject}; use {', '.join(names)}")
    cases = [case for case in cases if case.name in wanted]
    curves: dict[str, list[Curve]] = {case.name: [] for case in cases}
    if args.subject == "nothing":
        rows = args.work / f"rows-{args.mistakes:g}.jsonl"
        rows.parent.mkdir(parents=True, exist_ok=True)
        pairs = questions_of(ROOT / ".cache/tiny/train.jsonl")
        write_demonstrations(rows, pairs, args.mistakes)
        own.setdefault("supervised", []).insert(0, f"data.train={rows}")
    for seed in seeds:
        for case in cases:
            directory = args.work / f"{args.subject}-{case.name}-{seed}"
            settings = [*case.settings, f"run.seed={seed}", *args.overrides]
            settings += own.get(case.name, [])
            if case.after:
                before = args.work / f"{args.subject}-{case.after}-{seed}"
                settings.append(f"model.path={before / 'hf'}")
            run(directory, CONFIGS / case.config, settings)
            if case.after or case.config != "sft_tiny.yaml":
                curves[case.name].append(read_curve(directory))
    table = render(cases, curves, args)
    print(table)
    if args.markdown:
        args.markdown.write_text(table + "\n", encoding="utf-8")
    return 0


def questions_of(path: Path) -> list[tuple[int, int]]:
    """Returns the two numbers of each question of a file."""
    pairs = []
    for line in path.read_text(encoding="utf-8").splitlines():
        x, y = map(int, re.findall(r"\d+", json.loads(line)["question"]))
        pairs.append((x, y))
    return pairs


def run(directory: Path, config: Path, settings: Sequence[str]) -> None:
    """Makes a run, unless it is complete already."""
    if (directory / "hf").is_dir():
        return
    print(f"# {directory}", file=sys.stderr, flush=True)
    keys = [f"run.dir={directory}", "checkpoint.export_hf=true", *_ONE_STAGE, *settings]
    command = [sys.executable, "-m", "pa_npu.launcher", "run", "--config", str(config), *keys]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        output = (result.stdout + result.stderr)[-3000:]
        raise SystemExit(f"bench_stages: {directory} failed:\n{output}")


def read_curve(directory: Path) -> Curve:
    records = read_records(directory)
    seconds = [0.0]
    for record in records:
        seconds.append(seconds[-1] + float(record["iteration_s"]))
    accuracy: list[float | None] = [None] * len(seconds)
    for evaluation in read_evaluations(directory):
        accuracy[int(evaluation["version"])] = float(evaluation["accuracy"])
    return Curve(tuple(accuracy), tuple(seconds))


def render(cases: Sequence[Case], curves: dict[str, list[Curve]], args: argparse.Namespace) -> str:
    """The table, in Markdown: means over seeds, in brackets the lowest and the highest."""
    versions = sorted({0, 1, 2, *range(4, args.iterations + 1, 2), args.iterations})
    head = [f"after {version}" for version in versions]
    lines = [
        f"| | {' | '.join(head)} | iterations to {REACHED:.0%} | seconds to there | s an iteration |",
        f"|---|{'---:|' * (len(versions) + 3)}",
    ]
    for case in cases:
        runs = curves[case.name]
        if not runs:
            continue
        cells = [
            of_seeds([run.accuracy[version] for run in runs], "{:.2f}") for version in versions
        ]
        reached = [run.reached() for run in runs]
        cells.append(of_seeds(reached, "{:.0f}"))
        to_there = [
            None if version is None else run.seconds[version]
            for run, version in zip(runs, reached, strict=True)
        ]
        cells.append(of_seeds(to_there, "{:.0f}"))
        cells.append(of_seeds([run.seconds[-1] / (len(run.seconds) - 1) for run in runs], "{:.1f}"))
        lines.append(f"| {case.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def of_seeds(values: Sequence[float | None], form: str) -> str:
    """Returns the mean and, where they differ, the range; how many have none."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    text = form.format(statistics.fmean(known))
    low, high = form.format(min(known)), form.format(max(known))
    if low != high:
        text += f" ({low} to {high})"
    if len(known) < len(values):
        text += f", {len(values) - len(known)} not"
    return text


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python
"""Measures the cost of off-policyness: final accuracy over seeds for schedule.max_staleness x correction, at equal samples.

Every run is the quick start's (configs/grpo_tiny.yaml) but for the keys below; runs that are
complete in --work are not made again.

  sampling     ratios against the policy that sampled (what max_staleness does unless told otherwise)
  decoupled    ratios against the proximal policy, truncated weights of tokens (AReaL with TIS)
  icepop       the same with tokens masked below 0.5 and above 5
  aged         decoupled, and tokens weigh 1 / (1 + age)
  uncorrected  ratios against the proximal policy, no weights: as if every token were new
  dpo          online DPO on best and worst of each group, which has no ratio to correct; with k = 0 too

    python tools/bench_staleness.py [--staleness 0,1,2,4] [--seeds 1,2,3] [--iterations 20] [--budget TOKENS]
                                    [--markdown FILE] [--plot NAME] [key=value ...]

--budget adds every case with k >= 1 once more with schedule.tokens_per_update, and half as many
prompts again to take them from.

The table has mean and range over seeds of the last evaluation, means over the last quarter of the
iterations of what the records say of age and weights, and the coefficient of variation over all
updates but the first and the last of their trained tokens and of their gradient norms, as a mean
over seeds. The plot, of held-out accuracy with its range over seeds, needs matplotlib: pip install
'pa_npu[plots]'.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pa_npu.config.load import load_config
from pa_npu.telemetry.records import read_evaluations, read_records

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.plots import line_style, new_figure, save  # isort: skip
from tools.run_curves import RunGroup, curve, load_runs  # isort: skip

ROOT = Path(__file__).resolve().parent.parent
CORRECTIONS: dict[str, tuple[str, ...]] = {
    "sampling": (),
    "decoupled": ("algorithm.importance_sampling=token", "algorithm.importance_cap=2"),
    "aged": (
        "algorithm.importance_sampling=token",
        "algorithm.importance_cap=2",
        "algorithm.age_exponent=1",
    ),
    "icepop": (
        "algorithm.importance_sampling=token",
        "algorithm.importance_cap=5",
        "algorithm.importance_floor=0.5",
    ),
    "uncorrected": ("algorithm.ratio=proximal",),
    "dpo": ("algorithm.name=online-dpo",),
}
ON_POLICY = "on-policy"
_VARY = ("tokens_response", "grad_norm")
_MEANS = ("age_mean", "effective_sample_size", "importance_truncated_ratio", "clip_ratio")


@dataclass(frozen=True)
class Case:
    """Runs that differ in their seed only."""

    staleness: int
    correction: str
    settings: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"k{self.staleness}-{self.correction}"


def cases(
    staleness: Sequence[int],
    corrections: Sequence[str],
    budget: int | None = None,
    prompts: int = 16,
) -> list[Case]:
    """On-policy once, every correction for the others; with a budget of tokens per update these
    once more, out of `prompts`.
    """
    listed = []
    for k in staleness:
        # the quick start's last iterations are synchronous in turn, which nothing that runs ahead
        # is
        keys = (f"schedule.max_staleness={k}", "schedule.compare_iterations=0")
        if not k:
            listed.append(Case(0, ON_POLICY, keys))
            listed += [
                Case(0, name, (*keys, *CORRECTIONS[name])) for name in corrections if name == "dpo"
            ]
            continue
        listed += [Case(k, name, (*keys, *CORRECTIONS[name])) for name in corrections]
        if budget is not None:
            more = (
                f"schedule.tokens_per_update={budget}",
                f"schedule.prompts_per_iteration={prompts}",
            )
            listed += [
                Case(k, f"{name}-budget", (*keys, *CORRECTIONS[name], *more))
                for name in corrections
            ]
    return listed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--staleness", default="0,1,2,4", help="values of schedule.max_staleness")
    parser.add_argument("--corrections", default=",".join(CORRECTIONS), help="which, by name")
    parser.add_argument("--seeds", default="1,2,3", help="values of run.seed")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--budget", type=int, help="schedule.tokens_per_update of further cases")
    parser.add_argument("--config", default=str(ROOT / "configs" / "grpo_tiny.yaml"))
    parser.add_argument(
        "--work", type=Path, default=Path("runs/staleness"), help="where the runs are written"
    )
    parser.add_argument("--markdown", type=Path, help="also write the table there")
    parser.add_argument(
        "--plot", type=Path, help="write a picture under this name, .png, .svg or both"
    )
    parser.add_argument("overrides", nargs="*", help="further keys of all runs, as key=value")
    args = parser.parse_args(arguments)
    corrections = args.corrections.split(",")
    if unknown := set(corrections) - CORRECTIONS.keys():
        parser.error(
            f"--corrections: {', '.join(sorted(unknown))} not among {', '.join(CORRECTIONS)}"
        )
    staleness = [int(text) for text in args.staleness.split(",")]
    seeds = [int(text) for text in args.seeds.split(",")]
    prompts = load_config([args.config], args.overrides).schedule.prompts_per_iteration
    chosen = cases(staleness, corrections, args.budget, 2 * ((3 * prompts // 2 + 1) // 2))
    for case in chosen:
        for seed in seeds:
            run(case, seed, args)
    groups = [
        RunGroup(case.name, load_runs([args.work / f"{case.name}-{seed}" for seed in seeds]))
        for case in chosen
    ]
    table = render(chosen, seeds, args.work)
    print(table)
    if args.markdown:
        args.markdown.write_text(table + "\n", encoding="utf-8")
    if args.plot:
        draw(list(zip(chosen, groups, strict=True)), args.plot)
    return 0


def run(case: Case, seed: int, args: argparse.Namespace) -> None:
    """One run, unless it is complete already."""
    directory = args.work / f"{case.name}-{seed}"
    if directory.is_dir() and any(
        e["version"] == args.iterations for e in read_evaluations(directory)
    ):
        return
    print(f"# {directory}", file=sys.stderr, flush=True)
    settings = [
        f"run.dir={directory}",
        f"run.seed={seed}",
        f"schedule.iterations={args.iterations}",
        "schedule.evaluate_every=2",
        "schedule.order=prompt",
        "telemetry.trackers=[]",
        *case.settings,
        *args.overrides,
    ]
    command = [sys.executable, "-m", "pa_npu.launcher", "run", "--config", args.config, *settings]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(
            f"bench_staleness: {directory} failed:\n{(result.stdout + result.stderr)[-3000:]}"
        )


def render(chosen: Sequence[Case], seeds: Sequence[int], work: Path) -> str:
    """Returns the table, in Markdown."""
    lines = [
        f"Held-out accuracy after the last iteration over {len(seeds)} seeds, and means over the "
        "last quarter of the iterations.",
        "",
        "| k | correction | accuracy: mean | lowest | highest | mean age | effective sample size | "
        "truncated or masked | clipped | variation of tokens | of gradient norms |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case in chosen:
        directories = [work / f"{case.name}-{seed}" for seed in seeds]
        accuracy = [float(read_evaluations(directory)[-1]["accuracy"]) for directory in directories]
        records = [
            record for directory in directories for record in _last_quarter(read_records(directory))
        ]
        columns = [_mean(records, name) for name in _MEANS]
        columns += [
            statistics.fmean(found) if (found := [v for v in values if v is not None]) else None
            for values in (
                [variation(read_records(d), name) for d in directories] for name in _VARY
            )
        ]
        numbers = (statistics.fmean(accuracy), min(accuracy), max(accuracy))
        cells = [str(case.staleness), case.correction, *(f"{number:.3f}" for number in numbers)]
        cells += ["" if value is None else f"{value:.3f}" for value in columns]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(cases_run: Sequence[tuple[Case, RunGroup]], path: Path) -> list[Path]:
    """Held-out accuracy over trained samples, a panel for each correction and a line for each k:
    means over seeds, their range as a band. Corrections that nothing of k = 0 has are drawn beside
    the on-policy runs."""
    names = list(dict.fromkeys(case.correction for case, _ in cases_run if case.staleness)) or [
        ON_POLICY
    ]
    columns = min(3, len(names))
    figure, panels = new_figure(columns, -(-len(names) // columns), width_in=3.2, height_in=2.6)
    for panel, name in zip(panels, names, strict=False):
        drawn = [(case, group) for case, group in cases_run if case.correction == name]
        if all(case.staleness for case, _ in drawn):
            drawn = [
                (case, group) for case, group in cases_run if case.correction == ON_POLICY
            ] + drawn
        for number, (case, group) in enumerate(drawn):
            points = curve(group, "eval_accuracy", "samples")
            x, mean, low, high = ([point[i] for point in points] for i in range(4))
            style = line_style(number)
            panel.plot(x, mean, label=f"k = {case.staleness}", **style)
            panel.fill_between(x, low, high, color=style["color"], alpha=0.12, linewidth=0)
        panel.set_title(name, fontsize=9)
        panel.set_xlabel("trained samples")
        panel.set_ylabel("held-out accuracy")
        panel.legend(fontsize=7, loc="lower right")
    for panel in panels[len(names) :]:
        panel.set_axis_off()
    return save(figure, path)


def variation(records: Sequence[dict[str, Any]], name: str) -> float | None:
    """Coefficient of variation of a number over updates; the first and the last are those of a
    beginning and an end.
    """
    values = [float(record[name]) for record in records[1:-1] if record.get(name) is not None]
    if len(values) < 2 or not (mean := statistics.fmean(values)):
        return None
    return statistics.stdev(values) / mean


def _last_quarter(records: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    return records[-max(1, len(records) // 4) :]


def _mean(records: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [float(record[name]) for record in records if record.get(name) is not None]
    return statistics.fmean(values) if values else None


if __name__ == "__main__":
    raise SystemExit(main())

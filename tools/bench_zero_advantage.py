#!/usr/bin/env python
"""How much sooner an iteration is trained if groups with advantages of 0 are trained by rule (schedule.skip_zero_advantage).

    python tools/bench_zero_advantage.py [--groups 10] [--shares 0 20 40 60 100] [--repetitions 5] [--markdown FILE]

One trainer on one core, both backends, a random model. Of each iteration's groups a share has
advantages of 0; every share is trained with all groups computed and by rule, in turn, and the
medians of processor time are compared. Expected is the share itself: of the time that is not the
step, since that is the same. Both learners begin with the same weights, and at the end their
digests have to be equal, or the comparison shows nothing; then the exit code is 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools import bench_trainer  # noqa: I001  (before torch: it sets what Megatron reads)

import numpy as np
import torch

from pa_npu import platform as platforms
from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import Microbatch, build_microbatches
from pa_npu.samples.notice import Notice, notice_bytes, read_notice
from pa_npu.telemetry.timeline import Timeline


class SomeByRule(bench_trainer.FixedMicrobatches):
    """Microbatches that are there, and notices of the groups that have none."""

    def __init__(self, microbatches: list[Microbatch], by_rule: Sequence[Notice]) -> None:
        super().__init__(microbatches)
        self.by_rule = tuple(by_rule)


@dataclass(frozen=True)
class Row:
    """Median processor seconds of training an iteration with a share of groups without gradient.

    step_s: of them, the optimizer's step.
    """

    backend: str
    percent: int
    every_s: float
    by_rule_s: float
    step_s: float
    is_equal: bool

    @property
    def saved(self) -> float:
        """The share of the time beside the step that the rule saves."""
        return (self.every_s - self.by_rule_s) / max(1e-9, self.every_s - self.step_s)


def without_gradient(group: Group) -> Group:
    """Returns the group as equal rewards make it."""
    return replace(group, advantages=np.zeros_like(group.advantages))


def train(learner, groups: Sequence[Group], responses: int, by_rule: bool) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    """Trains an iteration; returns its seconds, and those of the step."""
    microbatches: list[Microbatch] = []
    notices: list[Notice] = []
    for group in groups:
        if by_rule and not group.advantages.any():
            notices.append(read_notice(notice_bytes(group))[0])
        else:
            microbatches += build_microbatches(group, responses, True, 1)
    start_s = time.process_time()
    learner.accumulate(SomeByRule(microbatches, notices))
    accumulated_s = time.process_time()
    learner.step()
    return time.process_time() - start_s, time.process_time() - accumulated_s


def measure(model: str, args: argparse.Namespace) -> list[Row]:
    """Measures every share with both backends, all groups and by rule in turn."""
    spec = ModelSpec.read(model)
    config = bench_trainer.make_config(model, args)
    groups = bench_trainer.make_groups(args, spec.vocab_size)
    pairs = {
        "megatron": (bench_trainer.make_learner(config, spec), make_second(config, spec)),
        "fsdp": (
            bench_trainer.make_sharded(config, spec),
            bench_trainer.make_sharded(config, spec),
        ),
    }
    rows = []
    for backend, pair in pairs.items():
        learners = dict(zip((False, True), pair, strict=True))
        for percent in args.shares:
            number = round(len(groups) * percent / 100)
            # spread over the iteration
            chosen = {place * len(groups) // max(1, number) for place in range(number)}
            some = [
                without_gradient(group) if place in chosen else group
                for place, group in enumerate(groups)
            ]
            seconds: dict[bool, list[float]] = {False: [], True: []}
            steps: list[float] = []
            for repetition in range(args.repetitions + 1):
                for by_rule, learner in learners.items():
                    total_s, step_s = train(learner, some, args.responses, by_rule)
                    if repetition:  # the first one warms up
                        seconds[by_rule].append(total_s)
                        steps.append(step_s)
            digests = {learner.backend.digest() for learner in learners.values()}
            rows.append(
                Row(
                    backend=backend,
                    percent=percent,
                    every_s=statistics.median(seconds[False]),
                    by_rule_s=statistics.median(seconds[True]),
                    step_s=statistics.median(steps),
                    is_equal=len(digests) == 1,
                )
            )
    return rows


def make_second(config: Config, spec: ModelSpec):  # type: ignore[no-untyped-def]
    """A Megatron learner in the groups that `bench_trainer.make_learner` has joined."""
    from pa_npu.backends.megatron.backend import MegatronBackend
    from pa_npu.backends.megatron.factory import load_stage
    from pa_npu.trainer.learner import Learner

    platform = platforms.get("cpu")
    timeline = Timeline(None, "")
    backend = MegatronBackend(
        load_stage(config, spec, platform), config, spec, platform, platform.device(0), timeline
    )
    return Learner(config, backend, platform, timeline)


def render(rows: Sequence[Row]) -> str:
    """Returns a table in Markdown."""
    lines = [
        "| backend | groups without gradient | all computed | by rule | of it the step | time saved beside the step | weights |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        weights = "equal to the bit" if row.is_equal else "DIFFER"
        lines.append(
            f"| {row.backend} | {row.percent}% | {row.every_s:.3f} s | {row.by_rule_s:.3f} s | "
            f"{row.step_s:.3f} s | {row.saved:.0%} | {weights} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--groups", type=int, default=10)
    parser.add_argument("--shares", type=int, nargs="+", default=[0, 20, 40, 60, 100])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--markdown", type=Path, help="file for the table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure(bench_trainer.make_random_model(Path(scratch) / "model"), args)
    table = render(rows)
    print(table)
    if args.markdown is not None:
        args.markdown.write_text(table + "\n", encoding="utf-8")
    return 0 if all(row.is_equal for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

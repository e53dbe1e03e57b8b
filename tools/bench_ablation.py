#!/usr/bin/env python
"""Measures the contributions of periodic asynchrony, the tri-model pass and shared-prompt attention, each on and off.

Real vLLM engines and real trainer ranks, prompts of 512 tokens, groups of 8 responses of 64, a KL
term and two updates per iteration, so that policy, old policy and reference all exist. Off means:
schedule.stream=false, trainer.frozen_pass=separate, attention.shared_prompt=false. For each of the
other two's four settings one run has synchronous and periodic iterations in turn, so that both have
the same prompts and the same machine. A further run has everything off throughout.

    python tools/bench_ablation.py [--iterations 10] [--groups 8] [--pipeline 1,2] [--json FILE] [--markdown FILE]

Columns: iteration: median seconds. TPSPD: trained prompt and response tokens per second and device,
of the median. x: over all off. idle: shares of the iteration. MiB: what an iteration needed at
most, resident, means. weights: the largest difference of any weight after the last update, over
that tensor's largest, from the run with everything off (schedule.order=prompt); a run's two rows
have the same weights. The shares are Shapley values of the logarithm of TPSPD: what adding one
brings, averaged over all orders of adding the three, over what all three bring.

With --pipeline 2 the trainer is two stages. They share a core where the machine has no third.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from pa_npu.telemetry.records import read_records
from pa_npu.telemetry.report import memory_peaks

# run as a file, this folder's parent is not on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.bench_schedule import RESPONSES, Bench, Case, default_args
from tools.check_equivalence import EPSILON, compare
from tools.hardware import processor

FACTORS = ("periodic", "tri-model", "shared prompt")
Switches = tuple[bool, bool, bool]
ALL_OFF: Switches = (False, False, False)
UPDATES = 2
WARMUP = 4  # iterations, two of each kind
COMMON = (
    "schedule.order=prompt",
    f"schedule.updates_per_iteration={UPDATES}",
    "algorithm.kl_coef=0.01",
    f"optimizer.epsilon={EPSILON}",
    "checkpoint.export_hf=true",
    "telemetry.samples=0",
)
_SEED = 1  # all runs have the same prompts
_KINDS = ("memory_engine_host_bytes", "memory_trainer_host_bytes", "memory_coordinator_bytes")


@dataclass(frozen=True)
class Row:
    """switches: of FACTORS. Memory in bytes; weights_difference: relative, from everything off."""

    switches: Switches
    iteration_s: float
    generate_s: float
    train_s: float
    tpspd: float
    engine_idle: float
    trainer_idle: float
    memory: Mapping[str, float]
    weights_difference: float

    @property
    def name(self) -> str:
        return (
            " + ".join(name for name, on in zip(FACTORS, self.switches, strict=True) if on)
            or "none"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--iterations", type=int, default=10, help=f"per run, {WARMUP} of warm-up included; even"
    )
    parser.add_argument("--groups", type=int, default=8, help="of an iteration")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=64, help="tokens of a response")
    parser.add_argument(
        "--pipeline", default="1", help="pipeline stages of the trainer, such as 1,2"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args(arguments)
    if args.iterations <= WARMUP + 1 or args.iterations % 2:
        parser.error(f"--iterations: {args.iterations} is not an even number above {WARMUP + 1}")
    if args.groups % UPDATES:
        parser.error(f"--groups: {args.groups} cannot be divided into {UPDATES} updates")
    tables = []
    rows_by_layout = {}
    with tempfile.TemporaryDirectory(prefix="bench_ablation_") as scratch:
        bench = Bench(Path(scratch), default_args(response=args.response))
        with bench.engines(1):
            for stages in map(int, args.pipeline.split(",")):
                rows = measure(bench, args, stages)
                rows_by_layout[f"PP{stages}"] = [asdict(row) for row in rows]
                tables.append(render(rows, args, stages))
    if args.json:
        args.json.write_text(json.dumps(rows_by_layout, indent=1) + "\n", encoding="utf-8")
    text = "\n\n".join(tables)
    print(text)
    if args.markdown:
        args.markdown.write_text(text + "\n", encoding="utf-8")
    return 0


def measure(bench: Bench, args: argparse.Namespace, stages: int) -> list[Row]:
    """Returns all eight rows, everything off first."""
    case = Case("ablation", args.groups, prompt=args.prompt)

    def run(
        tri_model: bool, shared_prompt: bool, stream: Sequence[str]
    ) -> tuple[list[dict[str, Any]], Path]:
        settings = [
            *COMMON,
            *stream,
            f"trainer.frozen_pass={'together' if tri_model else 'separate'}",
            f"attention.shared_prompt={str(shared_prompt).lower()}",
            f"trainer.devices={stages}",
            f"trainer.pipeline_parallel={stages}",
            f"placement.devices={cores_of(stages, len(os.sched_getaffinity(0)))}",
        ]
        directory = bench.run(case, args.prompt, args.iterations, settings, seed=_SEED)
        print(f"# PP{stages} {settings[-6:-3]}: done", file=sys.stderr, flush=True)
        return read_records(directory), directory / "hf"

    _, reference = run(False, False, ["schedule.stream=false"])
    rows = []
    for tri_model, shared_prompt in itertools.product((False, True), repeat=2):
        records, weights = run(
            tri_model, shared_prompt, [f"schedule.compare_iterations={args.iterations}"]
        )
        difference = compare(_weights(reference), _weights(weights)).relative
        for periodic in (False, True):
            of_schedule = [record for record in records[WARMUP:] if record["periodic"] is periodic]
            rows.append(row_of((periodic, tri_model, shared_prompt), of_schedule, difference))
    return sorted(rows, key=lambda row: (sum(row.switches), [not on for on in row.switches]))


def row_of(switches: Switches, records: Sequence[Mapping[str, Any]], difference: float) -> Row:
    def median(key: str) -> float:
        return statistics.median(record[key] for record in records)

    return Row(
        switches,
        iteration_s=median("iteration_s"),
        generate_s=median("generate_s"),
        train_s=median("train_s"),
        tpspd=median("tpspd"),
        engine_idle=median("engine_idle"),
        trainer_idle=median("trainer_idle"),
        memory=memory_peaks(records),
        weights_difference=difference,
    )


def cores_of(stages: int, cores: int) -> str:
    """Returns the engine's core, then one for each stage behind it; the last one for those that
    have none.
    """
    return str([0, *(min(1 + stage, cores - 1) for stage in range(stages))]).replace(" ", "")


def shapley(value: Callable[[Switches], float]) -> tuple[float, float, float]:
    """Returns each factor's gain in `value`, averaged over all orders of switching the three on (L.

    S. Shapley, 1953).
    """
    orders = list(itertools.permutations(range(len(FACTORS))))
    shares = [0.0] * len(FACTORS)
    for order in orders:
        switches = list(ALL_OFF)
        for factor in order:
            before = value(_as_switches(switches))
            switches[factor] = True
            shares[factor] += (value(_as_switches(switches)) - before) / len(orders)
    periodic, tri_model, shared_prompt = shares
    return periodic, tri_model, shared_prompt


def _as_switches(switches: Sequence[bool]) -> Switches:
    periodic, tri_model, shared_prompt = switches
    return periodic, tri_model, shared_prompt


def _weights(directory: Path) -> dict[str, Any]:
    weights: dict[str, Any] = {}
    for file in sorted(directory.glob("*.safetensors")):
        weights |= load_file(file)
    return weights


def render(rows: Sequence[Row], args: argparse.Namespace, stages: int) -> str:
    base = rows[0].tpspd
    by_switches = {row.switches: row for row in rows}
    gained = shapley(lambda switches: math.log(by_switches[switches].tpspd))
    total = math.log(by_switches[True, True, True].tpspd / base)
    cores = len(os.sched_getaffinity(0))
    where = (
        f"one vLLM engine, {stages} pipeline {'stage' if stages == 1 else 'stages'}, {cores} "
        f"cores ({processor()})"
    )
    marks = " | ".join(FACTORS)
    lines = [
        f"PP{stages}: {where}; {args.groups} groups of {RESPONSES} responses of {args.response} "
        f"tokens, prompts of {args.prompt}, {UPDATES} updates per iteration, KL; medians of "
        f"{(args.iterations - WARMUP) // 2} iterations of each kind.",
        "",
        f"| {marks} | iteration s | Tg s | Tt s | TPSPD | x | engine idle | trainer idle | engine "
        "MiB | trainer MiB | coordinator MiB | weights |",
        "|:-:|:-:|:-:" + "|---:" * 11 + "|",
    ]
    for row in rows:
        cells = ["on" if on else "off" for on in row.switches]
        cells += [f"{seconds:.2f}" for seconds in (row.iteration_s, row.generate_s, row.train_s)]
        cells += [
            f"{row.tpspd:,.0f}",
            f"{row.tpspd / base:.2f}",
            f"{row.engine_idle:.0%}",
            f"{row.trainer_idle:.0%}",
        ]
        cells += [f"{row.memory.get(kind, math.nan) / 2**20:,.0f}" for kind in _KINDS]
        lines.append(f"| {' | '.join([*cells, f'{row.weights_difference:.1e}'])} |")
    parts = ", ".join(
        f"{name} {math.exp(part):.2f}x ({part / total:.0%})"
        for name, part in zip(FACTORS, gained, strict=True)
    )
    lines += ["", f"Contributions to {math.exp(total):.2f}x (Shapley, of the logarithm): {parts}."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

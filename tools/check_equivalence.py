#!/usr/bin/env python
"""Show that periodic asynchrony changes nothing but the time: the same run synchronously and periodically, weights compared.

Five runs from one seed, real engines and trainers: sync with order=prompt, periodic with
order=prompt, periodic with order=completion, and with engines on the trainers' devices
(placement.colocate) in turns and with roles that follow the work. With order=prompt every weight
must be bit-identical (invariant I4); with order=completion groups are summed in another order, so
the largest relative difference is printed and must stay below 1e-5 in fp32. A run from another seed
is the negative control: it must differ, or the comparison shows nothing.

    python tools/check_equivalence.py [--iterations 4] [--work DIR] [key=value ...]
    python tools/check_equivalence.py --config configs/grpo_tiny_tools.yaml --work runs/equivalence_tools    # several turns

All have two engines and two replicas of the trainer, so that roles can change; how often they did
is printed. Exits with 1 when a bound is broken. With rollout.attach (see `pa_npu.launcher engines`)
the runs share engines that run already.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from pa_npu.telemetry.records import read_records

ROOT = Path(__file__).resolve().parent.parent
COMPLETION_BOUND = 1e-5
# Adam divides by the gradient's own size. Where the true gradient is zero (a key's bias does not
# change a softmax) its rounding would become full steps and hide the comparison; this epsilon keeps
# it as small as it is.
EPSILON = 1e-5


@dataclass(frozen=True)
class Variant:
    name: str
    overrides: tuple[str, ...]


REFERENCE = Variant("sync, order=prompt", ("schedule.stream=false", "schedule.order=prompt"))
VARIANTS = (
    Variant("periodic, order=prompt", ("schedule.stream=true", "schedule.order=prompt")),
    Variant("periodic, order=completion", ("schedule.stream=true", "schedule.order=completion")),
    Variant(
        "turns, order=prompt",
        ("placement.colocate=true", "schedule.stream=false", "schedule.order=prompt"),
    ),
    Variant(
        "roles, order=prompt",
        ("placement.colocate=true", "schedule.stream=true", "schedule.order=prompt"),
    ),
    Variant(
        "control: another seed", ("schedule.stream=false", "schedule.order=prompt", "run.seed=2")
    ),
)


@dataclass(frozen=True)
class Difference:
    """tensors: all; changed: not bit-identical; relative: largest over tensors of max|a - b| /
    max|a|.
    """

    tensors: int
    changed: int
    relative: float


def main(arguments: Sequence[str] | None = None, variants: Sequence[Variant] = VARIANTS) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=str(ROOT / "configs" / "grpo_tiny.yaml"))
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument(
        "--work", type=Path, default=Path("runs/equivalence"), help="where the runs are written"
    )
    parser.add_argument("overrides", nargs="*", help="further key=value for all runs")
    args = parser.parse_args(arguments)

    reference = run(args, REFERENCE)
    failed = False
    print(f"{'variant':<30} {'tensors':>8} {'changed':>8} {'max rel. difference':>20}  verdict")
    for variant in variants:
        difference = compare(reference, run(args, variant))
        ok, verdict = judge(variant, difference)
        failed |= not ok
        print(
            f"{variant.name:<30} {difference.tensors:>8} {difference.changed:>8} "
            f"{difference.relative:>20.3e}  {verdict}",
            flush=True,
        )
    return int(failed)


def run(args: argparse.Namespace, variant: Variant) -> dict[str, torch.Tensor]:
    """Run the launcher to its end and return the exported weights."""
    directory = args.work / variant.name.replace(" ", "_").replace(",", "").replace(
        "=", "-"
    ).replace(":", "")
    if directory.exists():
        raise SystemExit(
            f"check_equivalence: {directory} exists already; remove it or give another --work"
        )
    settings = [
        f"run.dir={directory}",
        f"schedule.iterations={args.iterations}",
        "schedule.compare_iterations=0",  # each variant is one kind of iteration
        f"optimizer.epsilon={EPSILON}",
        "model.dtype=fp32",
        "data.test=null",
        "rollout.engines=2",
        "trainer.devices=2",
        *args.overrides,
        *variant.overrides,
    ]
    command = [sys.executable, "-m", "pa_npu.launcher", "run", "--config", args.config, *settings]
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(directory.with_suffix(".log"), "w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        tail = "".join(Path(log.name).read_text().splitlines(keepends=True)[-15:])
        raise SystemExit(
            f"check_equivalence: the run '{variant.name}' ended with exit code {code}; its last "
            f"lines:\n{tail}"
        )
    weights: dict[str, torch.Tensor] = {}
    changes = sum(record.get("role_changes", 0) for record in read_records(directory))
    if "roles" in variant.name:
        print(f"{variant.name}: roles changed {changes} times", flush=True)
    for file in sorted((directory / "hf").glob("*.safetensors")):
        weights |= load_file(file)
    return weights


def compare(reference: dict[str, torch.Tensor], variant: dict[str, torch.Tensor]) -> Difference:
    """Compares two exports tensor by tensor. Raises SystemExit if they hold different tensors."""
    if reference.keys() != variant.keys():
        raise SystemExit(
            "check_equivalence: exports hold different tensors: "
            f"{sorted(reference.keys() ^ variant.keys())[:5]}"
        )
    changed = 0
    relative = 0.0
    for name, a in reference.items():
        b = variant[name]
        if not torch.equal(a, b):
            changed += 1
            relative = max(
                relative, ((a.double() - b.double()).abs().max() / a.double().abs().max()).item()
            )
    return Difference(len(reference), changed, relative)


def judge(variant: Variant, difference: Difference) -> tuple[bool, str]:
    if variant.name.startswith("control"):
        ok = difference.relative > COMPLETION_BOUND
        return (
            ok,
            "differs, as it must"
            if ok
            else "FAILED: the control does not differ, so equality shows nothing",
        )
    if "order=prompt" in variant.name:
        ok = difference.changed == 0
        return ok, "bit-identical" if ok else "FAILED: must be bit-identical"
    ok = difference.relative < COMPLETION_BOUND
    return (
        ok,
        f"below {COMPLETION_BOUND:g}" if ok else f"FAILED: must be below {COMPLETION_BOUND:g}",
    )


if __name__ == "__main__":
    raise SystemExit(main())

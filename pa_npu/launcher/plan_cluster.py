"""`pa-npu plan --from RUN` or `--devices`: what a cluster would take, from a run's records or from published figures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.errors import UserError
from pa_npu.families.spec import ModelSpec
from pa_npu.launcher.subcommands import configuration
from pa_npu.planning.known_models import known_spec
from pa_npu.planning.prediction.calibration import calibrate, published
from pa_npu.planning.prediction.cluster_plan import Basis, plan_cluster, planning_base
from pa_npu.planning.prediction.plan_report import as_json, plan_lines, write_plot
from pa_npu.planning.prediction.records import read_run
from pa_npu.planning.prediction.virtual_run import against_itself
from pa_npu.planning.prediction.workload import assumed_workload, seen_workload
from pa_npu.platform.typical import published_speed

_MOST_DEVICES = 65536
_DEFAULT_DEVICES = "8..4096"


def main(options: argparse.Namespace, rest: Sequence[str]) -> int:
    counts = device_counts(options.devices or _DEFAULT_DEVICES)
    basis = _basis(options, rest)
    plans = [plan_cluster(basis, count) for count in counts]
    if options.plot:
        write_plot(plans, options.plot)
    if options.json:
        print(json.dumps(as_json(basis, plans), indent=2))
    else:
        print("\n".join(plan_lines(basis, plans)))
    return 0


def device_counts(text: str) -> list[int]:
    """8..4096 by doubling, or 8,16,24. Raises UserError for anything else."""
    low, dots, high = text.partition("..")
    try:
        counts = [int(low), int(high)] if dots else [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 2 or max(counts) > _MOST_DEVICES or (dots and counts[0] > counts[1]):
        raise UserError(
            f"command line: --devices {text[:40]!r}: give a number of devices from 2 to {_MOST_DEVICES}, several with commas, or "
            f"a range such as {_DEFAULT_DEVICES}"
        )
    if not dots:
        return sorted(set(counts))
    first, last = counts
    doubled = []
    while first < last:
        doubled.append(first)
        first *= 2
    return [*doubled, last]


def _basis(options: argparse.Namespace, rest: Sequence[str]) -> Basis:
    if options.from_run is None:
        return _published_basis(options, rest)
    run = read_run(options.from_run)
    ran_on = published_speed(run.config.run.device if run.config.run.device != "auto" else "cpu")
    spec = _spec(run.config.model.path, options.from_run)
    calibration = calibrate(run, spec, ran_on)
    workload = seen_workload(run)
    calibration, ratio = against_itself(run, spec, calibration, workload, ran_on)
    typical = published_speed(options.hardware or options.device or ran_on_name(run.config))
    base = _overridden(Path(options.from_run) / "config.yaml", options, rest)
    target = _spec(options.model or base.model.path, "--model")
    grows = base.schedule.prompts_per_iteration / run.config.num_devices
    if typical.name != ran_on.name:  # speeds of another kind of device say nothing of this one
        calibration = published(planning_base(base, _kind(typical.name)), target, typical)
    return Basis(
        planning_base(base, _kind(typical.name)),
        target,
        calibration,
        workload,
        typical,
        abs(ratio - 1.0),
        None if options.same_work else grows,
    )


def _published_basis(options: argparse.Namespace, rest: Sequence[str]) -> Basis:
    config = configuration.read(options, rest)
    name = options.hardware or (config.run.device if config.run.device != "auto" else "npu")
    typical = published_speed(name)
    spec = _spec(options.model or config.model.path, "model.path")
    base = planning_base(config, _kind(typical.name))
    grows = base.schedule.prompts_per_iteration / config.num_devices
    return Basis(
        base,
        spec,
        published(base, spec, typical),
        assumed_workload(base),
        typical,
        0.0,
        None if options.same_work else grows,
    )


def ran_on_name(config: Config) -> str:
    """The published device that stands for the run's own."""
    return config.run.device if config.run.device != "auto" else "cpu"


def _overridden(file: Path, options: argparse.Namespace, rest: Sequence[str]) -> Config:
    for argument in rest:
        if argument.startswith("-"):
            raise UserError(f"command line: {argument}: unknown option; see --help")
    return load_config([str(file), *options.config], [*options.overrides, *rest])


def _spec(path: str, where: str) -> ModelSpec:
    spec = known_spec(path)
    if spec is not None and not (Path(path) / "config.json").is_file():
        return spec
    if not (Path(path) / "config.json").is_file():
        raise UserError(
            f"{where}: the model {path} is not here, and none whose shape is known by that name; give its directory (--model)"
        )
    return ModelSpec.read(path)


def _kind(name: str) -> str:
    return "cuda" if name in ("A100", "H100") else "cpu" if name == "a core" else "npu"

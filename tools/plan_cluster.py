"""Says what a cluster would take: how to divide its devices, what iterations then take, and what breaks first (docs/plan.md).

python tools/plan_cluster.py --from RUN [--devices 8..4096] [--model DIR] [--hardware NAME] [--json] [key=value ...]
python tools/plan_cluster.py --config YAML --devices 8..4096 [--hardware NAME] [--json] [key=value ...]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.errors import BAD_INPUT, UserError
from pa_npu.families.spec import ModelSpec
from pa_npu.launcher import subcommands
from pa_npu.planning.known_models import known_spec
from pa_npu.planning.prediction.workload import assumed_workload
from tools.cluster.hardware import published_speed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.cluster.calibration import published
from tools.cluster.fit import against_itself, calibrate
from tools.cluster.plan import KnownBasis, plan_cluster, planning_base
from tools.cluster.records import read_run, seen_workload
from tools.cluster.report import as_json, plan_lines, write_plot

_MAX_DEVICES = 65536
_DEFAULT_DEVICES = "8..4096"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    subcommands.configuration_options(parser)
    parser.add_argument(
        "--from", dest="from_run", metavar="RUN", help="predict from the records of this run"
    )
    parser.add_argument(
        "--devices", metavar="N[,N...]|N..N", help="numbers of devices, a range by doubling"
    )
    parser.add_argument(
        "--model", metavar="DIR", help="another model than the run's or the configuration's"
    )
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        help="device with published figures: 910b, a3, a100, h100, cpu",
    )
    parser.add_argument(
        "--same-work", action="store_true", help="as many prompts however many devices there are"
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="write a picture of how it grows, .png or .svg"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    try:
        _plan(*parser.parse_known_args(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    return 0


def _plan(options: argparse.Namespace, rest: Sequence[str]) -> None:
    counts = device_counts(options.devices or _DEFAULT_DEVICES)
    basis = _basis(options, rest)
    plans = [plan_cluster(basis, count) for count in counts]
    if options.plot:
        write_plot(plans, options.plot)
    if options.json:
        print(json.dumps(as_json(basis, plans), indent=2))
    else:
        print("\n".join(plan_lines(basis, plans)))


def device_counts(text: str) -> list[int]:
    """8..4096 by doubling, or 8,16,24. Raises UserError for anything else."""
    low, dots, high = text.partition("..")
    try:
        counts = [int(low), int(high)] if dots else [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if (
        not counts
        or min(counts) < 2
        or max(counts) > _MAX_DEVICES
        or (dots and counts[0] > counts[1])
    ):
        raise UserError(
            f"command line: --devices {text[:40]!r}: give a number of devices from 2 to "
            f"{_MAX_DEVICES}, several with commas, or a range such as {_DEFAULT_DEVICES}"
        )
    if not dots:
        return sorted(set(counts))
    first, last = counts
    doubled = []
    while first < last:
        doubled.append(first)
        first *= 2
    return [*doubled, last]


def _basis(options: argparse.Namespace, rest: Sequence[str]) -> KnownBasis:
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
    grows = base.schedule.prompts_per_iteration / run.config.devices.num_devices
    if typical.name != ran_on.name:  # speeds of another kind of device say nothing of this one
        calibration = published(planning_base(base, _kind(typical.name)), target, typical)
    return KnownBasis(
        planning_base(base, _kind(typical.name)),
        target,
        calibration,
        workload,
        typical,
        None if options.same_work else grows,
        abs(ratio - 1.0),
    )


def _published_basis(options: argparse.Namespace, rest: Sequence[str]) -> KnownBasis:
    config = subcommands.read(options, rest)
    name = options.hardware or (config.run.device if config.run.device != "auto" else "npu")
    typical = published_speed(name)
    spec = _spec(options.model or config.model.path, "model.path")
    base = planning_base(config, _kind(typical.name))
    grows = base.schedule.prompts_per_iteration / config.devices.num_devices
    return KnownBasis(
        base,
        spec,
        published(base, spec, typical),
        assumed_workload(base),
        typical,
        None if options.same_work else grows,
        0.0,
    )


def ran_on_name(config: Config) -> str:
    """Returns the published device that stands for the run's own."""
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
            f"{where}: the model {path} is not here, and none whose shape is known by that name; "
            "give its directory (--model)"
        )
    return ModelSpec.read(path)


def _kind(name: str) -> str:
    if name in ("A100", "H100"):
        return "cuda"
    return "cpu" if name == "a core" else "npu"


if __name__ == "__main__":
    raise SystemExit(main())

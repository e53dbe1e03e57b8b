"""The command line: `run`, `engines`, `export`, `doctor`, `--help` with every key. Bad input is one line and exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pa_npu.config.help import keys_help
from pa_npu.config.load import dump_config, load_config
from pa_npu.config.schema import Config
from pa_npu.errors import BAD_INPUT, FAILED, PaNpuError, UserError

_INTERRUPTED = 130
_MOST_MEMORY_GIB = 1_000_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed, 2 bad input, 128 + n stopped by signal n."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    try:
        return int(options.action(options, rest))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except PaNpuError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted before anything started", file=sys.stderr)
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m pa_npu.launcher", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="run | engines | export | doctor")
    keys = f"configuration keys (in YAML files, or as key=value on the command line):\n\n{keys_help()}"
    run = commands.add_parser(
        "run", help="start a run", epilog=keys, formatter_class=text, allow_abbrev=False, usage=_RUN_USAGE
    )
    _add_config_options(run)
    run.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration and its arithmetic; start nothing"
    )
    run.add_argument("--device-memory-gib", metavar="GIB", help="with --dry-run: memory of a device to plan with")
    run.set_defaults(action=_run)
    engines = commands.add_parser("engines", help="start engines alone, for runs that attach to them (rollout.attach)")
    _add_config_options(engines)
    engines.set_defaults(action=_engines)
    export = commands.add_parser("export", help="write the policy of a checkpoint as an HF directory")
    export.add_argument("--checkpoint", required=True, metavar="DIR", help="a directory .../iteration_NNNNNN")
    export.add_argument("--output", required=True, metavar="DIR", help="the HF directory to write")
    export.add_argument("--model", metavar="DIR", help="the HF model that the run began with, if it has moved")
    export.set_defaults(action=_export)
    doctor = commands.add_parser("doctor", help="say what is installed, what is missing and how to get it")
    _add_config_options(doctor)
    doctor.set_defaults(action=_doctor)
    return parser


_RUN_USAGE = (
    "python -m pa_npu.launcher run --config YAML [--config YAML ...] [--device KIND] "
    "[--dry-run [--device-memory-gib GIB]] [key=value ...]"
)


def _add_config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", action="append", default=[], metavar="YAML", help="configuration file; later ones win"
    )
    parser.add_argument("--device", choices=("auto", "npu", "cuda", "cpu"), help="short for run.device=KIND")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override of a configuration key")


def _config(options: argparse.Namespace, rest: Sequence[str]) -> Config:
    """Overrides may stand before, between and after the options; argparse leaves the later ones in `rest`."""
    for argument in rest:
        if argument.startswith("-"):
            raise UserError(f"command line: {argument}: unknown option; see --help")
    device = [f"run.device={options.device}"] if options.device else []
    return load_config(options.config, [*options.overrides, *rest, *device])


def _run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from pa_npu.launcher.resume import resolve_resume

    given = _config(options, rest)
    if options.device_memory_gib is not None and not options.dry_run:
        raise UserError("command line: --device-memory-gib is for planning; add --dry-run, or remove it")
    memory_gib = _memory_gib(options.device_memory_gib)
    config = resolve_resume(given, lambda line: print(line, file=sys.stderr))
    if options.dry_run:
        return _dry_run(config, memory_gib)
    from pa_npu.launcher.run import run  # imports torch; --help and mistakes in the configuration need not wait for it

    return run(config)


def _memory_gib(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        memory_gib = float(text)
    except ValueError:
        memory_gib = 0.0
    if not 0 < memory_gib <= _MOST_MEMORY_GIB:  # NaN is neither
        raise UserError(
            f"command line: --device-memory-gib {text[:40]!r} is no size of a memory; give a number above 0 and up to "
            f"{_MOST_MEMORY_GIB}"
        )
    return memory_gib


def _engines(options: argparse.Namespace, rest: Sequence[str]) -> int:
    config = _config(options, rest)
    from pa_npu.launcher.run import run_engines

    return run_engines(config)


def _export(options: argparse.Namespace, rest: Sequence[str]) -> int:
    if rest:
        raise UserError(f"command line: {rest[0]}: unknown argument of export; see --help")
    from pa_npu.backends.registry import export_checkpoint

    export_checkpoint(Path(options.checkpoint), Path(options.output), options.model)
    print(f"wrote {options.output}")
    return 0


def _dry_run(config: Config, device_memory_gib: float | None) -> int:
    """Print what a run would be. What this machine merely lacks becomes a note, so that a cluster's run can be planned."""
    from pa_npu.launcher.placement import placement_lines
    from pa_npu.launcher.run_checks import check_surroundings, resolve_device
    from pa_npu.planning.plan_text import derived_lines

    config, platform = resolve_device(config, forgive=True)
    findings = check_surroundings(config, platform, forgive=True, device_memory_gib=device_memory_gib)
    placement = placement_lines(findings.placements) if findings.placements else []
    print(dump_config(config))
    for line in derived_lines(config, findings.spec, findings.device_bytes, findings.own_memory):
        print(f"# {line}")
    for line in (*findings.counts, *placement):
        print(f"# {line}")
    for note in findings.notes:
        print(f"# note: {note}")
    return 0


def _doctor(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from pa_npu.launcher.doctor import doctor

    config = _config(options, rest) if options.config or options.overrides or rest else None
    return doctor(config)

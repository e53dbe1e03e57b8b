"""`pa-npu run`: a run from its configuration, or with --dry-run only its plan."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pa_npu.errors import UserError
from pa_npu.launcher.subcommands import configuration, plan


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "pa-npu run --config YAML [--config YAML ...] [--device KIND] "
        "[--dry-run [--full] [--device-memory-gib GIB]] [key=value ...]"
    )
    configuration.add_options(parser)
    configuration.add_keys(parser)
    parser.add_argument("--dry-run", action="store_true", help="what `pa-npu plan` does")
    parser.add_argument("--full", action="store_true", help="with --dry-run: print the resolved configuration as well")
    parser.add_argument("--device-memory-gib", metavar="GIB", help="with --dry-run: memory of a device to plan with")


def main(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from pa_npu.launcher.resume import resolve_resume

    if options.dry_run:
        return plan.show(options, rest, full=options.full)
    given = configuration.read(options, rest)
    for option, given_there in (
        ("--device-memory-gib", options.device_memory_gib is not None),
        ("--full", options.full),
    ):
        if given_there:
            raise UserError(f"command line: {option} is for planning; add --dry-run, or remove it")
    config = resolve_resume(given, lambda line: print(line, file=sys.stderr))
    print("checking model, data, rewards and devices", flush=True)
    from pa_npu.launcher.run import run  # imports torch; --help and mistakes in the configuration need not wait for it

    return run(config)

"""`pa-npu plan`: what a run would be, with its memory and the model of its schedule, without starting anything."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pa_npu.config.load import dump_config
from pa_npu.launcher.subcommands import configuration


def configure(parser: argparse.ArgumentParser) -> None:
    configuration.add_options(parser)
    parser.add_argument("--full", action="store_true", help="print the resolved configuration as well")
    parser.add_argument("--device-memory-gib", metavar="GIB", help="memory of a device to plan with")


def main(options: argparse.Namespace, rest: Sequence[str]) -> int:
    return show(options, rest, full=options.full)


def show(options: argparse.Namespace, rest: Sequence[str], full: bool = False) -> int:
    """Print what follows from a configuration, and with --full the resolved tree, of which the rest are then comments.

    What this machine merely lacks becomes a note, so that a cluster's run can be planned.
    """
    from pa_npu.launcher.placement import placement_lines
    from pa_npu.launcher.run_checks import prepare
    from pa_npu.planning.plan_text import derived_lines

    given = configuration.read(options, rest)
    memory_gib = configuration.memory_gib(options.device_memory_gib)
    config, findings = prepare(
        given, lambda line: print(line, file=sys.stderr), forgive=True, device_memory_gib=memory_gib
    )
    placement = placement_lines(findings.placements) if findings.placements else []
    lines = [
        *derived_lines(config, findings.spec, findings.device_bytes, findings.own_memory),
        *findings.counts,
        *placement,
    ]
    lines += [f"note: {note}" for note in findings.notes]
    print("\n".join(f"# {line}" if full else line for line in lines))
    print(dump_config(config) if full else "The resolved configuration: the same command with --full.")
    return 0

"""`pa-npu engines`: engines that outlive runs, which attach to them with rollout.attach."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pa_npu.launcher.subcommands import configuration


def configure(parser: argparse.ArgumentParser) -> None:
    configuration.add_options(parser)


def main(options: argparse.Namespace, rest: Sequence[str]) -> int:
    config = configuration.read(options, rest)
    from pa_npu.launcher.run import run_engines

    return run_engines(config)

"""`pa-npu join HOST:PORT`: one more engine for a running job, from this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pa_npu.launcher.subcommands import configuration


def configure(parser: argparse.ArgumentParser) -> None:
    from pa_npu.launcher.join import add_arguments

    add_arguments(parser)


def main(options: argparse.Namespace, rest: Sequence[str]) -> int:
    configuration.refuse(rest)
    from pa_npu.launcher.join import join_with

    return join_with(options)

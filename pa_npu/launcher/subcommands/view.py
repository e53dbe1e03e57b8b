"""`pa-npu view`: a run as a page, served on loopback until Ctrl-C or written as one HTML file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pa_npu.launcher.subcommands import configuration
from pa_npu.viewer import command as viewer


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = viewer.__doc__
    viewer.add_arguments(parser)


def main(options: argparse.Namespace, rest: Sequence[str]) -> int:
    configuration.refuse(rest)
    return viewer.view(options)

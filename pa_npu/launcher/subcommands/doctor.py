"""`pa-npu doctor`: this machine, its installation, and with a configuration whether that one could run here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pa_npu.launcher.subcommands import configuration


def configure(parser: argparse.ArgumentParser) -> None:
    configuration.add_options(parser)


def main(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from pa_npu.launcher.doctor import doctor

    return doctor(configuration.read(options, rest) if configuration.is_given(options, rest) else None, options.device)

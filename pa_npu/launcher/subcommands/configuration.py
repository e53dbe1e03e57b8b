"""The options that name a configuration, the same for every sub-command that reads one: files, device, overrides."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from pa_npu.config.keys import keys_help
from pa_npu.config.schema import Config
from pa_npu.errors import UserError
from pa_npu.planning import automatic

_MOST_MEMORY_GIB = 1_000_000


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", action="append", default=[], metavar="YAML", help="configuration file; later ones win"
    )
    parser.add_argument("--device", choices=("auto", "npu", "cuda", "cpu"), help="short for run.device=KIND")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override of a configuration key")


def add_keys(parser: argparse.ArgumentParser) -> None:
    """All keys below the options of --help."""
    parser.epilog = f"configuration keys (in YAML files, or as key=value on the command line):\n\n{keys_help()}"


def overrides(options: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """They may stand before, between and after the options; argparse leaves the later ones in `rest`."""
    for argument in rest:
        if argument.startswith("-"):
            raise UserError(f"command line: {argument}: unknown option; see --help")
    return [*options.overrides, *rest, *([f"run.device={options.device}"] if options.device else [])]


def read(options: argparse.Namespace, rest: Sequence[str]) -> Config:
    return automatic.load(options.config, overrides(options, rest), lambda line: print(line, file=sys.stderr))


def is_given(options: argparse.Namespace, rest: Sequence[str]) -> bool:
    """Whether the command line names a configuration at all."""
    return bool(options.config or options.overrides or rest)


@contextmanager
def called(names: Mapping[str, str]) -> Iterator[None]:
    """Keys at the beginning of a refusal by what the sub-command calls them. names: of options by key."""
    try:
        yield
    except UserError as error:
        for key, option in names.items():
            if found := re.match(rf"(command line: )?{re.escape(key)}", str(error)):
                raise type(error)(f"{found[1] or ''}{option}{str(error)[found.end() :]}") from None
        raise


def refuse(rest: Sequence[str]) -> None:
    """For sub-commands without a configuration."""
    if rest:
        raise UserError(f"command line: {rest[0]}: unknown argument; see --help")


def memory_gib(text: str | None) -> float | None:
    """The size that --device-memory-gib names. Raises UserError where it is none."""
    if text is None:
        return None
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size <= _MOST_MEMORY_GIB:  # NaN is neither
        raise UserError(
            f"command line: --device-memory-gib {text[:40]!r} is no size of a memory; give a number above 0 and up to "
            f"{_MOST_MEMORY_GIB}"
        )
    return size

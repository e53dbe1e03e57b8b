"""The command `pa-npu`: a table of sub-commands, of which only the named one is imported.

Bad input is one line and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from pa_npu import __version__
from pa_npu.config.plain_file import reason
from pa_npu.config.words import choose_among
from pa_npu.errors import BAD_INPUT, FAILED, PaNpuError, UserError, printable

PROGRAM = "pa-npu"
_INTERRUPTED = 130


# A sub-command of your own is two functions of a module (see subcommands.py) and its line in --help
# here.
SUBCOMMANDS = {
    "run": "start a run, or continue it",
    "plan": "print the resolved configuration and its arithmetic; start nothing",
    "doctor": "say what is installed, what is missing and how to get it",
    "selftest": "try everything on this machine's devices, and write a report",
    "engines": "start engines alone, for runs that attach to them",
    "serve": "train and sample by calls of clients' own loops (the wire of tinker's SDK)",
    "join": "add an engine to a running job",
    "export": "write the policy of a checkpoint as an HF directory",
    "report": "print the throughput of runs side by side",
    "verify": "say whether a run is what its chain says, from its files or by repeating iterations",
    "diff": "say since when and in what two runs differ",
    "evaluate": "answer sets of questions with a model or checkpoint, and say how many are right",
    "view": "show a run as a page: live on this machine, or as one HTML file",
}
# Those that take a configuration; `--help SECTION` prints its keys.
_CONFIGURED = ("run", "plan", "doctor", "engines", "serve")
# Where their functions are, if not in subcommands.py.
_MODULES = {
    "diff": "diff",
    "join": "join_command",
    "selftest": "selftest.command",
    "serve": "serve_command",
    "verify": "verify",
    "view": "view",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed, 2 bad input, 128 + n stopped by signal n."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        _check_working_directory()
        if (text := _help_of_section(arguments)) is not None:
            print(text)
            return 0
        _check_subcommand(arguments)
        options, rest = _parser(arguments).parse_known_args(arguments)
        return int(options.main(options, rest))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except PaNpuError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted before anything started", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # whoever read the output has seen enough; nor may Python's exit fail on what is still to be
        # written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        print(f"error: {_met(error)}", file=sys.stderr)
        return BAD_INPUT


def _help_of_section(arguments: Sequence[str]) -> str | None:
    """Returns the keys that `run --help SECTION` or `run --help KEY` asks for, also for the other
    sub-commands with a configuration; None for other help.

    Raises UserError for an unknown section or key.
    """
    if not arguments or arguments[0] not in _CONFIGURED or not {"--help", "-h"} & set(arguments):
        return None
    named = [
        word
        for word in arguments[1:]
        if not word.startswith("-") and "=" not in word and "/" not in word
    ]
    if not named or "--config" in arguments:
        return None
    from pa_npu.config.keys import nearest_help
    from pa_npu.launcher.subcommands import run_help

    text = run_help(named[0])
    if text is None:
        nearest = nearest_help(named[0])
        remedy = f"did you mean {nearest}?" if nearest else f"see pa-npu {arguments[0]} --help"
        raise UserError(
            f"command line: {named[0]}: no section or key of the configuration; {remedy}"
        )
    return text


def _check_working_directory() -> None:
    """Libraries fail in ways of their own where it has been deleted."""
    try:
        os.getcwd()
    except OSError as error:
        raise UserError(
            f"the working directory cannot be used ({reason(error)}); go into another one"
        ) from None


def _met(error: OSError) -> str:
    """Says what the system refused, if no check has said it in its own words."""
    place = f"{error.filename}: " if error.filename else ""
    return printable(
        f"{place}{reason(error)}; what stands there must be what the command needs, and within its "
        "rights"
    )


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all others of this command are."""

    def error(self, message: str) -> NoReturn:
        """Raises UserError."""
        message = message.removeprefix("argument ")
        raise UserError(f"command line: {message}; see {self.prog} --help")


def _check_subcommand(arguments: Sequence[str]) -> None:
    """Raises UserError unless the first argument is a sub-command or an option."""
    names = ", ".join(SUBCOMMANDS)
    if not arguments:
        raise UserError(
            f"command line: a sub-command is needed: {names}; see {PROGRAM} --help, or begin with "
            f"{PROGRAM} run --config FILE"
        )
    name = arguments[0]
    if name.startswith("-") or name in SUBCOMMANDS:
        return
    raise UserError(
        f"command line: {name!r} is no sub-command of {names}; {choose_among(name, SUBCOMMANDS)}"
    )


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Returns all sub-commands by name and line; the arguments of the one that is named, whose
    module is imported.
    """
    parser = _Parser(
        PROGRAM,
        description="Periodic-asynchronous reinforcement-learning post-training for language "
        "models.",
        epilog=f"`{PROGRAM} NAME --help` says more, for `run` every configuration key.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(required=True, metavar=" | ".join(SUBCOMMANDS))
    for name, line in SUBCOMMANDS.items():
        inner = commands.add_parser(
            name,
            help=line,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if name in arguments[:1]:
            module = import_module(f"pa_npu.launcher.{_MODULES.get(name, 'subcommands')}")
            inner.description = line[0].upper() + line[1:] + "."
            getattr(module, f"{name}_options")(inner)
            inner.set_defaults(main=getattr(module, name))
    return parser

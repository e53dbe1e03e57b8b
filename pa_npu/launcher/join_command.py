"""The options of `pa-npu join`. They are apart from join.py, which imports torch: help need not wait for it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from pa_npu.config.texts import host_problem, path_problem, shown
from pa_npu.launcher.subcommands import refuse

_MAX_INDEX_DIGITS = 6  # of a device


def join_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "join",
        type=_address,
        metavar="HOST:PORT",
        help="the store of the run, which its launcher prints",
    )
    parser.add_argument(
        "--host",
        type=_host,
        help="address to listen on, which coordinator and trainers reach; default: the one that "
        "reaches the store",
    )
    parser.add_argument(
        "--devices",
        type=_indices,
        metavar="4,5",
        help="devices to use, rollout.tensor_parallel of them; on cpu the cores to pin to "
        "(default: none)",
    )
    parser.add_argument(
        "--python",
        type=_path,
        metavar="INTERPRETER",
        help="that has the engine; default: rollout.python of the run",
    )


def join(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Adds an engine to a running job; returns the exit code when the engine has left."""
    refuse(rest)
    from pa_npu.launcher.join import join as join_run

    return join_run(options.join, options.host, options.devices, options.python)


def _address(text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not HOST:PORT; the run's launcher prints it"
        )
    if not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{shown(port)} is no port; give a number from 1 to 65535")
    return _host(host.strip("[]")), int(port)


def _host(text: str) -> str:
    problem = host_problem(text) if text else "is empty"
    if problem:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} {problem}; give the address or the name of a machine"
        )
    return text


def _path(text: str) -> str:
    path = os.path.expanduser(text)
    problem = path_problem(path) if path else "is empty"
    if problem:
        raise argparse.ArgumentTypeError(
            f"{shown(path)} {problem}; give the path of an interpreter"
        )
    return path


def _indices(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) <= _MAX_INDEX_DIGITS for part in parts):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not a list of device indices such as 4,5"
        )
    return tuple(map(int, parts))

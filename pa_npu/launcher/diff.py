"""`pa-npu diff RUN1 RUN2`: since when two runs differ, in what first, and by how much.

pa-npu diff runs/before_upgrade runs/after_upgrade

Exit codes: 0 equal, to the bit or within rounding where they had reason to differ by it; 1 they
differ; 2 bad input; 3 undecided, because such runs sampled other tokens somewhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pa_npu.config.words import counted
from pa_npu.errors import DataError
from pa_npu.launcher.subcommands import refuse
from pa_npu.launcher.tensor_difference import compare_checkpoints
from pa_npu.telemetry.chain import read_chain
from pa_npu.telemetry.chain_comparison import Comparison, Verdict, compare_chains
from pa_npu.telemetry.chain_sentences import compared_iterations, sentences
from pa_npu.telemetry.sample_store import read_samples, sample_iterations

_NO_CHECKPOINT = (
    "which tensor differs is not known: the runs have no checkpoint of one version behind it"
)
EXIT_CODES: dict[Verdict, int] = {"equal": 0, "rounding": 0, "different": 1, "undecided": 3}


def diff_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = __doc__
    parser.add_argument("runs", nargs=2, metavar="RUN", help="run directory")


def diff(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Compares, prints, and returns the exit code. Raises UserError."""
    refuse(rest)
    first, second = (Path(run) for run in options.runs)
    comparison = compare_chains(read_chain(first), read_chain(second))
    if not comparison.iterations:
        raise DataError(
            f"{first} and {second} have no iteration in common; give runs that share some"
        )
    code, lines = report(comparison, first, second)
    print("\n".join(lines))
    return code


def report(comparison: Comparison, first: Path, second: Path) -> tuple[int, list[str]]:
    """Returns the exit code, and sentences on what was compared and what differs."""
    lines = [
        f"first {first}, second {second}: {compared_iterations(comparison)}",
        *sentences(comparison),
    ]
    code = EXIT_CODES[comparison.verdict]
    if comparison.verdict == "equal":
        return code, lines
    if comparison.verdict == "rounding":
        return _judge_weights(comparison, first, second, lines)
    cause = comparison.last[0]
    if cause.aspect == "responses" and cause.response is not None:
        lines += token_lines(first, second, cause.iteration, *cause.response)
    if cause.aspect in ("gradient", "weights"):
        compared = compare_checkpoints(first, second, cause.iteration)
        lines.append(_NO_CHECKPOINT if compared is None else compared.line)
    return code, lines


def _judge_weights(
    comparison: Comparison, first: Path, second: Path, lines: list[str]
) -> tuple[int, list[str]]:
    """Judges runs that are within rounding so far by their last weights, if checkpoints have them."""
    since = comparison.differences[0].iteration
    compared = compare_checkpoints(first, second, since, begin=comparison.begin, last=True)
    if compared is None:
        lines.append(_NO_CHECKPOINT)
    else:
        lines.append(compared.line)
        share = compared.of_update
        rounding = comparison.rounding
        if share is not None and rounding is not None and share > rounding.weights:
            lines.append(
                f"they differ in the weights, by more than {rounding.weights:g} of their way"
            )
            return EXIT_CODES["different"], lines
    lines.append(f"equal within rounding over {counted(comparison.iterations, 'iteration')}")
    return EXIT_CODES["rounding"], lines


def token_lines(first: Path, second: Path, iteration: int, group: int, response: int) -> list[str]:
    """Says which token of a response differs first, where both runs have kept it
    (telemetry.samples)."""
    rows = [_kept(run, iteration, group, response) for run in (first, second)]
    if rows[0] is None or rows[1] is None:
        return ["which token is not known: not both runs kept this response (telemetry.samples)"]
    tokens = [np.asarray(row["tokens"]) for row in rows if row is not None]
    size = min(len(tokens[0]), len(tokens[1]))
    differs = tokens[0][:size] != tokens[1][:size]
    if not differs.any():
        return [f"token {size} differs: one response ends there, and the other goes on"]
    place = int(differs.argmax())
    logprobs = [np.asarray(row["logprobs"][:place]) for row in rows if row is not None]
    apart = float(np.abs(logprobs[0] - logprobs[1]).max()) if place else 0.0
    ids = " and ".join(str(values[place]) for values in tokens)
    return [
        f"token {place} differs: it is {ids}; log-probs of the tokens before it are at most "
        f"{apart:.2g} apart"
    ]


def _kept(run: Path, iteration: int, group: int, response: int) -> dict[str, Any] | None:
    if iteration not in sample_iterations(run):
        return None
    rows = read_samples(run, iteration)
    return next((row for row in rows if (row["index"], row["response"]) == (group, response)), None)

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
from pa_npu.telemetry.chain_comparison import Comparison, Difference, Verdict, compare_chains
from pa_npu.telemetry.sample_store import read_samples, sample_iterations

_NO_CHECKPOINT = "which tensor differs is not known: the runs have no checkpoint of one version behind it"
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
        raise DataError(f"{first} and {second} have no iteration in common; give runs that share some")
    code, lines = report(comparison, first, second)
    print("\n".join(lines))
    return code


def report(comparison: Comparison, first: Path, second: Path) -> tuple[int, list[str]]:
    """Returns the exit code, and what was compared and what differs, for people."""
    last = comparison.begin + comparison.iterations - 1
    span = f"iterations {comparison.begin} to {last}" if comparison.iterations > 1 else f"iteration {last}"
    lines = [f"first {first}, second {second}: {span}"]
    lines += [f"bits may differ: {cause}" for cause in comparison.causes]
    code = EXIT_CODES[comparison.verdict]
    if comparison.verdict == "equal":
        return code, [*lines, "equal to the bit: data, responses, log-probs, rewards, gradients and weights"]
    begin = comparison.differences[0].iteration
    if comparison.verdict == "rounding":
        lines += _named("the first bits differ", begin, comparison.differences)
        return _judge_weights(comparison, first, second, begin, lines)
    decisive = comparison.last
    if begin < decisive[0].iteration:
        lines += _named("the first bits differ, within rounding", begin, comparison.differences)
    word = "cannot be compared further" if comparison.verdict == "undecided" else "they differ"
    lines += _named(word, decisive[0].iteration, decisive)
    if decisive[0].aspect == "responses" and decisive[0].response is not None:
        lines += token_lines(first, second, decisive[0].iteration, *decisive[0].response)
    if decisive[0].aspect in ("gradient", "weights"):
        compared = compare_checkpoints(first, second, decisive[0].iteration)
        lines.append(_NO_CHECKPOINT if compared is None else compared.line)
    return code, lines


def _judge_weights(
    comparison: Comparison, first: Path, second: Path, begin: int, lines: list[str]
) -> tuple[int, list[str]]:
    """Of runs that are within rounding so far: so must be their last weights, as far as checkpoints show them."""
    compared = compare_checkpoints(first, second, begin, begin=comparison.begin, last=True)
    if compared is None:
        lines.append(_NO_CHECKPOINT)
    else:
        lines.append(compared.line)
        share = compared.of_update
        if share is not None and comparison.rounding is not None and share > comparison.rounding.weights:
            limit = comparison.rounding.weights
            return EXIT_CODES["different"], [*lines, f"they differ in the weights, by more than {limit:g} of their way"]
    return EXIT_CODES["rounding"], [*lines, f"equal within rounding over {counted(comparison.iterations, 'iteration')}"]


def _named(word: str, iteration: int, differences: Sequence[Difference]) -> list[str]:
    cause, *effects = differences
    lines = [f"{word} in iteration {iteration}, first in the {cause.aspect}: {cause.text}"]
    if effects:
        lines.append(f"and therefore in: {', '.join(effect.aspect for effect in effects)}")
    return lines


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
    return [f"token {place} differs: it is {ids}; log-probs of the tokens before it are at most {apart:.2g} apart"]


def _kept(run: Path, iteration: int, group: int, response: int) -> dict[str, Any] | None:
    if iteration not in sample_iterations(run):
        return None
    rows = read_samples(run, iteration)
    return next((row for row in rows if (row["index"], row["response"]) == (group, response)), None)

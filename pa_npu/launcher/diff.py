"""`pa-npu diff RUN1 RUN2`: since when two runs differ, in what first, and by how much.

pa-npu diff runs/before_upgrade runs/after_upgrade

Exit codes: 0 equal, to the bit or within rounding where they had reason to differ by it; 1 they
differ; 2 bad input; 3 undecided, because such runs sampled other tokens somewhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pa_npu.config.words import counted
from pa_npu.errors import DataError
from pa_npu.launcher.subcommands import refuse
from pa_npu.launcher.tensor_difference import tensor_lines
from pa_npu.telemetry.chain import read_chain
from pa_npu.telemetry.chain_comparison import Comparison, Difference, Verdict, compare_chains
from pa_npu.telemetry.sample_store import read_samples, sample_iterations

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
    for line in comparison_lines(comparison, first, second):
        print(line)
    return EXIT_CODES[comparison.verdict]


def comparison_lines(comparison: Comparison, first: Path, second: Path) -> list[str]:
    """Says what was compared and what differs, for people."""
    last = comparison.begin + comparison.iterations - 1
    span = f"iterations {comparison.begin} to {last}" if comparison.iterations > 1 else f"iteration {last}"
    lines = [f"first {first}, second {second}: {span}"]
    lines += [f"bits may differ: {cause}" for cause in comparison.causes]
    if comparison.verdict == "equal":
        return [*lines, "equal to the bit: data, responses, log-probs, rewards, gradients and weights"]
    begin = comparison.differences[0].iteration
    if comparison.verdict == "rounding":
        lines += _named("the first bits differ", begin, comparison.differences)
        lines += tensor_lines(first, second, begin)
        return [*lines, f"equal within rounding over {counted(comparison.iterations, 'iteration')}"]
    decisive = comparison.last
    if begin < decisive[0].iteration:
        lines += _named("the first bits differ, within rounding", begin, comparison.differences)
    word = "cannot be compared further" if comparison.verdict == "undecided" else "they differ"
    lines += _named(word, decisive[0].iteration, decisive)
    if decisive[0].aspect == "responses" and decisive[0].response is not None:
        lines += token_lines(first, second, decisive[0].iteration, *decisive[0].response)
    if decisive[0].aspect in ("gradient", "weights", "weights before"):
        lines += tensor_lines(first, second, decisive[0].iteration)
    return lines


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


def _kept(run: Path, iteration: int, group: int, response: int) -> dict[str, object] | None:
    if iteration not in sample_iterations(run):
        return None
    rows = read_samples(run, iteration)
    return next((row for row in rows if (row["index"], row["response"]) == (group, response)), None)

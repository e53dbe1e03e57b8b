"""Results per question: what each response was worth, numbers with 95% intervals, one parquet file per evaluation, comparison.

Questions are the independent draws; several responses to one question are not. So every number is
first one of a question, between 0 and 1, and the interval is that of the mean of these. Intervals
of shares are Wilson's (1927) with as many draws as give the same standard error, which keeps them
inside 0..1 and honest near its ends.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pa_npu.config.plain_file import reason
from pa_npu.errors import DataError
from pa_npu.telemetry.records import note_lost
from pa_npu.telemetry.sample_store import read_table, write_table

DIRECTORY = "evaluations"
GREEDY = "greedy"
SAMPLE = "sample"
Z = statistics.NormalDist().inv_cdf(0.975)  # intervals of 95%


@dataclass(frozen=True)
class Estimate:
    """A mean over `questions` questions with its interval."""

    value: float
    low: float
    high: float
    questions: int


@dataclass(frozen=True)
class Judged:
    """One response of an evaluation. name: of the set; question: its row there. kind: greedy or
    sample; number: among the samples. final: the answer that it ends with, None where it gives
    none. tokens: its length. finished: by itself, not cut at the limit."""

    name: str
    question: int
    prompt: str
    answer: str
    kind: str
    number: int
    text: str
    final: str | None
    correct: bool
    reward: float
    tokens: int
    finished: bool


@dataclass(frozen=True)
class SetSummary:
    """One set in numbers. metrics: greedy, avg@n, pass@k, maj@k, by name.

    Lengths are tokens of all its responses.
    """

    questions: int
    responses: int
    metrics: dict[str, Estimate]
    length_mean: float
    length_median: float
    length_95: float
    truncated_ratio: float


def values_by_question(responses: Iterable[Judged]) -> dict[str, dict[int, float]]:
    """The numbers of one set's questions by metric: greedy, avg@n, pass@k and maj@k for the powers
    of two up to n, and n.

    n: the samples that every question has.
    """
    greedy: dict[int, float] = {}
    samples: dict[int, list[Judged]] = {}
    for response in responses:
        if response.kind == GREEDY:
            greedy[response.question] = float(response.correct)
        else:
            samples.setdefault(response.question, []).append(response)
    found = {GREEDY: greedy} if greedy else {}
    if not samples:
        return found
    count = min(len(own) for own in samples.values())
    powers = [2**exponent for exponent in range(1, count.bit_length()) if 2**exponent < count]
    found[f"avg@{count}"] = {
        q: statistics.fmean(r.correct for r in own[:count]) for q, own in samples.items()
    }
    for k in [*powers, count] if count > 1 else []:
        found[f"pass@{k}"] = {
            q: pass_at_k(count, sum(r.correct for r in own[:count]), k)
            for q, own in samples.items()
        }
    for k in [k for k in (*powers, count) if k > 2]:
        found[f"maj@{k}"] = {
            q: majority_at_k([r.final for r in own[:count]], [r.correct for r in own[:count]], k)
            for q, own in samples.items()
        }
    return found


def summarise(responses: Sequence[Judged]) -> dict[str, SetSummary]:
    """By set, in the order in which they first appear."""
    summaries = {}
    for name in dict.fromkeys(response.name for response in responses):
        own = [response for response in responses if response.name == name]
        lengths = sorted(response.tokens for response in own)
        summaries[name] = SetSummary(
            questions=len({response.question for response in own}),
            responses=len(own),
            metrics={
                metric: estimate([values[question] for question in sorted(values)])
                for metric, values in values_by_question(own).items()
            },
            length_mean=statistics.fmean(lengths),
            length_median=statistics.median(lengths),
            length_95=lengths[min(len(lengths) - 1, int(0.95 * len(lengths)))],
            truncated_ratio=1 - statistics.fmean(response.finished for response in own),
        )
    return summaries


Values = dict[str, dict[str, dict[int, float]]]
"""The numbers of questions, by set, metric and question."""


def set_values(responses: Sequence[Judged]) -> Values:
    by_set: dict[str, list[Judged]] = {}
    for response in responses:
        by_set.setdefault(response.name, []).append(response)
    return {name: values_by_question(own) for name, own in by_set.items()}


def compare(before: Sequence[Judged], after: Sequence[Judged]) -> dict[str, dict[str, Estimate]]:
    """after - before by set and metric, over the questions that both have; sets and metrics that
    both have.
    """
    return differences(set_values(before), set_values(after))


def differences(before: Values, after: Values) -> dict[str, dict[str, Estimate]]:
    """As `compare`."""
    found: dict[str, dict[str, Estimate]] = {}
    for name, old in before.items():
        new = after.get(name, {})
        for metric in [metric for metric in old if metric in new]:
            common = sorted(old[metric].keys() & new[metric].keys())
            if common:
                found.setdefault(name, {})[metric] = paired_difference(
                    [old[metric][q] for q in common], [new[metric][q] for q in common]
                )
    return found


class Progress:
    """Each evaluation of a run against the first and against the one before, question by question."""

    def __init__(self, run_dir: Path | str) -> None:
        """With what the run directory keeps of earlier attempts; what cannot be read is left out."""
        self._first: tuple[int, Values] | None = None
        self._before: tuple[int, Values] | None = None
        kept = kept_versions(run_dir)
        for version in dict.fromkeys([*kept[:1], *kept[-1:]]):
            try:
                self._take(version, set_values(read_results(results_file(run_dir, version))))
            except DataError:
                continue

    def _take(self, version: int, found: Values) -> None:
        self._before = (version, found)
        self._first = self._first or self._before

    def differences(self, version: int, responses: Sequence[Judged]) -> dict[str, Any]:
        """For evaluations.jsonl: {first, before: {version, sets: by set and metric}}; empty for the
        first evaluation.
        """
        found, said = set_values(responses), {}
        for name, known in (("first", self._first), ("before", self._before)):
            if known is not None:
                sets = differences(known[1], found)
                plain = {
                    set_: {metric: asdict(e) for metric, e in metrics.items()}
                    for set_, metrics in sets.items()
                }
                said[name] = {"version": known[0], "sets": plain}
        self._take(version, found)
        return said


def results_file(directory: Path | str, version: int) -> Path:
    return Path(directory) / DIRECTORY / f"version_{version:06d}.parquet"


def kept_versions(run_dir: Path | str) -> list[int]:
    """Versions of which a run keeps results per question."""
    names = [path.name for path in (Path(run_dir) / DIRECTORY).glob("version_*.parquet")]
    return sorted(
        int(found[1])
        for name in names
        if (found := re.fullmatch(r"version_(\d{6,10})\.parquet", name))
    )


def write_results(file: Path, responses: Sequence[Judged]) -> None:
    """All of the file or nothing; what cannot be written is counted, and raises nothing."""
    import pyarrow as pa

    kinds = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    types = {
        "question": int,
        "number": int,
        "tokens": int,
        "reward": float,
        "correct": bool,
        "finished": bool,
    }
    schema = pa.schema(
        [(name, kinds[types.get(name, str)]) for name in Judged.__dataclass_fields__]
    )
    try:
        write_table(file, [asdict(response) for response in responses], schema)
    except (OSError, pa.ArrowException) as error:
        note_lost(file, error)


def read_results(file: Path | str) -> list[Judged]:
    """Read what write_results wrote. Raises DataError where it cannot be read."""
    try:
        return [Judged(**row) for row in read_table(Path(file))]
    except (DataError, TypeError) as error:
        if not Path(file).exists():
            raise DataError(
                f"{file}: does not exist; name RUN/evaluations/version_N.parquet"
            ) from None
        raise DataError(
            f"{file}: holds no results of an evaluation ({reason(error)}); name "
            "RUN/evaluations/version_N.parquet"
        ) from None


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that at least one of k responses drawn without replacement from the num_samples is
    correct.

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, eq. 1): 1 - C(n - c, k) / C(n, k).
    Raises ValueError for k > n.
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(
            f"pass@{k} of {num_samples} samples with {num_correct} correct: needs 1 <= k <= n, 0 "
            "<= c <= n"
        )
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_at_k(answers: Sequence[Hashable | None], correct: Sequence[bool], k: int) -> float:
    """How often the most frequent answer of k responses is correct: mean over the blocks of k
    consecutive responses.

    answers: what each response ends with, in a form in which equal answers are equal; None where it
    gives none, which has no vote. Correct answers are one answer, however they are written. Where
    several are the most frequent, each counts its share.
    """
    if not 1 <= k <= len(answers) or len(answers) != len(correct):
        raise ValueError(f"maj@{k} of {len(answers)} answers and {len(correct)} verdicts")
    blocks = [range(start, start + k) for start in range(0, len(answers) - k + 1, k)]
    return sum(_vote([(answers[i], correct[i]) for i in block]) for block in blocks) / len(blocks)


def _vote(block: Sequence[tuple[Hashable | None, bool]]) -> float:
    votes = Counter(
        (True, None) if right else (False, answer)
        for answer, right in block
        if right or answer is not None
    )
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [key for key, count in votes.items() if count == most]
    return sum(right for right, _ in winners) / len(winners)


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of numbers between 0 and 1, one per question. Raises ValueError for none."""
    if not values:
        raise ValueError("a mean over no questions")
    count, mean = len(values), math.fsum(values) / len(values)
    variance = (
        math.fsum((value - mean) ** 2 for value in values) / (count - 1) if count > 1 else 0.0
    )
    # a 0/1 number has mean (1 - mean) as its variance; what varies less is worth more draws
    draws = count * mean * (1 - mean) / variance if variance > 0 else count
    low, high = wilson(mean, max(draws, 1.0))
    return Estimate(mean, low, high, count)


def wilson(share: float, draws: float) -> tuple[float, float]:
    """Wilson's score interval of a share that was found in so many draws."""
    square = Z * Z / draws
    middle = (share + square / 2) / (1 + square)
    half = Z / (1 + square) * math.sqrt(share * (1 - share) / draws + square / (4 * draws))
    return max(0.0, middle - half), min(1.0, middle + half)


def paired_difference(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """The mean of after - before over the same questions, in the same order.

    What is hard for both cancels out, so that the interval is much shorter than from two separate
    ones. Where no question differs at all, the interval is that of the rule of three.
    """
    differences = [new - old for old, new in zip(before, after, strict=True)]
    if not differences:
        raise ValueError("a difference over no questions")
    count, mean = len(differences), math.fsum(differences) / len(differences)
    variance = (
        math.fsum((value - mean) ** 2 for value in differences) / (count - 1) if count > 1 else 1.0
    )
    half = Z * math.sqrt(variance / count) if variance > 0 else 3.0 / count
    return Estimate(mean, max(-1.0, mean - half), min(1.0, mean + half), count)

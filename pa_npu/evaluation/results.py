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
    """One response of an evaluation.

    name: of the set.
    question: its row in the set.
    kind: greedy or sample.
    number: its place among the samples of the question.
    final: the answer that it ends with; None where it gives none.
    tokens: its length.
    finished: whether it ended by itself, before the limit.
    """

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
    """One set in numbers.

    metrics: greedy, avg@n, pass@k and maj@k, by name.
    length_mean, length_median, length_95: tokens of all responses.
    """

    questions: int
    responses: int
    metrics: dict[str, Estimate]
    length_mean: float
    length_median: float
    length_95: float
    truncated_ratio: float


def values_by_question(responses: Iterable[Judged]) -> dict[str, dict[int, float]]:
    """Returns the numbers of one set's questions by metric: greedy, avg@n, pass@k and maj@k.

    n is the number of samples that every question has. k is each power of two below n, and n.
    """
    greedy: dict[int, float] = {}
    samples: dict[int, list[Judged]] = {}
    for response in responses:
        if response.kind == GREEDY:
            greedy[response.question] = float(response.correct)
        else:
            samples.setdefault(response.question, []).append(response)
    metrics: dict[str, dict[int, float]] = {}
    if greedy:
        metrics[GREEDY] = greedy
    if not samples:
        return metrics

    count = min(len(of_question) for of_question in samples.values())
    compared = {question: of_question[:count] for question, of_question in samples.items()}
    correct = {
        question: [response.correct for response in of_question]
        for question, of_question in compared.items()
    }
    final = {
        question: [response.final for response in of_question]
        for question, of_question in compared.items()
    }
    sizes = [2**exponent for exponent in range(1, count.bit_length()) if 2**exponent < count]
    sizes.append(count)

    metrics[f"avg@{count}"] = {
        question: statistics.fmean(verdicts) for question, verdicts in correct.items()
    }
    for k in sizes:
        if k > 1:
            metrics[f"pass@{k}"] = {
                question: pass_at_k(count, sum(verdicts), k)
                for question, verdicts in correct.items()
            }
    for k in sizes:
        if k > 2:
            metrics[f"maj@{k}"] = {
                question: majority_at_k(final[question], verdicts, k)
                for question, verdicts in correct.items()
            }
    return metrics


def summarise(responses: Sequence[Judged]) -> dict[str, SetSummary]:
    """Returns the summaries by set, in the order in which the sets first appear."""
    summaries = {}
    for name, of_set in _by_set(responses).items():
        lengths = sorted(response.tokens for response in of_set)
        summaries[name] = SetSummary(
            questions=len({response.question for response in of_set}),
            responses=len(of_set),
            metrics={
                metric: estimate([values[question] for question in sorted(values)])
                for metric, values in values_by_question(of_set).items()
            },
            length_mean=statistics.fmean(lengths),
            length_median=statistics.median(lengths),
            length_95=lengths[min(len(lengths) - 1, int(0.95 * len(lengths)))],
            truncated_ratio=1 - statistics.fmean(response.finished for response in of_set),
        )
    return summaries


Values = dict[str, dict[str, dict[int, float]]]
"""The numbers of questions, by set, metric and question."""


def set_values(responses: Sequence[Judged]) -> Values:
    """Returns the numbers of all sets' questions."""
    return {name: values_by_question(of_set) for name, of_set in _by_set(responses).items()}


def _by_set(responses: Sequence[Judged]) -> dict[str, list[Judged]]:
    by_set: dict[str, list[Judged]] = {}
    for response in responses:
        by_set.setdefault(response.name, []).append(response)
    return by_set


def compare(before: Sequence[Judged], after: Sequence[Judged]) -> dict[str, dict[str, Estimate]]:
    """Returns after - before by set and metric, over the questions that both have, for the sets
    and metrics that both have.
    """
    return differences(set_values(before), set_values(after))


def differences(before: Values, after: Values) -> dict[str, dict[str, Estimate]]:
    """Returns what `compare` does, from the numbers of questions."""
    by_set: dict[str, dict[str, Estimate]] = {}
    for name, old_metrics in before.items():
        new_metrics = after.get(name, {})
        for metric, old in old_metrics.items():
            new = new_metrics.get(metric, {})
            common = sorted(old.keys() & new.keys())
            if common:
                by_set.setdefault(name, {})[metric] = paired_difference(
                    [old[question] for question in common],
                    [new[question] for question in common],
                )
    return by_set


class EvaluationProgress:
    """Compares each evaluation of a run with the first and with the one before, question by
    question.
    """

    def __init__(self, run_dir: Path | str) -> None:
        """Reads the results that earlier attempts left in the run directory; a file that cannot be
        read is left out.
        """
        self._first: tuple[int, Values] | None = None
        self._before: tuple[int, Values] | None = None
        kept = kept_versions(run_dir)
        for version in dict.fromkeys([*kept[:1], *kept[-1:]]):
            try:
                responses = read_results(results_file(run_dir, version))
            except DataError:
                continue
            self._add(version, set_values(responses))

    def _add(self, version: int, values: Values) -> None:
        self._before = (version, values)
        if self._first is None:
            self._first = self._before

    def differences(self, version: int, responses: Sequence[Judged]) -> dict[str, Any]:
        """Returns the entries of evaluations.jsonl, {first, before: {version, sets: by set and
        metric}}; empty for the first evaluation. Keeps the results for the next one.
        """
        values = set_values(responses)
        entries = {}
        for name, earlier in (("first", self._first), ("before", self._before)):
            if earlier is None:
                continue
            earlier_version, earlier_values = earlier
            sets = {}
            for set_name, metrics in differences(earlier_values, values).items():
                sets[set_name] = {metric: asdict(mean) for metric, mean in metrics.items()}
            entries[name] = {"version": earlier_version, "sets": sets}
        self._add(version, values)
        return entries


def results_file(directory: Path | str, version: int) -> Path:
    """Returns the file of a version's results in a run directory."""
    return Path(directory) / DIRECTORY / f"version_{version:06d}.parquet"


def kept_versions(run_dir: Path | str) -> list[int]:
    """Returns the versions of which a run keeps results per question."""
    versions = []
    for path in (Path(run_dir) / DIRECTORY).glob("version_*.parquet"):
        match = re.fullmatch(r"version_(\d{6,10})\.parquet", path.name)
        if match is not None:
            versions.append(int(match[1]))
    return sorted(versions)


def write_results(file: Path, responses: Sequence[Judged]) -> None:
    """Writes the whole file or nothing. A file that cannot be written is counted, and raises
    nothing.
    """
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
    """Reads what write_results wrote. Raises DataError where it cannot be read."""
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
    """Returns the chance that at least one of k responses drawn without replacement from the num_samples is
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
    """Returns how often the most frequent answer of k responses is correct: the mean over the
    blocks of k consecutive responses.

    Correct answers are one answer, however they are written. Where several are the most frequent,
    each counts its share.

    answers: what each response ends with, in a form in which equal answers are equal; None for a
        response without an answer, which has no vote.
    """
    if not 1 <= k <= len(answers) or len(answers) != len(correct):
        raise ValueError(f"maj@{k} of {len(answers)} answers and {len(correct)} verdicts")
    blocks = [range(start, start + k) for start in range(0, len(answers) - k + 1, k)]
    return sum(_vote([(answers[i], correct[i]) for i in block]) for block in blocks) / len(blocks)


def _vote(block: Sequence[tuple[Hashable | None, bool]]) -> float:
    votes: Counter[tuple[bool, Hashable | None]] = Counter()
    for answer, is_correct in block:
        if is_correct:
            votes[True, None] += 1
        elif answer is not None:
            votes[False, answer] += 1
    if not votes:
        return 0.0
    max_votes = max(votes.values())
    winners = [key for key, count in votes.items() if count == max_votes]
    return sum(is_correct for is_correct, _ in winners) / len(winners)


def estimate(values: Sequence[float]) -> Estimate:
    """Returns the mean of numbers between 0 and 1, one per question. Raises ValueError for none."""
    if not values:
        raise ValueError("a mean over no questions")
    count = len(values)
    mean = math.fsum(values) / count
    variance = 0.0
    if count > 1:
        variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    # a 0/1 number has mean (1 - mean) as its variance; what varies less is worth more draws
    draws = count * mean * (1 - mean) / variance if variance > 0 else count
    low, high = wilson(mean, max(draws, 1.0))
    return Estimate(mean, low, high, count)


def wilson(share: float, draws: float) -> tuple[float, float]:
    """Returns Wilson's score interval of a share that was observed in so many draws."""
    square = Z * Z / draws
    middle = (share + square / 2) / (1 + square)
    half = Z / (1 + square) * math.sqrt(share * (1 - share) / draws + square / (4 * draws))
    return max(0.0, middle - half), min(1.0, middle + half)


def paired_difference(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """Returns the mean of after - before over the same questions, in the same order.

    What is hard for both cancels out, so that the interval is much shorter than from two separate
    ones. Where no question differs at all, the interval is that of the rule of three.
    """
    differences = [new - old for old, new in zip(before, after, strict=True)]
    if not differences:
        raise ValueError("a difference over no questions")
    count = len(differences)
    mean = math.fsum(differences) / count
    variance = 1.0
    if count > 1:
        variance = math.fsum((value - mean) ** 2 for value in differences) / (count - 1)
    half = Z * math.sqrt(variance / count) if variance > 0 else 3.0 / count
    return Estimate(mean, max(-1.0, mean - half), min(1.0, mean + half), count)

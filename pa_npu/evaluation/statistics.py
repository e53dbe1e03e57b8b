"""pass@k, avg@k, maj@k and differences of two evaluations, each with a 95% interval over questions.

Questions are the independent draws; several responses to one question are not. So every number is first one of a question, between
0 and 1, and the interval is that of the mean of these. Intervals of shares are Wilson's (1927) with as many draws as give the same
standard error, which keeps them inside 0..1 and honest near its ends.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
Z = statistics.NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)


@dataclass(frozen=True)
class Estimate:
    """A mean over `questions` questions with its interval."""

    value: float
    low: float
    high: float
    questions: int


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that at least one of k responses drawn without replacement from the num_samples is correct.

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, eq. 1): 1 - C(n - c, k) / C(n, k). Raises ValueError for k > n.
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(
            f"pass@{k} of {num_samples} samples with {num_correct} correct: needs 1 <= k <= n, 0 <= c <= n"
        )
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_at_k(answers: Sequence[Hashable | None], correct: Sequence[bool], k: int) -> float:
    """How often the most frequent answer of k responses is correct: mean over the blocks of k consecutive responses.

    answers: what each response ends with, in a form in which equal answers are equal; None where it gives none, which has no vote.
    Correct answers are one answer, however they are written. Where several are the most frequent, each counts its share.
    """
    if not 1 <= k <= len(answers) or len(answers) != len(correct):
        raise ValueError(f"maj@{k} of {len(answers)} answers and {len(correct)} verdicts")
    blocks = [range(start, start + k) for start in range(0, len(answers) - k + 1, k)]
    return sum(_vote([(answers[i], correct[i]) for i in block]) for block in blocks) / len(blocks)


def _vote(block: Sequence[tuple[Hashable | None, bool]]) -> float:
    votes = Counter(
        (True, None) if right else (False, answer) for answer, right in block if right or answer is not None
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
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1) if count > 1 else 0.0
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

    What is hard for both cancels out, so that the interval is much shorter than from two separate ones. Where no question differs
    at all, the interval is that of the rule of three.
    """
    differences = [new - old for old, new in zip(before, after, strict=True)]
    if not differences:
        raise ValueError("a difference over no questions")
    count, mean = len(differences), math.fsum(differences) / len(differences)
    variance = math.fsum((value - mean) ** 2 for value in differences) / (count - 1) if count > 1 else 1.0
    half = Z * math.sqrt(variance / count) if variance > 0 else 3.0 / count
    return Estimate(mean, max(-1.0, mean - half), min(1.0, mean + half), count)

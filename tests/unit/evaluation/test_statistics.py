"""pass@k and maj@k against enumeration, intervals against simulation: how often they hold the truth."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from pa_npu.evaluation.results import estimate, majority_at_k, paired_difference, pass_at_k, wilson


@pytest.mark.parametrize("num_samples", range(1, 8))
def test_pass_at_k_is_the_share_of_all_choices_of_k_with_a_correct_one(num_samples: int) -> None:
    for num_correct in range(num_samples + 1):
        verdicts = [index < num_correct for index in range(num_samples)]
        for k in range(1, num_samples + 1):
            choices = list(itertools.combinations(verdicts, k))
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(
                sum(map(any, choices)) / len(choices)
            )


def test_pass_at_k_is_unbiased_and_the_plug_in_estimate_is_not() -> None:
    """A question is answered right with p = 0.3; the mean is over all outcomes of 10 samples."""
    p, n, k = 0.3, 10, 4
    chance = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    truth = 1 - (1 - p) ** k
    assert sum(w * pass_at_k(n, c, k) for c, w in enumerate(chance)) == pytest.approx(
        truth, abs=1e-12
    )
    plug_in = sum(w * (1 - (1 - c / n) ** k) for c, w in enumerate(chance))
    assert abs(plug_in - truth) > 0.02


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1), (4, -1, 1)])
def test_what_pass_at_k_cannot_mean_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("answers", "correct", "k", "value"),
    [
        (["5", "5", "6"], [True, True, False], 3, 1.0),
        (["6", "5", "6"], [False, True, False], 3, 0.0),
        (["5", "6"], [True, False], 2, 0.5),
        (["5", "6", "7"], [True, False, False], 3, 1 / 3),
        (["0.5", "1/2", "6", "6"], [True, True, False, False], 4, 0.5),
        (["0.5", "1/2", "6"], [True, True, False], 3, 1.0),
        ([None, None, "5"], [False, False, True], 3, 1.0),
        ([None, None], [False, False], 2, 0.0),
        (["5", "5", "6", "6"], [True, True, False, False], 2, 0.5),
        (["5", "6", "6", "6"], [True, False, False, False], 1, 0.25),
    ],
)
def test_majority_votes(
    answers: list[str | None], correct: list[bool], k: int, value: float
) -> None:
    assert majority_at_k(answers, correct, k) == pytest.approx(value)


def test_majority_is_what_drawing_answers_and_counting_gives() -> None:
    """p = 0.5 right, the rest two wrong answers: maj@3 by all 27 outcomes against many blocks."""
    chances = {"right": 0.5, "a": 0.3, "b": 0.2}
    truth = 0.0
    for outcome in itertools.product(chances, repeat=3):
        counts = {answer: outcome.count(answer) for answer in outcome}
        winners = [answer for answer, count in counts.items() if count == max(counts.values())]
        truth += (
            math.prod(chances[answer] for answer in outcome) * ("right" in winners) / len(winners)
        )
    rng = np.random.default_rng(1)
    drawn = rng.choice(list(chances), 60_000, p=list(chances.values())).tolist()
    assert majority_at_k(drawn, [answer == "right" for answer in drawn], 3) == pytest.approx(
        truth, abs=0.01
    )


def covered(draw, truth: float, trials: int = 3000) -> float:
    hits = 0
    for trial in range(trials):
        actual = draw(np.random.default_rng(trial))
        hits += actual.low <= truth <= actual.high
    return hits / trials


@pytest.mark.parametrize("p", [0.05, 0.5, 0.93])
def test_intervals_of_one_answer_per_question_hold_the_truth_in_95_of_100(p: float) -> None:
    assert (
        0.93
        <= covered(lambda rng: estimate((rng.random(60) < p).astype(float).tolist()), p)
        <= 0.985
    )


def test_intervals_of_several_samples_count_questions_not_responses() -> None:
    """Questions of very different difficulty, 8 samples each: treating 400 responses as 400 draws
    would be far too sure.
    """

    def draw(rng):
        difficulty = rng.beta(0.3, 0.3, 50)
        return rng.binomial(8, difficulty) / 8

    assert 0.92 <= covered(lambda rng: estimate(draw(rng).tolist()), 0.5) <= 0.98

    class Naive:
        def __init__(self, values):
            self.low, self.high = wilson(float(values.mean()), 400)

    assert covered(lambda rng: Naive(draw(rng)), 0.5) < 0.7, "control: the wrong unit of counting"


def test_paired_differences_hold_the_truth_and_are_shorter_than_unpaired_ones() -> None:
    def draw(rng):
        difficulty = rng.beta(0.5, 0.5, 200)
        before = rng.random(200) < difficulty * 0.9
        after = np.where(rng.random(200) < 0.1, rng.random(200) < 0.5, before)
        return before.astype(float).tolist(), after.astype(float).tolist()

    truth = 0.1 * (0.5 - 0.45)
    assert 0.93 <= covered(lambda rng: paired_difference(*draw(rng)), truth, 2000) <= 0.97
    before, after = draw(np.random.default_rng(5))
    paired, first, two = paired_difference(before, after), estimate(before), estimate(after)
    unpaired = math.hypot(first.high - first.low, two.high - two.low)
    assert paired.high - paired.low < 0.6 * unpaired


def test_ends_of_the_scale_are_not_certainties() -> None:
    for value in (0.0, 1.0):
        actual = estimate([value] * 20)
        assert actual.value == value and 0.1 < actual.high - actual.low < 0.25, (
            "Wilson for 20 of 20: 0.84 to 1"
        )
    assert estimate([1.0] * 20).low == pytest.approx(0.8389, abs=1e-3)
    same = paired_difference([1.0] * 30, [1.0] * 30)
    assert (same.value, same.low, same.high) == (0.0, pytest.approx(-0.1), pytest.approx(0.1)), (
        "rule of three"
    )
    single = estimate([0.5])
    assert single.low < 0.1 and single.high > 0.9
    with pytest.raises(ValueError):
        estimate([])
    with pytest.raises(ValueError):
        paired_difference([], [])

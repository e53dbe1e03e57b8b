"""I5 as statistics: chance stops a run at most as often as stated, and faults that matter stop it at once.

The noise is made up here, over the range of what is published and measured: skewed between responses, heavy-tailed between tokens,
the yardstick is another sample of it. tools/bench_agreement.py and test_trainer_agreement.py have real models.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple

import numpy as np
import pytest
import torch

from pa_npu.algorithm.agreement import (
    TESTS_OF_PROBE,
    TESTS_OF_TRAINED,
    DifferenceSums,
    aged_limits,
    difference_sums,
    k3_of,
    limits,
)

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]

DEFAULT_MARGIN, DEFAULT_RATE = 4.0, 1e-7

SHAPES: dict[str, Draw] = {
    "normal": lambda rng, size: rng.standard_normal(size),
    "heavy tails": lambda rng, size: rng.standard_t(3, size),
    "most tokens certain": lambda rng, size: 5 * rng.standard_normal(size) * (rng.random(size) < 0.05),
    "spread over decades": lambda rng, size: rng.standard_normal(size) * np.exp(rng.standard_normal(size)),
}


def draw(rng: np.random.Generator, shape: str, runs: int, responses: int, tokens: int, scale: float) -> np.ndarray:
    """Differences [runs, responses, tokens]; responses of one run differ in scale too."""
    per_response = np.exp(0.5 * rng.standard_normal((runs, responses, 1)))
    return scale * per_response * SHAPES[shape](rng, (runs, responses, tokens))


def sums_of(
    differences: np.ndarray, spread: float = 1.0, rng: np.random.Generator | None = None
) -> list[DifferenceSums]:
    """[runs, responses, tokens], one result per run; the trainer's log-probs vary by `spread` nats between tokens."""
    _, responses, tokens = differences.shape
    rng = rng or np.random.default_rng(11)
    trainer = np.minimum(-2.0 + spread * rng.standard_normal(differences.shape), 0.0)
    index = torch.arange(responses).repeat_interleave(tokens)

    def flat(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.reshape(-1))

    return [
        DifferenceSums(*difference_sums(flat(t), flat(t - d), index, responses).tolist())
        for t, d in zip(trainer, differences, strict=True)
    ]


# --- the sums


def test_sums_are_those_of_responses_computed_one_by_one() -> None:
    rng = np.random.default_rng(1)
    lengths = [3, 1, 8, 2]
    differences = 0.3 * rng.standard_normal(sum(lengths))
    index = np.repeat(np.arange(4), lengths)
    found = DifferenceSums(
        *difference_sums(
            torch.zeros(len(index)), torch.from_numpy(-differences).float(), torch.from_numpy(index), 4
        ).tolist()
    )
    assert found.slope == found.own == 0.0, "against equal log-probs there is no slope"
    parts = np.split(differences, np.cumsum(lengths)[:-1])
    a = np.array([np.abs(part).sum() for part in parts])
    k = np.array([(np.exp(part) - 1 - part).sum() for part in parts])
    n = np.array(lengths)
    expected = [4, n.sum(), (n**2).sum(), a.sum(), (a**2).sum(), (a * n).sum(), k.sum(), (k**2).sum(), (k * n).sum()]
    assert astuple(found)[:9] == pytest.approx(expected, rel=1e-5) and found.k_largest == pytest.approx(
        k.max(), rel=1e-5
    )
    assert found.absolute_mean == pytest.approx(np.abs(differences).mean(), rel=1e-6)
    assert found.k3_mean == pytest.approx((np.exp(differences) - 1 - differences).mean(), rel=1e-5)
    assert found.k3_trimmed == pytest.approx((k.sum() - k.max()) / n.sum(), rel=1e-5)


def test_sums_of_parts_add_up_to_those_of_the_whole() -> None:
    differences = draw(np.random.default_rng(2), "heavy tails", 1, 12, 5, 0.01)
    trainer, index = torch.randn(60, generator=torch.Generator().manual_seed(1)), torch.arange(12).repeat_interleave(5)
    engine = trainer - torch.from_numpy(differences.reshape(-1)).float()
    whole = DifferenceSums(*difference_sums(trainer, engine, index, 12).tolist())
    first, second = (
        DifferenceSums(*difference_sums(trainer[part], engine[part], index[part] - index[part][0], rows).tolist())
        for part, rows in ((slice(0, 25), 5), (slice(25, 60), 7))
    )
    assert astuple(first + second) == pytest.approx(astuple(whole), rel=1e-5, abs=1e-6)
    assert DifferenceSums() + whole == whole


@pytest.mark.parametrize("size", [1e-7, 1e-4, 0.015, 0.0199, 0.0201, 0.5, 5.0])
def test_k3_is_accurate_where_its_formula_in_fp32_is_only_rounding(size: float) -> None:
    for difference in (size, -size):
        value = float(torch.tensor(difference, dtype=torch.float32))
        # the series in double precision: the formula itself cancels there too
        expected = sum(value**n / math.factorial(n) for n in range(2, 40))
        found = float(k3_of(torch.tensor(difference, dtype=torch.float32)))
        assert found == pytest.approx(expected, rel=2e-5) and found > 0
    plain = float(torch.tensor(1e-7).exp() - 1.0 - torch.tensor(1e-7))
    assert plain != pytest.approx(0.5e-14, rel=1.0), "else the series would not be needed"


def test_k3_estimates_the_divergence_of_the_trainer_from_the_engine_that_drew_the_tokens() -> None:
    """Against the sum over the vocabulary; with the arguments the other way round it is another number."""
    rng = np.random.default_rng(3)
    engine, trainer = (rng.dirichlet(np.full(6, 2.0)) for _ in range(2))
    tokens = rng.choice(6, 400_000, p=engine)
    difference = np.log(trainer[tokens]) - np.log(engine[tokens])
    found = float(k3_of(torch.tensor(difference)).mean())
    divergence = float((engine * np.log(engine / trainer)).sum())
    assert found == pytest.approx(divergence, rel=0.02)
    swapped = float(k3_of(torch.tensor(-difference)).mean())
    assert swapped != pytest.approx(divergence, rel=0.1)


# --- chance


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("measured", "judged"),
    [((32, 20), (8, 16)), ((32, 20), (32, 20)), ((64, 32), (128, 32))],
    ids=["probe", "small iteration", "iteration"],
)
def test_chance_exceeds_the_limits_no_oftener_than_stated(
    shape: str, measured: tuple[int, int], judged: tuple[int, int]
) -> None:
    """At margin 1, where rounding alone is at work: a rate that 300 runs can measure, and none at the default one."""
    runs, rng = 300, np.random.default_rng(4)
    of_each = 0.01
    stated = of_each * (TESTS_OF_TRAINED + TESTS_OF_PROBE)
    yardsticks = sums_of(draw(rng, shape, runs, *measured, 0.03), rng=rng)
    found = sums_of(draw(rng, shape, runs, *judged, 0.03), rng=rng)
    exceeded = {"absolute": 0, "k3": 0, "slope": 0, "strays": 0, "default": 0}
    for yardstick, sums in zip(yardsticks, found, strict=True):
        bound = limits(yardstick, sums, 1.0, stated)
        exceeded["absolute"] += sums.absolute_mean > bound.absolute
        exceeded["k3"] += sums.k3_trimmed > bound.k3
        exceeded["slope"] += abs(sums.slope) > bound.slope
        exceeded["strays"] += sums.strays > bound.strays
        exceeded["default"] += limits(yardstick, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums) is not None
    # three deviations of the count, and as much again for the tail's shape: the certain tokens' is the heaviest, 1.5 to 2 times
    allowed = 2 * of_each * runs + 3 * math.sqrt(of_each * runs)
    assert all(count <= allowed for count in exceeded.values()) and exceeded["default"] == 0, exceeded


def test_a_single_token_far_off_is_no_fault() -> None:
    """In bf16, 64 tokens have one beyond an absolute limit of 0.1 now and then; a long run has one beyond 1."""
    rng = np.random.default_rng(5)
    differences = draw(rng, "normal", 2, 128, 200, 0.014)
    differences[1, 7, 50] = 2.5
    yardstick, sums = sums_of(differences)
    assert limits(yardstick, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums) is None


def test_an_engine_that_rounds_three_times_as_much_as_the_trainer_goes_on() -> None:
    rng = np.random.default_rng(6)
    (yardstick,) = sums_of(draw(rng, "normal", 1, 64, 100, 0.014))
    for times, broken in ((0.3, False), (1.4, False), (3.2, False), (8, True)):
        (sums,) = sums_of(draw(rng, "normal", 1, 128, 100, times * 0.014))
        assert (limits(yardstick, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums) is not None) == broken, times


# --- faults


@pytest.mark.parametrize("responses", [32, 256])
@pytest.mark.parametrize(("temperature", "found"), [(1.03, True), (0.97, True), (1.3, True), (1.0, False)])
def test_a_temperature_is_a_slope_that_rounding_does_not_have(responses: int, temperature: float, found: bool) -> None:
    """bf16, 0.014 of rounding: 3% of temperature are 0.02 of mean |d|, which alone would be lost in it."""
    rng = np.random.default_rng(7)
    (yardstick,) = sums_of(draw(rng, "normal", 1, 32, 60, 0.014))
    trainer = np.minimum(-2.0 + np.random.default_rng(11).standard_normal((1, responses, 60)), 0.0)
    fault = (1 - 1 / temperature) * (trainer - trainer.mean())
    (sums,) = sums_of(draw(rng, "normal", 1, responses, 60, 0.014) + fault)
    assert sums.slope == pytest.approx(1 - 1 / temperature, abs=2e-3)
    reason = limits(yardstick, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums)
    assert (reason is not None) == found
    if 0.9 < temperature < 1.1 and found:
        assert "slope" in str(reason)


# (responses, tokens each, slope): the two quick starts that had stopped, in a probe and over an iteration, and a large iteration
ROUNDED_SLOPES = {"probe": (8, 20, 2e-5), "iteration": (768, 20, 3e-6), "large iteration": (1024, 1000, 3e-6)}


@pytest.mark.parametrize(("responses", "tokens", "slope"), ROUNDED_SLOPES.values(), ids=ROUNDED_SLOPES)
def test_a_sharp_policys_slope_of_fp32_rounding_is_no_fault_and_a_temperature_is(
    responses: int, tokens: int, slope: float
) -> None:
    """All of few responses' differences lie on one line, so that their own scatter allows nothing."""
    rng = np.random.default_rng(12)

    def sharp(rows: int, columns: int, slope: float) -> DifferenceSums:
        is_open = rng.random((rows, columns)) < 0.05
        trainer = np.where(is_open, -rng.exponential(0.3, (rows, columns)), -1e-4)
        differences = slope * trainer + 3e-7 * rng.standard_normal((rows, columns))
        index = torch.arange(rows).repeat_interleave(columns)
        flat, engine = (torch.from_numpy(values.reshape(-1)) for values in (trainer, trainer - differences))
        return DifferenceSums(*difference_sums(flat, engine, index, rows).tolist())

    yardstick = sharp(32, 20, 0.0)
    honest, faulty = sharp(responses, tokens, slope), sharp(responses, tokens, 1 - 1 / 1.001)
    assert honest.slope == pytest.approx(slope, rel=0.1) and honest.slope_error(6.0) < slope
    assert limits(yardstick, honest, DEFAULT_MARGIN, DEFAULT_RATE).broken(honest) is None
    bound = limits(yardstick, faulty, DEFAULT_MARGIN, DEFAULT_RATE)
    assert abs(faulty.slope) > 10 * bound.slope, "not for its mean |difference| alone"
    assert bound.broken(faulty) is not None


def aged_sums(trainer: torch.Tensor, engine: torch.Tensor, age: float = 1.0) -> DifferenceSums:
    """[responses, tokens] each."""
    index = torch.arange(len(trainer)).repeat_interleave(trainer.shape[1])
    ages = torch.full((trainer.numel(),), age)
    return DifferenceSums(*difference_sums(trainer.flatten(), engine.flatten(), index, len(trainer), ages).tolist())


@pytest.mark.parametrize("certain", [0.0, 0.7], ids=["every token open", "most tokens certain"])
def test_log_probs_of_other_tokens_are_found_in_one_response_and_drift_is_not(certain: float) -> None:
    """Against a policy that has moved by 0.2 nats per token, ten times what a version does."""
    generator = torch.Generator().manual_seed(8)
    responses, tokens = 256, 200
    is_open = torch.rand(responses, tokens, generator=generator) >= certain
    engine = torch.where(is_open, -torch.rand(responses, tokens, generator=generator) * 3, -1e-3)
    trainer = engine + 0.2 * is_open * torch.randn(responses, tokens, generator=generator)

    def broken(carried: torch.Tensor) -> str | None:
        sums = aged_sums(trainer, carried)
        return aged_limits(None, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums)

    assert broken(engine) is None
    swapped = engine.clone()
    swapped[[3, 4]] = engine[[4, 3]]
    one_shifted = engine.clone()
    one_shifted[5] = engine[5].roll(1)
    for carried in (swapped, one_shifted, engine.roll(1, 1), engine.roll(-1, 1), torch.zeros_like(engine)):
        assert "belong to other tokens" in str(broken(carried))


def test_strays_of_a_policy_that_has_moved_far_are_none_because_they_still_fit_their_tokens_best() -> None:
    generator = torch.Generator().manual_seed(9)
    engine = -4 * torch.rand(64, 100, generator=generator)
    trainer = engine + 0.4 * torch.randn(64, 100, generator=generator)
    sums = aged_sums(trainer, engine)
    assert sums.own > 1.5 * sums.expected and sums.own < 0.5 * sums.others
    assert aged_limits(None, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums) is None


def test_more_strays_are_allowed_of_older_tokens() -> None:
    engine = torch.zeros(4, 50)
    trainer = engine - 1.0 * (torch.arange(50) < 12)
    young, old = (aged_sums(trainer, engine, age) for age in (0.0, 4.0))
    assert (young.expected, old.expected) == pytest.approx((10, 50)) and young.strays > old.strays == 0


def test_older_tokens_have_the_slope_of_those_that_agreed_when_they_were_new() -> None:
    """A policy that sharpens is no fault where the probe shows it as well; a temperature that the probe has not is."""
    generator = torch.Generator().manual_seed(10)
    trainer = -3 * torch.rand(128, 50, generator=generator)

    def sloped(slope: float, rows: int) -> DifferenceSums:
        noise = 0.05 * torch.randn(rows, 50, generator=generator)
        return aged_sums(trainer[:rows], trainer[:rows] * (1 - slope) + noise)

    sharper = sloped(0.1, 128)
    assert aged_limits(sloped(0.1, 16), sharper, DEFAULT_MARGIN, DEFAULT_RATE).broken(sharper) is None
    assert "slope" in str(aged_limits(sloped(0.0, 16), sharper, DEFAULT_MARGIN, DEFAULT_RATE).broken(sharper))


# --- edges


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_a_disagreement(value: float) -> None:
    (yardstick,) = sums_of(np.full((1, 8, 4), 1e-7))
    sums = DifferenceSums(2.0, 8.0, 32.0, value, value, value)
    assert "mean |difference|" in str(limits(yardstick, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums))


def test_equal_numbers_leave_the_rounding_of_log_probs_themselves() -> None:
    """A policy that is certain of all its tokens rounds nothing, and one ulp of an engine may not end its run."""
    (yardstick,) = sums_of(np.zeros((1, 8, 4)))
    sums = DifferenceSums(8.0, 32.0, 128.0, 32 * 2**-24, 32 * 2**-48, 32 * 2**-24)
    assert limits(yardstick, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums) is None


def test_limits_widen_where_fewer_or_shorter_responses_are_compared() -> None:
    rng = np.random.default_rng(10)
    (yardstick,) = sums_of(draw(rng, "normal", 1, 256, 64, 0.01))
    bounds = [
        limits(yardstick, DifferenceSums(responses, responses * tokens), 1.0, DEFAULT_RATE)
        for responses, tokens in ((256, 64), (16, 64), (16, 8), (1, 8))
    ]
    absolute = [bound.absolute for bound in bounds]
    assert absolute == sorted(absolute) and absolute[0] < 2 * yardstick.absolute_mean
    looser = limits(yardstick, DifferenceSums(16, 1024), 1.0, 1e-3).absolute
    assert looser < limits(yardstick, DifferenceSums(16, 1024), 1.0, 1e-9).absolute, (
        "a rarer false stop has a wider limit"
    )
    few, many = sums_of(draw(rng, "normal", 1, 3, 64, 0.01)) + sums_of(draw(rng, "normal", 1, 64, 64, 0.01))
    assert (
        limits(yardstick, few, 1.0, DEFAULT_RATE).slope == math.inf > limits(yardstick, many, 1.0, DEFAULT_RATE).slope
    )

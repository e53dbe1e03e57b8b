"""I5 as statistics: chance stops a run at most as often as stated, and faults that matter stop it at once.

The noise is made up here, over the range of what is published and measured: skewed between
responses, heavy-tailed between tokens, the yardstick is another sample of it.
tools/bench_agreement.py and trainer/test_agreement.py have real models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch

from pa_npu.algorithm.agreement import (
    TESTS_OF_PROBE,
    TESTS_OF_TRAINED,
    Check,
    aged_limits,
    limits,
)
from pa_npu.algorithm.agreement_sums import (
    UNCERTAINTY_FLOOR,
    DifferenceSums,
    difference_sums,
    k3_of,
)

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]

DEFAULT_MARGIN, DEFAULT_RATE = 4.0, 1e-7

SHAPES: dict[str, Draw] = {
    "normal": lambda rng, size: rng.standard_normal(size),
    "heavy tails": lambda rng, size: rng.standard_t(3, size),
    "most tokens certain": lambda rng, size: (
        5 * rng.standard_normal(size) * (rng.random(size) < 0.05)
    ),
    "spread over decades": lambda rng, size: (
        rng.standard_normal(size) * np.exp(rng.standard_normal(size))
    ),
}


def draw(
    rng: np.random.Generator, shape: str, runs: int, responses: int, tokens: int, scale: float
) -> np.ndarray:
    """Differences of log-odds [runs, responses, tokens]; responses of one run differ in scale too."""
    per_response = np.exp(0.5 * rng.standard_normal((runs, responses, 1)))
    return scale * per_response * SHAPES[shape](rng, (runs, responses, tokens))


BF16, FP32 = UNCERTAINTY_FLOOR["bf16"], UNCERTAINTY_FLOOR["fp32"]


def trainer_logprobs(shape: tuple[int, ...], spread: float = 1.0) -> np.ndarray:
    """Log-probs of open and of certain tokens, the same for every call."""
    return np.minimum(-2.0 + spread * np.random.default_rng(11).standard_normal(shape), -1e-3)


def entropy_of(logprobs: np.ndarray | torch.Tensor) -> torch.Tensor:
    """The entropy where a token competes with one other; [tokens]."""
    logprobs = torch.as_tensor(logprobs).double().flatten()
    rest = (-torch.expm1(logprobs)).clamp(min=0.0)
    return -logprobs.exp() * logprobs - torch.xlogy(rest, rest)


def log_odds_of(logprobs: np.ndarray, floor: float = BF16) -> np.ndarray:
    return (logprobs + entropy_of(logprobs).view(logprobs.shape).numpy()) / (
        1 - np.exp(logprobs) + floor
    )


def sums_of(differences: np.ndarray, floor: float = BF16) -> list[DifferenceSums]:
    """Differences of log-odds [runs, responses, tokens]; one result per run."""
    _, responses, tokens = differences.shape
    trainer = trainer_logprobs(differences.shape)
    engine = trainer - differences * (1 - np.exp(trainer) + floor)
    index = torch.arange(responses).repeat_interleave(tokens)

    def flat(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.reshape(-1))

    return [
        DifferenceSums(
            *difference_sums(
                flat(t), flat(e), entropy_of(t), index, responses, floor=floor
            ).tolist()
        )
        for t, e in zip(trainer, engine, strict=True)
    ]


# --- the sums


def test_sums_are_those_of_responses_computed_one_by_one() -> None:
    rng = np.random.default_rng(1)
    lengths, floor = [3, 1, 8, 2], 2.0**-15
    trainer = -rng.exponential(1.0, sum(lengths))
    differences = 0.3 * rng.standard_normal(sum(lengths))
    index = np.repeat(np.arange(4), lengths)
    sums = DifferenceSums(
        *difference_sums(
            torch.from_numpy(trainer),
            torch.from_numpy(trainer - differences),
            entropy_of(trainer),
            torch.from_numpy(index),
            4,
            floor=floor,
            copies=2,
        ).tolist()
    )
    uncertainty = 1 - np.exp(trainer) + floor
    z, log_odds = differences / uncertainty, log_odds_of(trainer, floor)

    def by_response(values: np.ndarray) -> np.ndarray:
        return np.array([part.sum() for part in np.split(values, np.cumsum(lengths)[:-1])])

    n, odds, square = np.array(lengths), by_response(np.abs(z)), by_response(z**2)
    moment, weight = by_response(z * log_odds), by_response(log_odds**2)
    expected = [
        4,
        2,
        n.sum(),
        (n**2).sum(),
        np.abs(differences).sum(),
        (np.exp(differences) - 1 - differences).sum(),
    ]
    expected += [
        odds.sum(),
        (odds**2).sum(),
        (odds * n).sum(),
        square.sum(),
        (square**2).sum(),
        (square * n).sum(),
    ]
    expected += [
        moment.sum(),
        (moment**2).sum(),
        weight.sum(),
        (weight**2).sum(),
        (moment * weight).sum(),
    ]
    expected += [((z * log_odds) ** 2).sum(), (z * log_odds**3).sum(), (log_odds**4).sum()]
    assert astuple(sums)[: len(expected)] == pytest.approx(expected, rel=1e-5)
    assert sums.square_largest == pytest.approx(square.max(), rel=1e-5)
    assert sums.slope == pytest.approx(moment.sum() / weight.sum(), rel=1e-5)
    assert sums.square_trimmed == pytest.approx((square.sum() - square.max()) / n.sum(), rel=1e-5)


def test_log_odds_differ_alike_where_logits_round_alike_and_log_probs_do_not() -> None:
    """Logits of open and of certain tokens, rounded by the same amount: a probe of either kind has
    the yardstick of the other.
    """
    rng = np.random.default_rng(13)

    def sums(gap: float) -> DifferenceSums:
        logits = torch.from_numpy(rng.standard_normal((8, 40, 50)))
        logits[..., 0] += gap
        noise = 0.03 * torch.from_numpy(rng.standard_normal(logits.shape))
        exact, rounded = (
            values.log_softmax(-1)[..., 0].flatten() for values in (logits, logits + noise)
        )
        return DifferenceSums(
            *difference_sums(
                exact, rounded, entropy_of(exact), torch.arange(8).repeat_interleave(40), 8
            ).tolist()
        )

    open_tokens, certain_tokens = sums(3.0), sums(11.0)
    assert open_tokens.absolute_mean > 200 * certain_tokens.absolute_mean
    assert 0.8 < open_tokens.odds_mean / certain_tokens.odds_mean < 1.25


def test_sums_of_parts_add_up_to_those_of_the_whole() -> None:
    differences = draw(np.random.default_rng(2), "heavy tails", 1, 12, 5, 0.01)
    trainer = -torch.rand(60, generator=torch.Generator().manual_seed(1))
    index = torch.arange(12).repeat_interleave(5)
    engine = trainer - torch.from_numpy(differences.reshape(-1)).float()
    whole = DifferenceSums(
        *difference_sums(trainer, engine, entropy_of(trainer), index, 12).tolist()
    )
    first, second = (
        DifferenceSums(
            *difference_sums(
                trainer[part],
                engine[part],
                entropy_of(trainer[part]),
                index[part] - index[part][0],
                rows,
            ).tolist()
        )
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
    """Against the sum over the vocabulary; with the arguments the other way round it is another
    number.
    """
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
    """At margin 1, where rounding alone is at work: a rate that 300 runs can measure, and none at
    the default one.
    """
    runs, rng = 300, np.random.default_rng(4)
    of_each = 0.01
    stated = of_each * (TESTS_OF_TRAINED + TESTS_OF_PROBE)
    yardsticks = sums_of(draw(rng, shape, runs, *measured, 0.03))
    found = sums_of(draw(rng, shape, runs, *judged, 0.03))
    exceeded = {"mean": 0, "square": 0, "slope": 0, "strays": 0, "default": 0}
    for yardstick, sums in zip(yardsticks, found, strict=True):
        bound = limits(yardstick, sums, 1.0, stated)
        exceeded["mean"] += sums.odds_mean > bound.mean
        exceeded["square"] += sums.square_trimmed > bound.square
        exceeded["slope"] += abs(sums.slope) > bound.slope
        exceeded["strays"] += sums.strays > bound.strays
        exceeded["default"] += bool(
            limits(yardstick, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums)
        )
    # three deviations of the count, and as much again for the tail's shape: the certain tokens' is
    # the heaviest, 1.5 to 2 times
    allowed = 2 * of_each * runs + 3 * math.sqrt(of_each * runs)
    assert all(count <= allowed for count in exceeded.values()) and exceeded["default"] == 0, (
        exceeded
    )


def test_a_single_token_far_off_is_no_fault() -> None:
    """In bf16, 64 tokens have one beyond an absolute limit of 0.1 now and then; a long run has one
    beyond 1.
    """
    rng = np.random.default_rng(5)
    differences = draw(rng, "normal", 2, 128, 200, 0.014)
    differences[1, 7, 50] = 2.5
    yardstick, sums = sums_of(differences)
    assert limits(yardstick, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums) == {}


def test_an_engine_that_rounds_three_times_as_much_as_the_trainer_goes_on() -> None:
    rng = np.random.default_rng(6)
    (yardstick,) = sums_of(draw(rng, "normal", 1, 64, 100, 0.014))
    for times, broken in ((0.3, False), (1.4, False), (3.2, False), (8, True)):
        (sums,) = sums_of(draw(rng, "normal", 1, 128, 100, times * 0.014))
        assert bool(limits(yardstick, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums)) == broken, (
            times
        )


# --- faults


@pytest.mark.parametrize("responses", [32, 256])
@pytest.mark.parametrize(
    ("temperature", "is_fault"), [(1.03, True), (0.97, True), (1.3, True), (1.0, False)]
)
def test_a_temperature_is_a_slope_that_rounding_does_not_have(
    responses: int, temperature: float, is_fault: bool
) -> None:
    """In bf16, 0.03 of rounding: 3% of temperature are less of mean |z| than what the margin
    allows.
    """
    rng = np.random.default_rng(7)
    (yardstick,) = sums_of(draw(rng, "normal", 1, 32, 60, 0.03))
    fault = (1 - 1 / temperature) * log_odds_of(trainer_logprobs((1, responses, 60)))
    (sums,) = sums_of(draw(rng, "normal", 1, responses, 60, 0.03) + fault)
    assert sums.slope == pytest.approx(1 - 1 / temperature, abs=2e-3)
    broken = limits(yardstick, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums)
    assert ("slope" in broken) == is_fault
    assert ("mean" in broken) == (temperature == 1.3), "the slope shows what the mean does not"


def repeated_group(rng: np.random.Generator, responses: int, copies: int) -> DifferenceSums:
    """A group whose responses are `copies` times the same tokens, with the same rounding: those of
    a sharp policy.
    """
    different = responses // copies
    z = np.tile(0.03 * rng.standard_normal((different, 20)), (copies, 1))
    trainer = np.tile(np.minimum(-0.05 * rng.exponential(1.0, (different, 20)), -1e-5), (copies, 1))
    index = torch.arange(responses).repeat_interleave(20)
    flat = torch.from_numpy(trainer.reshape(-1))
    engine = torch.from_numpy((trainer - z * (1 - np.exp(trainer) + BF16)).reshape(-1))
    return DifferenceSums(
        *difference_sums(
            flat, engine, entropy_of(flat), index, responses, copies=responses
        ).tolist()
    )


def test_responses_that_repeat_each_other_are_no_more_evidence_than_one() -> None:
    """400 probes of 8 equal responses, by a yardstick of four such groups: their common rounding is
    a common slope.
    """
    rng = np.random.default_rng(14)
    yardstick = sum((repeated_group(rng, 8, 8) for _ in range(4)), DifferenceSums())
    naive = 0
    for _ in range(400):
        probe = repeated_group(rng, 8, 8)
        assert limits(yardstick, probe, DEFAULT_MARGIN, DEFAULT_RATE).broken(probe) == {}
        as_if_independent = replace(probe, independent=8.0)
        of_responses = (
            as_if_independent.moment_squared - 2 * probe.slope * probe.moment_times_weight
        )
        of_responses += probe.slope**2 * probe.weight_squared
        naive += abs(probe.slope) > 6 * math.sqrt(max(0.0, of_responses)) / probe.weight
    assert naive > 200, "by the scatter between responses alone these would be faults"


# (responses, tokens each, slope): two quick starts that had stopped, in a probe and over an
# iteration, and a large iteration
ROUNDED_SLOPES = {
    "probe": (8, 20, 2e-5),
    "iteration": (768, 20, 3e-6),
    "large iteration": (1024, 1000, 3e-6),
}


@pytest.mark.parametrize(
    ("responses", "tokens", "slope"), ROUNDED_SLOPES.values(), ids=ROUNDED_SLOPES
)
def test_a_sharp_policys_slope_of_fp32_rounding_is_no_fault_and_a_temperature_is(
    responses: int, tokens: int, slope: float
) -> None:
    rng = np.random.default_rng(12)

    def sharp(rows: int, columns: int, slope: float, factor: float = 0.0) -> DifferenceSums:
        is_open = rng.random((rows, columns)) < 0.05
        trainer = np.where(is_open, -rng.exponential(0.3, (rows, columns)), -1e-4)
        scaled = factor * (trainer + entropy_of(trainer).view(trainer.shape).numpy())
        engine = trainer - slope * trainer - scaled - 3e-7 * rng.standard_normal((rows, columns))
        index = torch.arange(rows).repeat_interleave(columns)
        t, e = (torch.from_numpy(values.reshape(-1)) for values in (trainer, engine))
        return DifferenceSums(
            *difference_sums(t, e, entropy_of(trainer), index, rows, floor=FP32).tolist()
        )

    yardstick = sharp(32, 20, 0.0)
    honest, faulty = sharp(responses, tokens, slope), sharp(responses, tokens, 0.0, 1 - 1 / 1.001)
    assert limits(yardstick, honest, DEFAULT_MARGIN, DEFAULT_RATE).broken(honest) == {}
    bound = limits(yardstick, faulty, DEFAULT_MARGIN, DEFAULT_RATE)
    assert abs(faulty.slope) > 10 * bound.slope, "not for its mean alone"
    assert "slope" in bound.broken(faulty)


def aged_sums(trainer: torch.Tensor, engine: torch.Tensor, age: float = 1.0) -> DifferenceSums:
    """[responses, tokens] each."""
    index = torch.arange(len(trainer)).repeat_interleave(trainer.shape[1])
    ages = torch.full((trainer.numel(),), age)
    return DifferenceSums(
        *difference_sums(
            trainer.flatten(), engine.flatten(), entropy_of(trainer), index, len(trainer), ages
        ).tolist()
    )


@pytest.mark.parametrize("certain", [0.0, 0.7], ids=["every token open", "most tokens certain"])
def test_log_probs_of_other_tokens_are_found_in_one_response_and_drift_is_not(
    certain: float,
) -> None:
    """Against a policy that has moved by 0.2 nats per token, ten times what a version does."""
    generator = torch.Generator().manual_seed(8)
    responses, tokens = 256, 200
    is_open = torch.rand(responses, tokens, generator=generator) >= certain
    engine = torch.where(is_open, -torch.rand(responses, tokens, generator=generator) * 3, -1e-3)
    trainer = engine + 0.2 * is_open * torch.randn(responses, tokens, generator=generator)

    def broken(carried: torch.Tensor) -> Mapping[Check, str]:
        sums = aged_sums(trainer, carried)
        return aged_limits(None, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums)

    assert broken(engine) == {}
    swapped = engine.clone()
    swapped[[3, 4]] = engine[[4, 3]]
    one_shifted = engine.clone()
    one_shifted[5] = engine[5].roll(1)
    for carried in (
        swapped,
        one_shifted,
        engine.roll(1, 1),
        engine.roll(-1, 1),
        torch.zeros_like(engine),
    ):
        assert "belong to other tokens" in broken(carried)["strays"]


def test_strays_of_a_policy_that_has_moved_far_are_none_because_they_still_fit_their_tokens_best() -> (
    None
):
    generator = torch.Generator().manual_seed(9)
    engine = -4 * torch.rand(64, 100, generator=generator)
    trainer = engine + 0.4 * torch.randn(64, 100, generator=generator)
    sums = aged_sums(trainer, engine)
    assert 1.5 * sums.strays_expected < sums.strays_own < 0.5 * sums.strays_others
    assert aged_limits(None, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums) == {}


def test_strays_of_a_nearly_even_policy_that_moves_far_are_none_where_older_tokens_have_them_too() -> (
    None
):
    """Log-probs of neighbours fit such a policy's tokens as well as their own."""
    generator = torch.Generator().manual_seed(11)
    engine = -5.5 + 0.1 * torch.randn(16, 8, generator=generator)

    def moved(rows: int) -> torch.Tensor:
        return engine[:rows] + 0.7 * torch.randn(rows, 8, generator=generator)

    reference = aged_sums(moved(8), engine[:8])
    sums = aged_sums(moved(16), engine)
    assert "strays" in aged_limits(None, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums)
    assert "strays" not in aged_limits(reference, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums)
    still = aged_sums(engine[:8], engine[:8])
    assert "strays" in aged_limits(still, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums)
    unset = aged_sums(moved(16), torch.zeros_like(engine))
    less = aged_sums(engine[:8] + 0.3 * torch.randn(8, 8, generator=generator), engine[:8])
    assert "strays" in aged_limits(less, unset, DEFAULT_MARGIN, DEFAULT_RATE).broken(unset)


def test_more_strays_are_allowed_of_older_tokens() -> None:
    engine = torch.zeros(4, 50)
    trainer = engine - 1.0 * (torch.arange(50) < 12)
    young, old = (aged_sums(trainer, engine, age) for age in (0.0, 4.0))
    assert (young.strays_expected, old.strays_expected) == pytest.approx(
        (10, 50)
    ) and young.strays > old.strays == 0


def test_older_tokens_have_the_slope_of_those_that_agreed_when_they_were_new() -> None:
    """A policy that sharpens is no fault where the probe shows it as well; a temperature that the
    probe has not is.
    """
    generator = torch.Generator().manual_seed(10)
    trainer = -3 * torch.rand(128, 50, generator=generator)

    def sloped(slope: float, rows: int) -> DifferenceSums:
        own = trainer[:rows]
        noise = 0.05 * torch.randn(rows, 50, generator=generator) * (1 - own.exp())
        return aged_sums(own, own - slope * (own + entropy_of(own).view(own.shape).float()) - noise)

    sharper = sloped(0.1, 128)
    assert aged_limits(sloped(0.1, 16), sharper, DEFAULT_MARGIN, DEFAULT_RATE).broken(sharper) == {}
    assert "slope" in aged_limits(sloped(0.0, 16), sharper, DEFAULT_MARGIN, DEFAULT_RATE).broken(
        sharper
    )


# --- edges


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_a_disagreement(value: float) -> None:
    (yardstick,) = sums_of(np.full((1, 8, 4), 1e-7))
    sums = DifferenceSums(responses=2.0, independent=2.0, n=8.0, n_squared=32.0, odds=value)
    assert list(limits(yardstick, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums)) == ["mean"]


def test_equal_numbers_leave_the_rounding_of_log_probs_themselves() -> None:
    """A policy that is certain of all its tokens rounds nothing, and one ulp of an engine may not
    end its run.
    """
    (yardstick,) = sums_of(np.zeros((1, 8, 4)))
    sums = DifferenceSums(
        responses=8.0,
        independent=8.0,
        n=32.0,
        n_squared=128.0,
        odds=32 * 2**-24,
        odds_squared=32 * 2**-48,
        odds_times_n=32 * 2**-24,
    )
    assert limits(yardstick, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums) == {}


def test_limits_widen_where_fewer_or_shorter_or_repeated_responses_are_compared() -> None:
    rng = np.random.default_rng(10)
    (yardstick,) = sums_of(draw(rng, "normal", 1, 256, 64, 0.01))

    def bound(
        responses: float, tokens: float, copies: float = 1.0, rate: float = DEFAULT_RATE
    ) -> float:
        sums = DifferenceSums(
            responses=responses, independent=responses / copies, n=responses * tokens
        )
        return limits(yardstick, sums, 1.0, rate).mean

    bounds = [bound(256, 64), bound(256, 64, 8), bound(16, 64), bound(16, 8), bound(1, 8)]
    assert bounds == sorted(bounds) and bounds[0] < 2 * yardstick.odds_mean
    assert bound(16, 64, rate=1e-3) < bound(16, 64, rate=1e-9), (
        "a rarer false stop has a wider limit"
    )
    few, many = sums_of(draw(rng, "normal", 1, 3, 64, 0.01)) + sums_of(
        draw(rng, "normal", 1, 64, 64, 0.01)
    )
    slopes = [limits(yardstick, sums, 1.0, DEFAULT_RATE).slope for sums in (few, many)]
    assert slopes[0] == math.inf > slopes[1]

"""I5 as statistics: chance stops a run at most as often as stated, and faults that matter stop it at once.

The noise is made up here, over the range of what is published and measured: skewed between responses, heavy-tailed between tokens,
and the faults have the sizes that they had in real runs of the quick start (fp32) or that theory gives (bf16).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple

import numpy as np
import pytest
import torch

from pa_npu.algorithm.agreement import (
    MEANS_OF_TRAINED,
    DifferenceSums,
    Limits,
    Noise,
    difference_sums,
    k3_of,
    learn_noise,
    limits,
    plausible,
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


def sums_of(differences: np.ndarray) -> list[DifferenceSums]:
    """[runs, responses, tokens] in double precision, one result per run."""
    n = np.full(differences.shape[:2], float(differences.shape[2]))
    a, k = np.abs(differences).sum(-1), (np.expm1(differences) - differences).sum(-1)
    columns = [np.ones_like(n), n, n * n, a, a * a, a * n, k, k * k, k * n]
    rows = np.stack([*(column.sum(1) for column in columns), k.max(1)], axis=1)
    return [DifferenceSums(*row) for row in rows.tolist()]


# --- the sums


def test_sums_are_those_of_responses_computed_one_by_one() -> None:
    rng = np.random.default_rng(1)
    lengths = [3, 1, 8, 2]
    differences = 0.3 * rng.standard_normal(sum(lengths))
    index = np.repeat(np.arange(4), lengths)
    found = DifferenceSums(
        *difference_sums(torch.tensor(differences, dtype=torch.float32), torch.from_numpy(index), 4).tolist()
    )
    parts = np.split(differences, np.cumsum(lengths)[:-1])
    a = np.array([np.abs(part).sum() for part in parts])
    k = np.array([(np.exp(part) - 1 - part).sum() for part in parts])
    n = np.array(lengths)
    expected = [4, n.sum(), (n**2).sum(), a.sum(), (a**2).sum(), (a * n).sum(), k.sum(), (k**2).sum(), (k * n).sum()]
    assert astuple(found) == pytest.approx((*expected, k.max()), rel=1e-5)
    assert found.absolute_mean == pytest.approx(np.abs(differences).mean(), rel=1e-6)
    assert found.k3_mean == pytest.approx((np.exp(differences) - 1 - differences).mean(), rel=1e-5)
    assert found.k3_trimmed == pytest.approx((k.sum() - k.max()) / n.sum(), rel=1e-5)


def test_sums_of_parts_add_up_to_those_of_the_whole() -> None:
    differences = draw(np.random.default_rng(2), "heavy tails", 1, 12, 5, 0.01)
    (whole,) = sums_of(differences)
    (first,), (second,) = sums_of(differences[:, :5]), sums_of(differences[:, 5:])
    assert astuple(first + second) == pytest.approx(astuple(whole), rel=1e-12)
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
    ("learned", "judged"),
    [((64, 20), (1, 16)), ((64, 20), (4, 16)), ((64, 20), (64, 20)), ((256, 32), (256, 64))],
    ids=["probe of one engine", "probe of four", "small iteration", "iteration"],
)
def test_chance_exceeds_the_limits_no_oftener_than_stated(
    shape: str, learned: tuple[int, int], judged: tuple[int, int]
) -> None:
    """At margin 1, where the noise alone is at work: a rate that 2,000 runs can measure, and none at the default one."""
    runs, rng = 2000, np.random.default_rng(4)
    stated = 0.03  # per iteration, 0.01 for each of its means
    noises = [learn_noise(0, sums, "bf16") for sums in sums_of(draw(rng, shape, runs, *learned, 0.03))]
    found = sums_of(draw(rng, shape, runs, *judged, 0.03))
    exceeded = {"absolute": 0, "k3": 0, "default": 0}
    for noise, sums in zip(noises, found, strict=True):
        bound = limits(noise, sums, 1.0, stated)
        exceeded["absolute"] += sums.absolute_mean > bound.absolute
        exceeded["k3"] += sums.k3_trimmed > bound.k3
        exceeded["default"] += limits(noise, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums) is not None
    # three deviations of the count, and as much again for the tail's shape: the certain tokens' is the heaviest, 1.5 to 2 times
    of_each = stated / (MEANS_OF_TRAINED + 1)
    allowed = 2 * of_each * runs + 3 * math.sqrt(of_each * runs)
    assert exceeded["absolute"] <= allowed and exceeded["k3"] <= allowed, exceeded
    assert exceeded["default"] == 0


def test_a_single_token_far_off_is_no_fault_and_a_single_response_either() -> None:
    """In bf16, 64 tokens have one beyond the old absolute limit of 0.1 now and then; a long run has one beyond 1."""
    rng = np.random.default_rng(5)
    differences = draw(rng, "normal", 2, 128, 200, 0.014)
    noise = learn_noise(0, sums_of(differences[:1])[0], "bf16")
    later = differences[1:]
    later[0, 7, 50] = 2.5
    (sums,) = sums_of(later)
    assert limits(noise, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums) is None
    probe = draw(rng, "normal", 1, 4, 16, 0.014)
    probe[0, 1, 3] = 0.4
    (sums,) = sums_of(probe)
    absolute = limits(noise, sums, DEFAULT_MARGIN, DEFAULT_RATE).absolute
    assert Limits(absolute, math.inf).broken(sums) is None


def test_noise_that_grows_within_the_margin_over_a_run_goes_on() -> None:
    rng = np.random.default_rng(6)
    noise = learn_noise(0, sums_of(draw(rng, "normal", 1, 128, 100, 0.014))[0], "bf16")
    for scale, broken in ((0.004, False), (0.03, False), (0.05, False), (0.12, True)):
        (sums,) = sums_of(draw(rng, "normal", 1, 128, 100, scale))
        assert (limits(noise, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums) is not None) == broken, scale


# --- faults


def quick_start_noise(rng: np.random.Generator) -> tuple[Noise, np.ndarray]:
    """fp32, 32 groups of 8 responses of 20 tokens: mean 1.6e-7, largest 9e-6."""
    differences = draw(rng, "spread over decades", 2, 256, 20, 1e-7)
    (learned, later) = differences[:1], differences[1:]
    return learn_noise(0, sums_of(learned)[0], "fp32"), later


@pytest.mark.parametrize(
    ("fault", "scale"),
    [
        # mean |d| that each fault adds, as the quick start shows it
        ("a skipped publish", 3e-2),
        ("a skipped publish at a learning rate of 1e-6", 8e-6),
        ("weights times 1.01", 2e-4),
        ("1.3 times the temperature", 2e-2),
    ],
)
def test_in_fp32_every_fault_of_the_weights_is_found_by_the_tokens_of_one_iteration(fault: str, scale: float) -> None:
    rng = np.random.default_rng(7)
    noise, later = quick_start_noise(rng)
    (clean,) = sums_of(later)
    assert limits(noise, clean, DEFAULT_MARGIN, DEFAULT_RATE).broken(clean) is None
    (sums,) = sums_of(later + scale * rng.standard_normal(later.shape))
    assert limits(noise, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums) is not None, fault


def temperature_differences(rng: np.random.Generator, temperature: float, shape: tuple[int, ...]) -> np.ndarray:
    """Trainer minus engine log-prob of tokens that the engine drew at `temperature`, the trainer being at 1.

    Next-token distributions with entropies of about 0.5 nats, as a trained 7B policy has.
    """
    logits = 2.2 * rng.standard_normal((64, 256)) + 6.0 * (rng.random((64, 256)) < 0.012)
    trainer = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    hot = logits / temperature
    engine = hot - np.log(np.exp(hot).sum(-1, keepdims=True))
    rows = rng.integers(64, size=shape)
    cumulative = np.exp(engine).cumsum(-1)
    tokens = (rng.random(shape)[..., None] > cumulative[rows]).sum(-1).clip(max=255)
    return trainer[rows, tokens] - engine[rows, tokens]


def test_in_bf16_a_wrong_temperature_is_found_at_once_and_from_the_beginning() -> None:
    rng = np.random.default_rng(8)
    shape = (1, 128, 100)
    rounding = [draw(rng, "normal", 1, 128, 100, 0.014) for _ in range(2)]
    noise = learn_noise(0, sums_of(rounding[0])[0], "bf16")
    assert noise.absolute == pytest.approx(0.0127, rel=0.2), "as published for 7B runs"
    (sums,) = sums_of(rounding[1] + temperature_differences(rng, 1.3, shape))
    assert limits(noise, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums) is not None
    # in the first iteration, where it would be learned as noise
    assert plausible("bf16").broken(sums) is not None
    assert plausible("bf16").broken(sums_of(rounding[0])[0]) is None
    same = temperature_differences(rng, 1.0, shape)
    assert np.abs(same).max() < 1e-12, "the case's own control"


def test_in_bf16_a_skipped_publish_shows_only_where_it_moves_more_than_the_rounding() -> None:
    """At a learning rate of 1e-6 it moves log-probs by 1e-3: that is for the digest of the weights to find, not for this."""
    rng = np.random.default_rng(9)
    noise = learn_noise(0, sums_of(draw(rng, "normal", 1, 128, 100, 0.014))[0], "bf16")
    for scale, found in ((1e-3, False), (0.15, True)):
        differences = draw(rng, "normal", 1, 128, 100, 0.014)
        (sums,) = sums_of(differences + scale * rng.standard_normal(differences.shape))
        assert (limits(noise, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums) is not None) == found


# --- edges


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_a_disagreement(value: float) -> None:
    sums = DifferenceSums(2.0, 8.0, 32.0, value, value, value, 0.0, 0.0, 0.0)
    assert plausible("fp32").broken(sums) is not None
    noise = learn_noise(0, sums_of(np.full((1, 8, 4), 1e-7))[0], "fp32")
    assert "mean |difference|" in str(limits(noise, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums))


def test_equal_numbers_leave_the_rounding_of_the_type_as_noise() -> None:
    """Engines that compute bit by bit as the trainers do give no noise to learn, and one ulp may not end their run."""
    for dtype, epsilon in (("fp32", 2**-23), ("bf16", 2**-7)):
        noise = learn_noise(0, sums_of(np.zeros((1, 8, 4)))[0], dtype)  # type: ignore[arg-type]
        assert noise.absolute == epsilon / 2 and noise.k3 == epsilon**2 / 8
        (sums,) = sums_of(np.full((1, 8, 4), epsilon / 2))
        assert limits(noise, sums, DEFAULT_MARGIN, DEFAULT_RATE).broken(sums) is None


def test_limits_widen_where_fewer_or_shorter_responses_are_compared() -> None:
    noise = learn_noise(0, sums_of(draw(np.random.default_rng(10), "normal", 1, 256, 64, 0.01))[0], "bf16")
    bounds = [
        limits(noise, DifferenceSums(responses, responses * tokens), 1.0, DEFAULT_RATE).absolute
        for responses, tokens in ((256, 64), (16, 64), (16, 8), (1, 8))
    ]
    assert bounds == sorted(bounds) and bounds[0] < 2 * noise.absolute
    looser = limits(noise, DifferenceSums(16, 1024), 1.0, 1e-3).absolute
    assert looser < limits(noise, DifferenceSums(16, 1024), 1.0, 1e-9).absolute, "a rarer false stop has a wider limit"

"""The bound on how surprising drawn tokens may be: honest draws stay within it, draws from another distribution do not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pa_npu.algorithm.agreement_sums import (
    DifferenceSums,
)
from pa_npu.algorithm.drawn_tokens import DrawnTokens

VOCABULARY = 64
RATE = 1e-7

Sharpness = Callable[[np.random.Generator, int], np.ndarray]


def mixed(rng: np.random.Generator, size: int) -> np.ndarray:
    """A policy's: most tokens are nearly certain, some are open."""
    return np.exp(rng.uniform(-1.0, 3.0, size))


def certain(rng: np.random.Generator, size: int) -> np.ndarray:
    return np.full(size, 25.0)


def flat(rng: np.random.Generator, size: int) -> np.ndarray:
    return np.full(size, 0.05)


def drawn(
    rng: np.random.Generator,
    shape: tuple[int, int],
    sharpness: Sharpness = mixed,
    exponent: float = 1.0,
    most_likely: int = VOCABULARY,
) -> np.ndarray:
    """Tokens of groups, [groups, tokens, 2]: t and H. They are drawn from the distribution to the
    power `exponent`, among so many of its most likely tokens.
    """
    num_tokens = shape[0] * shape[1]
    logits = rng.standard_normal((num_tokens, VOCABULARY)) * sharpness(rng, num_tokens)[:, None]
    logits -= logits.max(axis=1, keepdims=True)
    table = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    entropy = -(np.exp(table) * table).sum(axis=1)
    of_sampler = exponent * table
    if most_likely < VOCABULARY:
        least = np.sort(of_sampler, axis=1)[:, -most_likely, None]
        of_sampler = np.where(of_sampler >= least, of_sampler, -np.inf)
    gumbel = -np.log(-np.log(rng.random(table.shape)))
    tokens = (of_sampler + gumbel).argmax(axis=1)
    values = np.stack([table[np.arange(num_tokens), tokens], entropy], axis=1)
    return values.reshape(*shape, 2)


def share(tokens: np.ndarray, groups: int | None = None) -> float:
    """|S| as a share of its limit. groups: of which these were chosen."""
    t, entropy = tokens.reshape(-1, 2).T
    x = t + entropy
    sums = DifferenceSums(
        n=len(x),
        drawn=len(x),
        surprise=x.sum(),
        surprise_squared=(x**2).sum(),
        entropy=entropy.sum(),
        entropy_squared=(entropy**2).sum(),
    )
    judged = DrawnTokens.from_sums(sums, len(tokens), groups or len(tokens))
    return abs(judged.surprise) / judged.limit(VOCABULARY, RATE)


@pytest.mark.parametrize("sharpness", [mixed, certain, flat])
def test_honest_draws_stay_far_within_the_limit(sharpness: Sharpness) -> None:
    rng = np.random.default_rng(1)
    shares = [share(drawn(rng, (4, 50), sharpness)) for _ in range(400)]
    assert max(shares) < 0.7
    assert share(drawn(rng, (8, 5000), sharpness)) < 0.5


def test_groups_that_were_chosen_by_what_was_drawn_stay_within_it() -> None:
    rng = np.random.default_rng(2)
    for _ in range(50):
        tokens = drawn(rng, (32, 40))
        order = tokens.sum(axis=(1, 2)).argsort()
        for chosen in (order[:16], order[16:]):
            assert share(tokens[chosen], groups=32) < 0.8


@pytest.mark.parametrize(
    ("exponent", "most_likely", "num_tokens"),
    [(1.0, 1, 2000), (4.0, VOCABULARY, 2500), (1.0, 4, 4000), (1.25, VOCABULARY, 40_000)],
)
def test_draws_from_another_distribution_show(
    exponent: float, most_likely: int, num_tokens: int
) -> None:
    rng = np.random.default_rng(3)
    tokens = drawn(rng, (1, num_tokens), exponent=exponent, most_likely=most_likely)
    assert share(tokens) > 1.0


def test_a_flatter_sampler_shows_too() -> None:
    assert share(drawn(np.random.default_rng(4), (1, 8000), exponent=0.7)) > 1.0


def test_sums_of_iterations_add_up() -> None:
    one = DrawnTokens(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    assert one + one == DrawnTokens(2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0)

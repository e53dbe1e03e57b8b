"""How far engine and trainer log-probs may differ: invariant I5 as a statistical test against the run's own noise.

Both compute the same log-probs of the same tokens by other kernels, so they differ by rounding: in fp32 by about 1e-7 per token,
in bf16 by about 0.01, with single tokens ten times further off. What is wrong (a publish that was skipped, other weights, another
temperature) differs by more than that *on average*, long before any single token stands out. With d = trainer - engine log-prob
of a sampled token, two means over tokens are judged:

    mean |d|            moves linearly with a fault
    K3 = e^d - 1 - d    moves with the fault's square, so that few tokens that are far off show; it estimates
                        KL(engine || trainer): the ratio trainer / engine under tokens that the engine drew

Noise. The first iteration's tokens, all generated and trained with one version, give both means and how they vary from response
to response (tokens of a response are not independent, responses nearly are): c^2, the relative variance of one response's part.

Limit. The mean over R responses of L tokens is one of positive, skewed, independent terms. It is taken as log-normal with the
right mean and variance (Fenton-Wilkinson), whose tail is heavier than the normal's and the gamma's. At unchanged noise, learned
from R0 responses of L0 tokens, the ratio of the two means has the relative variance

    v = c^2 (max(1, L0 / L) / R + 1 / R0)

and with s^2 = log(1 + v) it exceeds exp(z s - s^2 / 2) with the chance of a normal above z. z is chosen for false_stop_rate per
iteration, divided by the means that an iteration has: |d| and K3 of the trained tokens, |d| of the probe (of every replica, where
it is the replica's first microbatch). K3 leaves out the
response that differs most: a fault is in all of them, and one token that is far off is none. On top comes the margin, for the
noise's own change over a run (lengths, entropy and weights change), on |d|, and its square on K3.
tests/unit/test_algorithm_agreement.py measures both sides: false stops on skewed, heavy-tailed noise, and the faults it finds.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from statistics import NormalDist
from typing import Literal

import torch

Dtype = Literal["fp32", "bf16"]

# Of the trained tokens. A probe is one more each.
MEANS_OF_TRAINED = 2
# Relative variance between responses is taken for at least that of exponential noise: few responses may look alike by chance.
_LEAST_RELATIVE_VARIANCE = 1.0
# A sample of a skewed quantity mostly lacks the rare large values that make its variance: K3, a square, is skewed itself.
_K3_VARIANCE_FACTOR = 4.0
# exp(d) - 1 - d by its series below this, where the difference of nearly equal numbers is only rounding.
_SERIES_BELOW = 0.02


def k3_of(difference: torch.Tensor) -> torch.Tensor:
    """exp(d) - 1 - d, accurate for small d too, where the formula's own rounding in fp32 (1e-7) would hide d^2 / 2."""
    series = 0.5 * difference.square() * (1 + difference / 3 + difference.square() / 12)
    return torch.where(difference.abs() < _SERIES_BELOW, series, torch.expm1(difference) - difference)


@dataclass(frozen=True)
class DifferenceSums:
    """Sums over responses with n tokens, a = sum |d| and k = sum K3 over a response's tokens; k_largest: the largest k.

    Adds up over microbatches, replicas and updates.
    """

    responses: float = 0.0
    n: float = 0.0
    nn: float = 0.0
    a: float = 0.0
    aa: float = 0.0
    an: float = 0.0
    k: float = 0.0
    kk: float = 0.0
    kn: float = 0.0
    k_largest: float = 0.0

    def __add__(self, other: DifferenceSums) -> DifferenceSums:
        added = [mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)]
        return DifferenceSums(*[*added[:-1], max(self.k_largest, other.k_largest)])

    @property
    def absolute_mean(self) -> float:
        """Mean |d| over tokens."""
        return self.a / max(1.0, self.n)

    @property
    def k3_mean(self) -> float:
        """Mean K3 over tokens."""
        return self.k / max(1.0, self.n)

    @property
    def k3_trimmed(self) -> float:
        """Mean K3 without the response whose K3 is largest, as if that had no difference at all."""
        return (self.k - self.k_largest) / max(1.0, self.n)


def difference_sums(difference: torch.Tensor, response_index: torch.Tensor, num_responses: int) -> torch.Tensor:
    """The fields of DifferenceSums for one microbatch in their order, [10] fp32; the last is a maximum, no sum.

    difference: trainer - engine log-prob, [tokens] fp32. response_index: int64 [tokens].
    """
    zeros = torch.zeros(num_responses, dtype=torch.float32, device=difference.device)
    n, a, k = (
        zeros.index_add(0, response_index, values.float())
        for values in (torch.ones_like(difference), difference.abs(), k3_of(difference))
    )
    responses = (n > 0).float()
    sums = [part.sum() for part in (responses, n, n * n, a, a * a, a * n, k, k * k, k * n)]
    return torch.stack([*sums, k.max()])


@dataclass(frozen=True)
class Noise:
    """What rounding alone does: both means and the relative variances of a response's part, learned from one iteration."""

    version: int
    responses: int
    tokens_per_response: float
    absolute: float
    absolute_variance: float
    k3: float
    k3_variance: float


@dataclass(frozen=True)
class Limits:
    """Beyond these engine and trainer do not agree. k3 is for the trained tokens only: a probe has a few responses."""

    absolute: float
    k3: float

    def broken(self, sums: DifferenceSums) -> str | None:
        """Which mean is beyond its limit, as a phrase; also one that is not a number."""
        for name, value, limit in (
            ("mean |difference|", sums.absolute_mean, self.absolute),
            ("K3", sums.k3_trimmed, self.k3),
        ):
            if not value <= limit:
                return f"{name} = {value:.3g}, more than {limit:.3g}"
        return None


def learn_noise(version: int, sums: DifferenceSums, dtype: Dtype) -> Noise:
    """From the tokens of the first iteration. The noise is never taken for less than the type's rounding can be."""
    lowest = _least(dtype)
    return Noise(
        version=version,
        responses=int(sums.responses),
        tokens_per_response=sums.n / max(1.0, sums.responses),
        absolute=max(sums.absolute_mean, lowest.absolute),
        absolute_variance=_relative_variance(sums, sums.a, sums.aa, sums.an),
        k3=max(sums.k3_mean, lowest.k3),
        k3_variance=_K3_VARIANCE_FACTOR * _relative_variance(sums, sums.k, sums.kk, sums.kn),
    )


def limits(noise: Noise, sums: DifferenceSums, margin: float, false_stop_rate: float, probes: int = 1) -> Limits:
    """The limits for as many responses and tokens as `sums` has (see the module's docstring). probes: of an iteration."""
    z = NormalDist().inv_cdf(1.0 - false_stop_rate / (MEANS_OF_TRAINED + probes))
    shorter = max(1.0, noise.tokens_per_response / max(1.0, sums.n / max(1.0, sums.responses)))
    share = shorter / max(1.0, sums.responses) + 1.0 / max(1, noise.responses)

    def quantile(relative_variance: float) -> float:
        squared = math.log1p(relative_variance * share)
        return math.exp(z * math.sqrt(squared) - 0.5 * squared)

    return Limits(
        margin * noise.absolute * quantile(noise.absolute_variance),
        margin**2 * noise.k3 * quantile(noise.k3_variance),
    )


def plausible(dtype: Dtype) -> Limits:
    """What noise can be at most: where the first iteration is beyond it, engine and trainer were never the same model.

    fp32 without reduced-precision products is at 1e-7 to 1e-5. bf16: published runs of dense models have means of 0.01 to 0.02
    and K3 of 1e-4 to 1e-3; a temperature that is 30% off gives 0.1 and 0.03.
    """
    return Limits(1e-3, 1e-5) if dtype == "fp32" else Limits(0.05, 5e-3)


def _least(dtype: Dtype) -> Limits:
    """A log-prob is a difference of numbers around 1 to 10: half an epsilon of rounding on average, and K3 = d^2 / 2 of that."""
    half = 0.5 * torch.finfo(torch.float32 if dtype == "fp32" else torch.bfloat16).eps
    return Limits(half, 0.5 * half * half)


def _relative_variance(sums: DifferenceSums, total: float, squares: float, crossed: float) -> float:
    """Of the part of one response in the mean total / n: var(x - m n) / (m mean n)^2, at least that of exponential noise."""
    if sums.responses < 2 or total <= 0:
        return _LEAST_RELATIVE_VARIANCE
    mean = total / sums.n
    residual = (squares - 2 * mean * crossed + mean * mean * sums.nn) / (sums.responses - 1)
    return max(_LEAST_RELATIVE_VARIANCE, residual / (total / sums.responses) ** 2)

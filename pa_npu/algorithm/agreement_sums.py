"""Sums over tokens of what separates engine and trainer log-probs, which agreement.py judges.

They are computed microbatch by microbatch on the device and added over microbatches and ranks.
agreement.py says what z, L and strays are.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields

import torch

# The uncertainty 1 - p below which a log-prob's own rounding in fp32, about 2^-20, exceeds what the
# rounding of logits of size 10 in this type does to it: 2^-5 in bf16, 2^-8 in fp16; in fp32 both
# are alike for open tokens.
UNCERTAINTY_FLOOR = {"bf16": 2.0**-15, "fp16": 2.0**-12, "fp32": 2.0**-3}
# Log-odds beyond this count as this: a single token that the policy nearly excludes would decide
# the slope.
_LARGEST_ODDS = 16.0
# Nats: a ratio of 1.65, far beyond the clip range of any loss.
STRAY = 0.5
STRAY_SHARE = 0.05
# Strays count where at least as many tokens are far from their own log-prob as this share of those
# that are far from a neighbour's.
_FITS_OTHERS = 0.7
# exp(d) - 1 - d by its series below this, where the difference of nearly equal numbers is only
# rounding.
_SERIES_BELOW = 0.02
# Responses that are told apart; with fewer their scatter says nothing.
_FEWEST_FOR_SLOPE = 4


def k3_of(difference: torch.Tensor) -> torch.Tensor:
    """exp(d) - 1 - d, accurate for small d too, where the formula's own rounding in fp32 (1e-7)
    would hide d^2 / 2.
    """
    series = 0.5 * difference.square() * (1 + difference / 3 + difference.square() / 12)
    return torch.where(
        difference.abs() < _SERIES_BELOW, series, torch.expm1(difference) - difference
    )


@dataclass(frozen=True)
class DifferenceSums:
    """Sums over the responses of a comparison. They add up over microbatches, replicas and updates.

    A response has n tokens and, summed over them: |z|, z^2, the moment z L and the weight L^2. Of
    these and of their products the sums over responses are kept, as the names say; `scatter_*` are
    sums over tokens.

        independent       responses, each divided by the number of those that have its tokens
        absolute, k3      sums of |d| and of K3 = exp(d) - 1 - d over tokens, which are reported and not judged
        strays_own        tokens more than STRAY from their own log-prob; strays_others: from a
                          neighbour's
        strays_expected   strays that the tokens' ages allow
        drawn             tokens whose entropy is that of the distribution that they were drawn from
        surprise          of these, t + H; surprise_squared: its square; entropy, entropy_squared: H

    The last three are maxima: over responses of the sum of z^2, and of the evidence, in nats, that
    one has more strays than allowed; over tokens of |d|.
    """

    responses: float = 0.0
    independent: float = 0.0
    n: float = 0.0
    n_squared: float = 0.0
    absolute: float = 0.0
    k3: float = 0.0
    odds: float = 0.0
    odds_squared: float = 0.0
    odds_times_n: float = 0.0
    square: float = 0.0
    square_squared: float = 0.0
    square_times_n: float = 0.0
    moment: float = 0.0
    moment_squared: float = 0.0
    weight: float = 0.0
    weight_squared: float = 0.0
    moment_times_weight: float = 0.0
    scatter_moment: float = 0.0
    scatter_cross: float = 0.0
    scatter_weight: float = 0.0
    strays_own: float = 0.0
    strays_others: float = 0.0
    strays_expected: float = 0.0
    drawn: float = 0.0
    surprise: float = 0.0
    surprise_squared: float = 0.0
    entropy: float = 0.0
    entropy_squared: float = 0.0
    square_largest: float = 0.0
    strays: float = 0.0
    largest: float = 0.0

    def __add__(self, other: DifferenceSums) -> DifferenceSums:
        pairs = list(zip(astuple(self), astuple(other), strict=True))
        sums = [x + y for x, y in pairs[:NUM_SUMS]]
        maxima = [max(pair) for pair in pairs[NUM_SUMS:]]
        return DifferenceSums(*sums, *maxima)

    @property
    def absolute_mean(self) -> float:
        """Mean |d| over tokens, in nats."""
        return self.absolute / max(1.0, self.n)

    @property
    def k3_mean(self) -> float:
        """Mean K3 over tokens, which estimates KL(engine || trainer) in nats."""
        return self.k3 / max(1.0, self.n)

    @property
    def odds_mean(self) -> float:
        """Mean |z| over tokens."""
        return self.odds / max(1.0, self.n)

    @property
    def square_mean(self) -> float:
        """Mean z^2 over tokens."""
        return self.square / max(1.0, self.n)

    @property
    def square_trimmed(self) -> float:
        """Mean z^2 without the response whose sum is largest, as if that had no difference at all."""
        return (self.square - self.square_largest) / max(1.0, self.n)

    @property
    def slope(self) -> float:
        """The slope of z against L, through zero."""
        return self.moment / self.weight if self.weight else 0.0

    @property
    def slope_deviation(self) -> float:
        """Standard error of the slope; infinite where it cannot be known."""
        if self.responses < _FEWEST_FOR_SLOPE or not self.weight or not self.independent:
            return math.inf
        slope = self.slope
        of_responses = (
            self.moment_squared
            - 2 * slope * self.moment_times_weight
            + slope**2 * self.weight_squared
        )
        of_tokens = (
            self.scatter_moment - 2 * slope * self.scatter_cross + slope**2 * self.scatter_weight
        )
        repeated = self.responses / self.independent
        return math.sqrt(repeated * max(0.0, of_responses, of_tokens)) / self.weight

    def slope_error(self, deviations: float) -> float:
        """How far the slope may be from its mean over many samples, with the chance of a normal
        beyond `deviations`.
        """
        if self.slope_deviation in (0.0, math.inf):
            return self.slope_deviation
        independent_tokens = self.n * self.independent / self.responses
        return self.slope_deviation * _student(deviations, max(2.0, independent_tokens - 1))


NUM_MAXIMA = 3
NUM_SUMS = len(fields(DifferenceSums)) - NUM_MAXIMA


def difference_sums(
    logprobs: torch.Tensor,
    engine_logprobs: torch.Tensor,
    entropy: torch.Tensor,
    response_index: torch.Tensor,
    num_responses: int,
    ages: torch.Tensor | None = None,
    *,
    floor: float = UNCERTAINTY_FLOOR["bf16"],
    copies: float = 1.0,
    is_drawn: bool = True,
) -> torch.Tensor:
    """Returns the fields of DifferenceSums for one microbatch in their order, fp32; the last
    NUM_MAXIMA are maxima, no sums.

    Args:
        logprobs, engine_logprobs: [tokens] fp32, ordered by response.
        entropy: [tokens] fp32, in nats, of the distributions that logprobs are of.
        response_index: int64 [tokens].
        num_responses: of the microbatch.
        ages: [tokens], 0 where None.
        floor: of the uncertainty, UNCERTAINTY_FLOOR of the models' type.
        copies: responses of a group that have the same token at the same place, in the mean.
        is_drawn: whether the entropy is of the distribution that the tokens were drawn from.
    """
    difference = logprobs - engine_logprobs

    def summed(values: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(num_responses, dtype=torch.float32, device=values.device)
        return zeros.index_add(0, response_index, values.float())

    # a log-prob may be rounded to a little above 0
    uncertainty = (-torch.expm1(logprobs)).clamp(min=0.0)
    z = difference / (uncertainty + floor)
    log_odds = ((logprobs + entropy) / (uncertainty + floor)).clamp(-_LARGEST_ODDS, _LARGEST_ODDS)
    n = summed(torch.ones_like(difference))
    is_response = (n > 0).float()
    odds, square = summed(z.abs()), summed(z.square())
    moment, weight = summed(z * log_odds), summed(log_odds.square())
    strays = [
        summed((difference.abs() > STRAY).float()),
        summed(_neighbours_strays(logprobs, engine_logprobs, response_index)),
        summed(_expected_strays(difference, ages)),
    ]
    sums = {
        "responses": is_response,
        "independent": is_response / copies,
        "n": n,
        "n_squared": n * n,
        "absolute": difference.abs(),
        "k3": k3_of(difference),
        "odds": odds,
        "odds_squared": odds.square(),
        "odds_times_n": odds * n,
        "square": square,
        "square_squared": square.square(),
        "square_times_n": square * n,
        "moment": moment,
        "moment_squared": moment.square(),
        "weight": weight,
        "weight_squared": weight.square(),
        "moment_times_weight": moment * weight,
        "scatter_moment": (z * log_odds).square(),
        "scatter_cross": z * log_odds**3,
        "scatter_weight": log_odds**4,
        "strays_own": strays[0],
        "strays_others": strays[1],
        "strays_expected": strays[2],
        "drawn": is_response * n * is_drawn,
        **_surprise(logprobs, entropy, is_drawn),
    }
    maxima = {
        "square_largest": square.max(),
        "strays": stray_evidence(n, *strays).max(),
        "largest": difference.abs().max(),
    }
    names = [field.name for field in fields(DifferenceSums)]
    assert names == [*sums, *maxima]
    return torch.stack([*(column.float().sum() for column in sums.values()), *maxima.values()])


def _surprise(
    logprobs: torch.Tensor, entropy: torch.Tensor, is_drawn: bool
) -> dict[str, torch.Tensor]:
    """Returns what drawn_tokens.py judges, [tokens] each; zeros where nothing says it."""
    surprise = logprobs + entropy
    return {
        "surprise": surprise * is_drawn,
        "surprise_squared": surprise.square() * is_drawn,
        "entropy": entropy * is_drawn,
        "entropy_squared": entropy.square() * is_drawn,
    }


def _expected_strays(difference: torch.Tensor, ages: torch.Tensor | None) -> torch.Tensor:
    """Returns the chance that each token is a stray, which grows with its age."""
    expected = torch.full_like(difference, STRAY_SHARE)
    if ages is not None:
        expected = (expected * (1 + ages)).clamp(max=0.5)
    return expected


def _neighbours_strays(
    logprobs: torch.Tensor, engine_logprobs: torch.Tensor, response_index: torch.Tensor
) -> torch.Tensor:
    """Returns for each token the share of its neighbours' log-probs that are more than STRAY from
    its own; fp32 [tokens].
    """
    strays = torch.zeros_like(logprobs)
    together = response_index[1:] == response_index[:-1]
    strays[:-1] += 0.5 * (together & ((logprobs[:-1] - engine_logprobs[1:]).abs() > STRAY))
    strays[1:] += 0.5 * (together & ((logprobs[1:] - engine_logprobs[:-1]).abs() > STRAY))
    return strays


def added(sums: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """Returns two results of `difference_sums` as one, as DifferenceSums adds."""
    return torch.cat(
        [sums[:NUM_SUMS] + more[:NUM_SUMS], torch.maximum(sums[NUM_SUMS:], more[NUM_SUMS:])]
    )


def stray_evidence(
    n: torch.Tensor, strays: torch.Tensor, neighbours_strays: torch.Tensor, expected: torch.Tensor
) -> torch.Tensor:
    """Returns the nats by which chance is against as many strays: -log of Chernoff's bound; 0 where
    they are allowed. Any shape.
    """
    share, allowed = strays / n.clamp(min=1.0), expected / n.clamp(min=1.0)
    divergence = torch.xlogy(share, share / allowed) + torch.xlogy(
        1 - share, (1 - share) / (1 - allowed)
    )
    counts = (share > allowed) & (strays >= _FITS_OTHERS * neighbours_strays)
    return torch.where(counts, n * divergence, torch.zeros_like(n))


def _student(deviations: float, freedom: float) -> float:
    """Student's t beyond which lies what of a normal lies beyond z: Gaver and Kafadar, The American
    Statistician 38, 1984.
    """
    g = (freedom - 1.5) / (freedom - 1.0) ** 2
    return math.sqrt(freedom * math.expm1(deviations * deviations * g))

"""How far engine and trainer log-probs may differ: invariant I5 as statistical tests against the trainer's own rounding.

Both compute the same log-probs of the same tokens by other kernels, so they differ by rounding. How
much rounding can do is measured without an engine: the trainer's log-probs in its own type against
its log-probs in a wider one (bf16 against fp32, fp32 against fp64), same weights, same tokens. No
fault of an engine moves this yardstick. publish.noise_margin says how many times it an engine may
round.

Log-odds, not log-probs, are compared. A logit that is rounded by r moves the log-prob t of a token
by about (1 - p) r, with p = e^t: the log-prob of a certain token hardly moves, that of an open one
by all of r. So a difference of log-probs says how open the tokens of a group are, which varies a
thousandfold between the prompts of one iteration, and a yardstick of some prompts says nothing
about others. With u = 1 - p,

    z = (t - e) / (u + floor)       the difference of the log-odds log(p / (1 - p)), in units of a
                                    logit's rounding
    L = (t + H) / (u + floor)       what z is per unit of a factor on all logits, H the entropy of
                                    the token's distribution; of a token that competes with one
                                    other it is its log-odds

z is alike for all tokens of a run: over 960 groups of an honest bf16 run, mean |z| of a group was
0.3 to 3.3 of the yardstick, mean |d| 0.002 to 80 of it (docs/results/agreement.md). `floor` is
where the rounding of an fp32 log-prob itself exceeds what the logits' rounding does to it
(UNCERTAINTY_FLOOR).

Four numbers are judged:

    mean |z|      moves linearly with a fault, and shows it where it is larger than the rounding
    mean z^2      moves with the fault's square, so that few tokens that are far off show
    slope         of z against L: another temperature T is a slope of about 1 - 1/T, and so is a
                  factor on all weights. Rounding has no sign and averages out of it, and each token
                  counts, the certain ones most
    strays        tokens more than STRAY nats off, in each response: many where the log-probs are
                  those of other tokens

Responses to one prompt are no independent sample: under a sharp policy they are nearly the same
tokens, and their common rounding repeats. A response whose tokens c responses of its group have at
the same place therefore counts as 1/c (`independent`). What a single group of a sharp policy says
is judged with little certainty, what an iteration says with much.

Limits of mean |z| and mean z^2. The mean over R independent responses is one of positive, skewed
terms. It is taken as log-normal with the right mean and variance (Fenton-Wilkinson), whose tail is
heavier than the normal's and the gamma's. With the yardstick from R0 responses of L0 tokens, the
ratio of the two means has the relative variance

    v = c^2 (max(1, L0 / L) / R + 1 / R0)        c^2: that of one response's part, which the
                                                 yardstick shows

and with s^2 = log(1 + v) it exceeds exp(k s - s^2 / 2) with the chance of a normal above k. k is
chosen for false_stop_rate per iteration, divided by the tests that an iteration has. Mean z^2
leaves out the response that differs most: a fault is in all of them.

Limit of the slope. Its standard error is the larger of two, since neither alone is enough: from the
scatter of tokens around the line, and from the scatter of responses; both are multiplied for
responses that repeat each other, and have Student's tails. Allowed is that, beside it the margin
times the yardstick's own slope and standard error, and at least what fp32 rounds.

Of tokens whose policy has moved on, the slope is judged by that of other tokens as old, which
agreed when they were new.

Strays need no yardstick. Of tokens that are `age` versions older than the policy at most
STRAY_SHARE (1 + age) may be strays; a response breaks the rule where chance (Chernoff's bound of
the binomial) would not give as many at the stated rate, and only if its log-probs fit their own
tokens hardly better than their neighbours, which the drift of a policy does not bring about.
Where all tokens are nearly as likely, neighbours say nothing. A policy that moves far in a version
is known by tokens as old that agreed when they were new: of others twice as large a share may be
strays, and single responses are not judged where that is more than what the rule allows.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields, replace
from statistics import NormalDist
from typing import Literal, get_args

import torch

Check = Literal["mean", "square", "slope", "strays", "drawn"]
CHECKS: tuple[Check, ...] = get_args(Check)
"""Those of AgreementLimits, and `drawn` (drawn_tokens.py)."""
# Of the trained tokens all four are judged; of a probe, which is too small for mean z^2, three.
TESTS_OF_TRAINED, TESTS_OF_PROBE = 4, 3
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
# A policy may sharpen by so much per version, as a lower temperature does, beside what a probe of
# few tokens shows of it.
SHARPENING = 0.02
# Tokens of the same age may have this times the slope and the strays that those of a probe have, of
# which a policy may have moved more by chance.
_OTHER_TOKENS = 2.0
# Share of strays that no drift exceeds.
_MAX_DRIFT = 0.95
# Strays count where at least as many tokens are far from their own log-prob as this share of those
# that are far from a neighbour's.
_FITS_OTHERS = 0.7
# Few responses may look alike by chance: their variance is averaged with that of exponential noise,
# which counts as so many.
_PRIOR_RESPONSES, _PRIOR_VARIANCE = 2.0, 1.0
# A sample of a skewed quantity mostly lacks the rare large values that make its variance: a square
# is skewed itself.
_SQUARE_VARIANCE_FACTOR = 4.0
# exp(d) - 1 - d by its series below this, where the difference of nearly equal numbers is only
# rounding.
_SERIES_BELOW = 0.02
# Log-probs are fp32 numbers around 1 on both sides, whatever the models' type.
_LEAST_ROUNDING = 2.0**-24
# A slope that rounding in fp32 makes over n tokens is below this / sqrt(n), also where a sharp
# policy's log-probs hardly vary,
_SLOPE_ROUNDING = 2.0**-10
# or below this: fp32 rounding of a scalar product of 2^14 terms. Where all logits depend on one, as
# on the final norm's, it is a slope of all tokens alike.
_LEAST_SLOPE = 2.0**-17
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
    is_stray = (difference.abs() > STRAY).float()
    expected = torch.full_like(difference, STRAY_SHARE)
    if ages is not None:
        expected = (expected * (1 + ages)).clamp(max=0.5)
    strays = [
        summed(is_stray),
        summed(_neighbours_strays(logprobs, engine_logprobs, response_index)),
        summed(expected),
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
        "surprise": (logprobs + entropy) * is_drawn,
        "surprise_squared": (logprobs + entropy).square() * is_drawn,
        "entropy": entropy * is_drawn,
        "entropy_squared": entropy.square() * is_drawn,
    }
    maxima = {
        "square_largest": square.max(),
        "strays": stray_evidence(n, *strays).max(),
        "largest": difference.abs().max(),
    }
    names = [field.name for field in fields(DifferenceSums)]
    assert names == [*sums, *maxima]
    return torch.stack([*(column.float().sum() for column in sums.values()), *maxima.values()])


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


@dataclass(frozen=True)
class AgreementLimits:
    """Beyond these engine and trainer do not agree; infinite where something is not judged. strays:
    nats of evidence. drift: share of strays that the policy's movement explains.
    """

    mean: float = math.inf
    square: float = math.inf
    slope: float = math.inf
    strays: float = math.inf
    drift: float = 0.0

    def broken(self, sums: DifferenceSums) -> dict[Check, str]:
        """Returns what is beyond its limit, or not a number: by check, its value and limit in
        words.
        """
        values: dict[Check, tuple[str, float, float]] = {
            "mean": ("mean |difference| of log-odds", sums.odds_mean, self.mean),
            "square": ("mean squared difference of log-odds", sums.square_trimmed, self.square),
            "slope": (
                "|slope| against the log-odds (another temperature, or scaled weights)",
                abs(sums.slope),
                self.slope,
            ),
        }
        reasons: dict[Check, str] = {}
        for check, (name, value, limit) in values.items():
            if not value <= limit:
                reasons[check] = f"{name} = {value:.3g}, more than {limit:.3g}"
        allowed = max(sums.strays_expected, self.drift * sums.n)
        evidence = _pooled_evidence(replace(sums, strays_expected=allowed))
        if self.drift * sums.n <= _OTHER_TOKENS * sums.strays_expected:
            evidence = max(evidence, sums.strays)
        if evidence > self.strays:
            reasons["strays"] = (
                f"{sums.strays_own:.0f} tokens more than {STRAY:g} nats off, "
                f"{allowed:.0f} allowed, in all or in one response more than chance "
                "gives: as log-probs have that belong to other tokens (shifted, swapped or not set)"
            )
        return reasons


def limits(
    yardstick: DifferenceSums,
    sums: DifferenceSums,
    margin: float,
    false_stop_rate: float,
    probes: int = 1,
) -> AgreementLimits:
    """Returns the limits for as many responses and tokens as `sums` has (see the module's
    docstring).

    probes: of an iteration.
    """
    deviations = _deviations(false_stop_rate, probes)
    shorter = max(1.0, _length(yardstick) / _length(sums))
    share = shorter / max(1.0, sums.independent) + 1.0 / max(1.0, yardstick.independent)

    def quantile(relative_variance: float) -> float:
        squared = math.log1p(relative_variance * share)
        return math.exp(deviations * math.sqrt(squared) - 0.5 * squared)

    y = yardstick
    mean = max(y.odds_mean, _LEAST_ROUNDING) * quantile(
        _relative_variance(y, y.odds, y.odds_squared, y.odds_times_n)
    )
    square = max(y.square_mean, _LEAST_ROUNDING**2) * quantile(
        _SQUARE_VARIANCE_FACTOR
        * _relative_variance(y, y.square, y.square_squared, y.square_times_n)
    )
    rounding = max(_LEAST_SLOPE, _SLOPE_ROUNDING / math.sqrt(max(1.0, sums.n)))
    return AgreementLimits(
        mean=margin * mean,
        square=margin**2 * square,
        slope=max(margin * (abs(y.slope) + y.slope_deviation), rounding)
        + sums.slope_error(deviations),
        strays=_evidence(sums, false_stop_rate, probes),
    )


def aged_limits(
    reference: DifferenceSums | None,
    sums: DifferenceSums,
    margin: float,
    false_stop_rate: float,
    probes: int = 1,
) -> AgreementLimits:
    """Returns the limits for tokens whose policy has moved on since: strays, and the slope against
    that of `reference`.

    reference: tokens at least as old that agreed when they were new, as the policy sees them now;
    None where there are none.
    """
    slope = math.inf
    drift = 0.0
    if reference is not None:
        drift = min(_MAX_DRIFT, _OTHER_TOKENS * reference.strays_own / max(1.0, reference.n))
        ages = sums.strays_expected / (STRAY_SHARE * max(1.0, sums.n))
        slope = (
            _OTHER_TOKENS * abs(reference.slope)
            + margin * reference.slope_deviation
            + SHARPENING * ages
        )
        slope += sums.slope_error(_deviations(false_stop_rate, probes))
    return AgreementLimits(
        slope=slope, strays=_evidence(sums, false_stop_rate, probes), drift=drift
    )


def _deviations(false_stop_rate: float, probes: int) -> float:
    return NormalDist().inv_cdf(
        1.0 - false_stop_rate / (TESTS_OF_TRAINED + TESTS_OF_PROBE * probes)
    )


def _evidence(sums: DifferenceSums, false_stop_rate: float, probes: int) -> float:
    tests = (TESTS_OF_TRAINED + TESTS_OF_PROBE * probes) * (1.0 + sums.responses)
    return math.log(tests / false_stop_rate)


def _pooled_evidence(sums: DifferenceSums) -> float:
    counts = (sums.n, sums.strays_own, sums.strays_others, sums.strays_expected)
    return float(stray_evidence(*(torch.tensor(count, dtype=torch.float64) for count in counts)))


def _length(sums: DifferenceSums) -> float:
    return max(1.0, sums.n) / max(1.0, sums.responses)


def _student(deviations: float, freedom: float) -> float:
    """Student's t beyond which lies what of a normal lies beyond z: Gaver and Kafadar, The American
    Statistician 38, 1984.
    """
    g = (freedom - 1.5) / (freedom - 1.0) ** 2
    return math.sqrt(freedom * math.expm1(deviations * deviations * g))


def _relative_variance(sums: DifferenceSums, total: float, squares: float, crossed: float) -> float:
    """Variance of one response's part in the mean m = total / n: var(x - m n) / (m mean n)^2,
    averaged with the prior's.
    """
    variance, free = 0.0, max(0.0, sums.responses - 1)
    if free and total > 0:
        mean = total / sums.n
        variance = (squares - 2 * mean * crossed + mean * mean * sums.n_squared) / (
            total / sums.responses
        ) ** 2
    return (max(0.0, variance) + _PRIOR_RESPONSES * _PRIOR_VARIANCE) / (free + _PRIOR_RESPONSES)

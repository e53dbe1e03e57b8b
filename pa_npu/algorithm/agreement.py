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
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal, get_args

import torch

from pa_npu.algorithm.agreement_sums import STRAY, STRAY_SHARE, DifferenceSums, stray_evidence

Check = Literal["mean", "square", "slope", "strays", "drawn"]
CHECKS: tuple[Check, ...] = get_args(Check)
"""Those of AgreementLimits, and `drawn` (drawn_tokens.py)."""
# Of the trained tokens all four are judged; of a probe, which is too small for mean z^2, three.
TESTS_OF_TRAINED, TESTS_OF_PROBE = 4, 3
# A policy may sharpen by so much per version, as a lower temperature does, beside what a probe of
# few tokens shows of it.
SHARPENING = 0.02
# Tokens of the same age may have this times the slope and the strays that those of a probe have, of
# which a policy may have moved more by chance.
_OTHER_TOKENS = 2.0
# Share of strays that no drift exceeds.
_MAX_DRIFT = 0.95
# Few responses may look alike by chance: their variance is averaged with that of exponential noise,
# which counts as so many.
_PRIOR_RESPONSES, _PRIOR_VARIANCE = 2.0, 1.0
# A sample of a skewed quantity mostly lacks the rare large values that make its variance: a square
# is skewed itself.
_SQUARE_VARIANCE_FACTOR = 4.0
# Log-probs are fp32 numbers around 1 on both sides, whatever the models' type.
_LEAST_ROUNDING = 2.0**-24
# A slope that rounding in fp32 makes over n tokens is below this / sqrt(n), also where a sharp
# policy's log-probs hardly vary,
_SLOPE_ROUNDING = 2.0**-10
# or below this: fp32 rounding of a scalar product of 2^14 terms. Where all logits depend on one, as
# on the final norm's, it is a slope of all tokens alike.
_LEAST_SLOPE = 2.0**-17


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

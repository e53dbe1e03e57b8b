"""How far engine and trainer log-probs may differ: invariant I5 as statistical tests against the trainer's own rounding.

Both compute the same log-probs of the same tokens by other kernels, so they differ by rounding. How much rounding can do is
measured without an engine: the trainer's log-probs in its own type against its log-probs in a wider one (bf16 against fp32, fp32
against fp64), same weights, same tokens. No fault of an engine moves this yardstick. Two honest sets of kernels differ by 1.0 to
1.5 of it (docs/results/agreement.md); publish.noise_margin says by how many at most.

With t the trainer's and e the engine's log-prob of a sampled token and d = t - e, four numbers of an iteration are judged:

    mean |d|      moves linearly with a fault, and shows it where it is larger than the rounding
    K3 = e^d-1-d  moves with the fault's square, so that few tokens that are far off show; it estimates KL(engine || trainer)
    slope         of d against t within responses: rounding has no sign and averages out of it, while another temperature T is a
                  slope of about 1 - 1/T, and so is a factor on all weights, long before mean |d| shows them
    strays        tokens more than STRAY nats off, in each response: many where the log-probs are those of other tokens

Limits of mean |d| and K3. The mean over R responses is one of positive, skewed, independent terms. It is taken as log-normal with
the right mean and variance (Fenton-Wilkinson), whose tail is heavier than the normal's and the gamma's. With the yardstick from R0
responses of L0 tokens, the ratio of the two means has the relative variance

    v = c^2 (max(1, L0 / L) / R + 1 / R0)        c^2: that of one response's part, which the yardstick shows

and with s^2 = log(1 + v) it exceeds exp(z s - s^2 / 2) with the chance of a normal above z. z is chosen for false_stop_rate per
iteration, divided by the tests that an iteration has. K3 leaves out the response that differs most: a fault is in all of them.

Limit of the slope. Its standard error follows from how it varies between responses, and has Student's tails. Allowed is what the
slope that is judged can be by chance and, beside it, the margin times the yardstick's own slope with its standard error, and at
least what fp32 rounds. The standard error does not show that rounding where one response has nearly all of the spread of t, as
in a probe of a sharp policy; nor does the yardstick show a slope between two sets of kernels, which no number of tokens averages
out.

Of tokens whose policy has moved on, the slope is judged by that of other tokens as old, which agreed when they were new.

Strays need no yardstick. Of tokens that are `age` versions older than the policy at most STRAY_SHARE (1 + age) may be strays; a
response breaks the rule where chance (Chernoff's bound of the binomial) would not give as many at the stated rate, and only if
its log-probs fit their own tokens hardly better than their neighbours, which the drift of a policy does not bring about.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields
from statistics import NormalDist

import torch

# Of the trained tokens: mean |d|, K3, slope, strays; of a probe, which is too small for K3, three.
TESTS_OF_TRAINED, TESTS_OF_PROBE = 4, 3
# Nats: a ratio of 1.65, far beyond the clip range of any loss.
STRAY = 0.5
STRAY_SHARE = 0.05
# A policy may sharpen by so much per version, as a lower temperature does, beside what a probe of few tokens shows of it.
SHARPENING = 0.02
# Tokens of the same age may have this times the slope that those of a probe have, of which a policy may have moved more by chance.
_OTHER_TOKENS = 2.0
# Strays count where at least as many tokens are far from their own log-prob as this share of those that are far from a neighbour's.
_FITS_OTHERS = 0.7
# Few responses may look alike by chance: their variance is averaged with that of exponential noise, which counts as so many.
_PRIOR_RESPONSES, _PRIOR_VARIANCE = 2.0, 1.0
# A sample of a skewed quantity mostly lacks the rare large values that make its variance: K3, a square, is skewed itself.
_K3_VARIANCE_FACTOR = 4.0
# exp(d) - 1 - d by its series below this, where the difference of nearly equal numbers is only rounding.
_SERIES_BELOW = 0.02
# Log-probs are fp32 numbers around 1 on both sides, whatever the models' type.
_LEAST_ROUNDING = 2.0**-24
# A slope that rounding in fp32 makes over n tokens is below this / sqrt(n), also where a sharp policy's log-probs hardly vary,
_SLOPE_ROUNDING = 2.0**-10
# or below this: fp32 rounding of a scalar product of 2^14 terms. Where all logits depend on one, as on the final norm's, it is a
# slope of all tokens alike.
_LEAST_SLOPE = 2.0**-17


def k3_of(difference: torch.Tensor) -> torch.Tensor:
    """exp(d) - 1 - d, accurate for small d too, where the formula's own rounding in fp32 (1e-7) would hide d^2 / 2."""
    series = 0.5 * difference.square() * (1 + difference / 3 + difference.square() / 12)
    return torch.where(difference.abs() < _SERIES_BELOW, series, torch.expm1(difference) - difference)


@dataclass(frozen=True)
class DifferenceSums:
    """Sums over responses, of which each has n tokens and, summed over them:

        a  |d|      k  K3      p  (d - mean)(t - mean)      q  (t - mean)^2
        own         strays                     others   tokens more than STRAY from a neighbour's log-prob
        expected    strays that its tokens' ages allow

    The last three are maxima: over responses of k, and of the evidence, in nats, that one has more strays than allowed; over tokens
    of |d|.
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
    p: float = 0.0
    pp: float = 0.0
    q: float = 0.0
    qq: float = 0.0
    pq: float = 0.0
    own: float = 0.0
    others: float = 0.0
    expected: float = 0.0
    k_largest: float = 0.0
    strays: float = 0.0
    largest: float = 0.0

    def __add__(self, other: DifferenceSums) -> DifferenceSums:
        pairs = list(zip(astuple(self), astuple(other), strict=True))
        return DifferenceSums(*[x + y for x, y in pairs[:NUM_SUMS]], *[max(pair) for pair in pairs[NUM_SUMS:]])

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

    @property
    def slope(self) -> float:
        """The slope of d against t, within responses."""
        return self.p / self.q if self.q else 0.0

    @property
    def slope_deviation(self) -> float:
        """Standard error of the slope, from how it varies between responses."""
        if self.responses < _FEWEST_FOR_SLOPE or not self.q:
            return math.inf
        residual = max(0.0, self.pp - 2 * self.slope * self.pq + self.slope**2 * self.qq)
        return math.sqrt(residual * self.responses / (self.responses - 1)) / self.q

    def slope_error(self, z: float) -> float:
        """How far the slope may be from its mean over many samples, with the chance of a normal beyond z."""
        return self.slope_deviation and self.slope_deviation * _student(z, max(2.0, self.responses - 1))


NUM_MAXIMA = 3
NUM_SUMS = len(fields(DifferenceSums)) - NUM_MAXIMA
_FEWEST_FOR_SLOPE = 4


def difference_sums(
    logprobs: torch.Tensor,
    engine_logprobs: torch.Tensor,
    response_index: torch.Tensor,
    num_responses: int,
    ages: torch.Tensor | None = None,
) -> torch.Tensor:
    """The fields of DifferenceSums for one microbatch in their order, fp32; the last NUM_MAXIMA are maxima, no sums.

    logprobs, engine_logprobs: [tokens] fp32, ordered by response. response_index: int64 [tokens]. ages: [tokens], 0 where None.
    """
    difference = logprobs - engine_logprobs

    def summed(values: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(num_responses, dtype=torch.float32, device=values.device)
        return zeros.index_add(0, response_index, values.float())

    n = summed(torch.ones_like(difference))
    count = n.clamp(min=1.0)
    centred = [value - (summed(value) / count)[response_index] for value in (difference, logprobs)]
    a, k = summed(difference.abs()), summed(k3_of(difference))
    p, q = summed(centred[0] * centred[1]), summed(centred[1].square())
    own, expected = (difference.abs() > STRAY).float(), torch.full_like(difference, STRAY_SHARE)
    if ages is not None:
        expected = (expected * (1 + ages)).clamp(max=0.5)
    others = torch.zeros_like(own)
    together = response_index[1:] == response_index[:-1]
    others[:-1] += 0.5 * (together & ((logprobs[:-1] - engine_logprobs[1:]).abs() > STRAY))
    others[1:] += 0.5 * (together & ((logprobs[1:] - engine_logprobs[:-1]).abs() > STRAY))
    counts = [summed(value) for value in (own, others, expected)]
    columns = [(n > 0).float(), n, n * n, a, a * a, a * n, k, k * k, k * n, p, p * p, q, q * q, p * q, *counts]
    maxima = [k.max(), stray_evidence(n, *counts).max(), difference.abs().max()]
    return torch.stack([*(column.sum() for column in columns), *maxima])


def added(sums: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Two of `difference_sums` as one, as DifferenceSums adds."""
    return torch.cat([sums[:NUM_SUMS] + other[:NUM_SUMS], torch.maximum(sums[NUM_SUMS:], other[NUM_SUMS:])])


def stray_evidence(n: torch.Tensor, own: torch.Tensor, others: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Nats by which chance is against as many strays: -log of Chernoff's bound; 0 where they are allowed. Of any shape."""
    found, allowed = own / n.clamp(min=1.0), expected / n.clamp(min=1.0)
    divergence = torch.xlogy(found, found / allowed) + torch.xlogy(1 - found, (1 - found) / (1 - allowed))
    counts = (found > allowed) & (own >= _FITS_OTHERS * others)
    return torch.where(counts, n * divergence, torch.zeros_like(n))


@dataclass(frozen=True)
class Limits:
    """Beyond these engine and trainer do not agree; infinite where something is not judged. strays: nats of evidence."""

    absolute: float = math.inf
    k3: float = math.inf
    slope: float = math.inf
    strays: float = math.inf

    def broken(self, sums: DifferenceSums) -> str | None:
        """Says which value is beyond its limit, or not a number; None if none is."""
        for name, value, limit in (
            ("mean |difference|", sums.absolute_mean, self.absolute),
            ("K3", sums.k3_trimmed, self.k3),
            ("|slope| against the log-prob (another temperature, or scaled weights)", abs(sums.slope), self.slope),
        ):
            if not value <= limit:
                return f"{name} = {value:.3g}, more than {limit:.3g}"
        if max(sums.strays, _pooled_evidence(sums)) > self.strays:
            return (
                f"{sums.own:.0f} tokens more than {STRAY:g} nats off, {sums.expected:.0f} allowed, in all or in one response more "
                f"than chance gives: as log-probs have that belong to other tokens (shifted, swapped or not set)"
            )
        return None


def limits(
    yardstick: DifferenceSums, sums: DifferenceSums, margin: float, false_stop_rate: float, probes: int = 1
) -> Limits:
    """The limits for as many responses and tokens as `sums` has (see the module's docstring). probes: of an iteration."""
    z = _z(false_stop_rate, probes)
    shorter = max(1.0, _length(yardstick) / _length(sums))
    share = shorter / max(1.0, sums.responses) + 1.0 / max(1.0, yardstick.responses)

    def quantile(relative_variance: float) -> float:
        squared = math.log1p(relative_variance * share)
        return math.exp(z * math.sqrt(squared) - 0.5 * squared)

    y = yardstick
    absolute = max(y.absolute_mean, _LEAST_ROUNDING) * quantile(_relative_variance(y, y.a, y.aa, y.an))
    k3 = max(y.k3_mean, 0.5 * _LEAST_ROUNDING**2) * quantile(
        _K3_VARIANCE_FACTOR * _relative_variance(y, y.k, y.kk, y.kn)
    )
    rounding = max(_LEAST_SLOPE, _SLOPE_ROUNDING / math.sqrt(max(1.0, sums.n)))
    return Limits(
        margin * absolute,
        margin**2 * k3,
        max(margin * (abs(y.slope) + y.slope_deviation), rounding) + sums.slope_error(z),
        _evidence(sums, false_stop_rate, probes),
    )


def aged_limits(
    reference: DifferenceSums | None, sums: DifferenceSums, margin: float, false_stop_rate: float, probes: int = 1
) -> Limits:
    """For tokens whose policy has moved on since: strays, and the slope against that of `reference`.

    reference: tokens at least as old that agreed when they were new, as the policy sees them now; None where there are none.
    """
    slope = math.inf
    if reference is not None:
        ages = sums.expected / (STRAY_SHARE * max(1.0, sums.n))
        slope = _OTHER_TOKENS * abs(reference.slope) + margin * reference.slope_deviation + SHARPENING * ages
        slope += sums.slope_error(_z(false_stop_rate, probes))
    return Limits(slope=slope, strays=_evidence(sums, false_stop_rate, probes))


def _z(false_stop_rate: float, probes: int) -> float:
    return NormalDist().inv_cdf(1.0 - false_stop_rate / (TESTS_OF_TRAINED + TESTS_OF_PROBE * probes))


def _evidence(sums: DifferenceSums, false_stop_rate: float, probes: int) -> float:
    tests = (TESTS_OF_TRAINED + TESTS_OF_PROBE * probes) * (1.0 + sums.responses)
    return math.log(tests / false_stop_rate)


def _pooled_evidence(sums: DifferenceSums) -> float:
    values = (torch.tensor(value, dtype=torch.float64) for value in (sums.n, sums.own, sums.others, sums.expected))
    return float(stray_evidence(*values))


def _length(sums: DifferenceSums) -> float:
    return max(1.0, sums.n) / max(1.0, sums.responses)


def _student(z: float, freedom: float) -> float:
    """Student's t beyond which lies what of a normal lies beyond z: Gaver and Kafadar, The American Statistician 38, 1984."""
    g = (freedom - 1.5) / (freedom - 1.0) ** 2
    return math.sqrt(freedom * math.expm1(z * z * g))


def _relative_variance(sums: DifferenceSums, total: float, squares: float, crossed: float) -> float:
    """Variance of one response's part in the mean m = total / n: var(x - m n) / (m mean n)^2, averaged with the prior's."""
    found, free = 0.0, max(0.0, sums.responses - 1)
    if free and total > 0:
        mean = total / sums.n
        found = (squares - 2 * mean * crossed + mean * mean * sums.nn) / (total / sums.responses) ** 2
    return (max(0.0, found) + _PRIOR_RESPONSES * _PRIOR_VARIANCE) / (free + _PRIOR_RESPONSES)

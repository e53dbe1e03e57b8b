"""Tests whether tokens were drawn from the distribution that their log-probs describe (invariant I5).

An engine may report right log-probs and draw from something else: greedily, at another temperature,
from the most likely tokens alone. Its log-probs then agree with the trainers', and the policy
gradient is one of another policy. What shows it is that a drawn token is as surprising as the
distribution's entropy, in the mean. With t the log-prob of a token and H the entropy of its
distribution, both the trainers',

    S = sum of (t + H)

is a martingale: each term has the mean 0, given all tokens before it, however sharp the policy, at
whatever token a response ends. A sharper sampler makes S grow with every token, a flatter one makes
it fall.

The limit assumes nothing about the terms' tails (Bercu and Touati, Annals of Applied Probability
18, 2008): with Q the sum of the squared terms and V that of their variances,

    P(|S| >= x and Q + V <= y) <= 2 exp(-x^2 / (2 y))

V has a bound of its own. Tokens that are less likely than 1 / n^2 of n tokens add next to nothing,
so that E[t^2] is below H log n^2 + (log n^2)^2 / n. y is not known in advance: the limit holds on
each step of a ladder of values, 1.1 times the one before.

If only some groups of an iteration are looked at, as where those without a gradient are not
computed, they may be chosen by what was drawn. Then the limit holds for every choice of as many
groups, and is the wider by the logarithm of their number.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

from pa_npu.algorithm.agreement_sums import (
    DifferenceSums,
)

_STEP = 1.1
_STEPS = 512  # of the ladder, which reaches from 1 to 1e21
_LEAST = 1.0


@dataclass(frozen=True)
class DrawnTokens:
    """Sums over the tokens that are judged.

    n: tokens. surprise, squares: of t + H and its square. entropy, entropy_squared: of H.
    rounding: of |t - e|, e being the engine's log-prob, which draws from a rounded distribution.
    choices: log of the number of ways to choose the groups.
    """

    n: float = 0.0
    surprise: float = 0.0
    squares: float = 0.0
    entropy: float = 0.0
    entropy_squared: float = 0.0
    rounding: float = 0.0
    choices: float = 0.0

    @classmethod
    def from_sums(cls, sums: DifferenceSums, computed: int, groups: int) -> DrawnTokens:
        """computed: how many of an iteration's `groups` the sums are of."""
        log_choices = (
            math.lgamma(groups + 1) - math.lgamma(computed + 1) - math.lgamma(groups - computed + 1)
        )
        share = sums.drawn / max(1.0, sums.n)
        return cls(
            n=sums.drawn,
            surprise=sums.surprise,
            squares=sums.surprise_squared,
            entropy=sums.entropy,
            entropy_squared=sums.entropy_squared,
            rounding=sums.absolute * share,
            choices=log_choices,
        )

    def __add__(self, other: DrawnTokens) -> DrawnTokens:
        return DrawnTokens(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def limit(self, vocabulary: int, false_stop_rate: float) -> float:
        """Returns what |surprise| exceeds with at most this chance. vocabulary: number of tokens."""
        longest = 2.0 * math.log(vocabulary)
        rest = longest**2 / vocabulary
        variances = longest * self.entropy - self.entropy_squared + rest * self.n
        both = max(_LEAST, self.squares + max(0.0, variances))
        nats = math.log(2.0 * _STEPS / false_stop_rate) + self.choices
        return math.sqrt(2.0 * _STEP * both * nats) + self.rounding

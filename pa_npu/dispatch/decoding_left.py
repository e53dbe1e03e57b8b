"""Estimates of what an iteration has still to decode, from the lengths of earlier responses, and how far they were off."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# Relative error of predicted decoding before any was measured, weight of the newest iteration, and
# the largest that is believed.
_FIRST_SPREAD = 0.25
_NEWEST = 0.5
_MAX_SPREAD = 0.9
# Largest factor of decoding beside training that is believed, and the share of it that an iteration
# without a change forgets, so that changes are tried again.
_MAX_SLOWER = 3.0
_FORGOTTEN = 0.02

Floats = npt.NDArray[np.float64]


def expected_rest(
    seen: Floats, ages: Floats, size: int, limit: int
) -> tuple[Floats, npt.NDArray[np.int64], Floats]:
    """Returns (tokens to come of each living sequence, its group, expected tokens of each group).

    A sequence in flight is expected to become as long as earlier ones that were longer than it is.

    Args:
        seen: lengths of earlier responses, rising.
        ages: [groups] tokens that each group's sequences have so far.
        size: sequences of a group.
        limit: tokens of a response, within a turn.
    """
    numbers = np.arange(len(ages))[:, None]
    quantiles = ((0.5 + np.arange(size)) / size + numbers * (0.6180339887 / size)) % 1.0
    drawn = seen[(quantiles * len(seen)).astype(np.int64)]
    alive = drawn > ages[:, None]
    # a group is in flight, so one of its sequences at least is longer than what has ended
    spent = ~alive.any(axis=1)
    first = np.searchsorted(seen, ages, side="right")
    longer = seen[np.minimum((first + len(seen)) // 2, len(seen) - 1)]
    beyond = np.minimum(1.1 * ages + 1.0, np.maximum(ages + 1.0, max(float(limit), seen[-1])))
    drawn[spent, 0] = np.where(first < len(seen), longer, beyond)[spent]
    alive[spent, 0] = True
    groups = np.nonzero(alive)[0]
    tokens = np.maximum(drawn, ages[:, None]).sum(axis=1)
    return drawn[alive] - ages[groups], groups, tokens


class DecodingErrors:
    """Measures how far predictions of decoding were off, in earlier iterations."""

    def __init__(self) -> None:
        self.spread = _FIRST_SPREAD
        """Mean relative error."""
        self.slower = 1.0
        """The seconds of decoding after a change of roles over those that the model expects."""
        self._predictions: list[tuple[float, float, bool]] = []

    def predicted(self, at_s: float, decoded_s: float, *, changes: bool) -> None:
        """Notes a prediction: at this time the last response was `decoded_s` seconds away. changes:
        whether a unit changes its role then.
        """
        self._predictions.append((at_s, decoded_s, changes))

    def decoded(self, at_s: float) -> None:
        """Learns from the last response of an iteration, at this time."""
        predictions, self._predictions = self._predictions, []
        expected = sum(seconds for _, seconds, _ in predictions)
        if expected > 0.0:
            wrong = sum(abs(at_s - then_s - seconds) for then_s, seconds, _ in predictions)
            self.spread += _NEWEST * (min(_MAX_SPREAD, wrong / expected) - self.spread)
        first_change = next((each for each in predictions if each[2]), None)
        if first_change is None:
            self.slower -= _FORGOTTEN * (self.slower - 1.0)
            return
        then_s, seconds, _ = first_change
        if seconds > 0.0:
            slower = self.slower * (1.0 + _NEWEST * ((at_s - then_s) / seconds - 1.0))
            self.slower = min(max(1.0, slower), _MAX_SLOWER)

"""The admission window: how many sequences each engine has in flight, fixed or found while running.

Few sequences in flight let groups finish one after another, so that training starts early; too few leave the engine
underused. Throughput X(c) of c sequences in flight saturates, and what is wanted is the smallest c with
X(c) >= SATURATION * max X, found from the groups of the run itself:

  measure   Every group gives a sample: with m groups in flight on its engine (average over its life), its longest response of L
            tokens took d seconds. By Little's law the engine then yields m * E[tokens] / E[d] tokens/s, and since E[tokens] / E[L]
            does not depend on m, levels are compared by m / t(m) with t = E[d] / E[L], the seconds per token of a sequence.
            Samples are binned by m; t is the weighted median of a bin, made non-decreasing in m.
  climb     From about 16 sequences upwards by factors of 4, as long as a step gains at least MIN_GAIN or the cap is reached.
  hold      The smallest m that reaches SATURATION of the best level seen, t interpolated linearly between levels. New samples
            arrive all the time, at the window's level and, from the tail of each iteration, below; the choice is renewed with them.
  recheck   After 1, 2, 4, then every 8 iterations, some groups run at twice the window, in case engine or lengths have changed.

What is sampled does not depend on the window (seeds, FACTS of the engine): only time does.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np

logger = logging.getLogger(__name__)

SATURATION = 0.95
MIN_GAIN = 1.1
_FIRST_SEQUENCES = 16
_CLIMB = 4
# Samples per bin: enough for a median that one stall cannot move, few enough to follow lengths that grow during training.
_MIN_SAMPLES = 3
_MAX_SAMPLES = 24
_BINS_PER_DOUBLING = 4
# A new choice must differ by this much to be taken, else noise would move the window in every iteration. Moving down is
# the costly mistake, so it needs more evidence and goes half of the way (geometrically).
_HYSTERESIS_UP = 0.1
_HYSTERESIS_DOWN = 0.2
_LONGEST_RECHECK = 8
# Doublings of m over which neighbouring levels count for each other.
_BANDWIDTH = 0.75
_BANDWIDTH_ABOVE = 0.3


@dataclass(frozen=True)
class GroupTiming:
    """What a finished group tells about its engine.

    in_flight: sequences in flight on the engine, averaged over the group's duration_s. longest: tokens of its longest response.
    """

    in_flight: float
    duration_s: float
    longest: int


@dataclass(frozen=True)
class _Sample:
    groups: float
    duration_s: float
    longest: int


@dataclass(frozen=True)
class _Level:
    groups: float
    token_s: float
    num_samples: int


class WindowController(Protocol):
    """Decides the number of sequences in flight per engine."""

    @property
    def sequences(self) -> int:
        """The window now. May change with every observation."""

    def observe(self, timing: GroupTiming) -> None:
        """A group of the current iteration has finished."""

    def end_iteration(self) -> None:
        """All groups of an iteration have finished."""


class FixedWindow:
    """rollout.window = N."""

    def __init__(self, sequences: int) -> None:
        self.sequences = sequences

    def observe(self, timing: GroupTiming) -> None:
        """Nothing to learn."""

    def end_iteration(self) -> None:
        """Nothing to decide."""


class AutoWindow:
    """rollout.window = auto. Counts in groups of `responses_per_prompt` sequences.

    max_sequences: more than this is never useful (the engine's own limit, or all that an iteration has for one engine).
    """

    def __init__(self, responses_per_prompt: int, max_sequences: int) -> None:
        self._group = responses_per_prompt
        self._cap = max(1, max_sequences // responses_per_prompt)
        self._level = min(self._cap, max(1, math.ceil(_FIRST_SEQUENCES / responses_per_prompt)))
        self._climbing = self._level < self._cap
        self._climbed_from: int | None = None
        self._held = self._level
        self._bins: dict[int, deque[_Sample]] = {}
        self._at_level = 0
        self._iterations_held = 0
        self._recheck_after = 1
        if not self._climbing:
            logger.info("window: %d sequences per engine, all there is room for", self.sequences)

    @property
    def sequences(self) -> int:
        return self._level * self._group

    @property
    def settled(self) -> bool:
        """Whether climbing has ended."""
        return not self._climbing

    def observe(self, timing: GroupTiming) -> None:
        groups = max(1.0, timing.in_flight / self._group)
        number = round(math.log2(groups) * _BINS_PER_DOUBLING)
        samples = self._bins.setdefault(number, deque(maxlen=_MAX_SAMPLES))
        samples.append(_Sample(groups, timing.duration_s, max(1, timing.longest)))
        # Groups admitted under an earlier window, and those of an iteration's tail, belong to another level.
        self._at_level += groups > 0.75 * self._level
        if self._at_level < min(max(self._level, _MIN_SAMPLES), 2 * _MIN_SAMPLES):
            return
        if self._climbing:
            self._climb()
        elif self._level != self._held:
            self._choose("rechecked")

    def end_iteration(self) -> None:
        if self._climbing:
            return
        self._choose("held")
        self._iterations_held += 1
        if self._iterations_held >= self._recheck_after and self._held < self._cap:
            self._recheck_after = min(2 * self._recheck_after, _LONGEST_RECHECK)
            self._iterations_held = 0
            self._at_level = 0
            self._level = min(2 * self._held, self._cap)

    def _climb(self) -> None:
        levels = self._levels()
        gain = math.inf
        if self._climbed_from is not None:
            gain = _throughput(levels, self._level) / _throughput(levels, self._climbed_from)
        if self._level == self._cap or gain < MIN_GAIN:
            self._climbing = False
            self._choose("climbed")
            return
        self._climbed_from = self._level
        self._level = min(_CLIMB * self._level, self._cap)
        self._at_level = 0
        logger.info("window: trying %d sequences per engine", self.sequences)

    def _choose(self, reason: str) -> None:
        levels = self._levels()
        candidates = range(1, min(self._cap, math.ceil(levels[-1].groups)) + 1)
        throughput = [_throughput(levels, m) for m in candidates]
        best = max(throughput)
        choice = next(m for m in candidates if throughput[m - 1] >= SATURATION * best)
        if (
            reason == "climbed"
            or choice > (1 + _HYSTERESIS_UP) * self._held
            or choice < (1 - _HYSTERESIS_DOWN) * self._held
        ):
            halfway = reason != "climbed" and choice < self._held
            self._held = math.ceil(math.sqrt(choice * self._held)) if halfway else choice
            measured = ", ".join(
                f"{level.groups * self._group:.0f}: {100 * _throughput(levels, level.groups) / best:.0f}"
                for level in levels
            )
            logger.info(
                "window: %d sequences per engine (%s); percent of best throughput by sequences in flight: %s",
                self._held * self._group,
                reason,
                measured,
            )
        self._level = self._held

    def _levels(self) -> list[_Level]:
        """Every bin with enough samples (every bin if none has), by groups in flight."""
        full = [samples for samples in self._bins.values() if len(samples) >= _MIN_SAMPLES] or list(self._bins.values())
        return sorted(
            (
                _Level(sum(s.groups for s in samples) / len(samples), _token_seconds(samples), len(samples))
                for samples in full
            ),
            key=lambda level: level.groups,
        )


def _token_seconds(samples: deque[_Sample]) -> float:
    """Median of duration / longest, weighted by longest: short responses are mostly overhead and count little."""
    rates = sorted((sample.duration_s / sample.longest, sample.longest) for sample in samples)
    below = np.cumsum([weight for _, weight in rates])
    return max(rates[int(np.searchsorted(below, below[-1] / 2))][0], 1e-9)


def _throughput(levels: list[_Level], groups: float) -> float:
    """Relative throughput of a number of groups in flight, from a local straight line through the levels' token seconds.

    The line is weighted by samples and by closeness on a log scale: t(m) is close to a + b m for every engine, so that
    distant levels add little bias, and near ones take out the noise that a single level has. Outside of the measured
    range t stays what it is at its ends.
    """
    m, t, num_samples = np.array([(level.groups, level.token_s, level.num_samples) for level in levels]).T
    at = min(max(groups, m[0]), m[-1])
    distance = np.log2(m / at) / np.where(m <= at, _BANDWIDTH, _BANDWIDTH_ABOVE)
    weights = num_samples * np.exp(-0.5 * distance**2)
    weights /= weights.sum()
    mean_m, mean_t = weights @ m, weights @ t
    spread = weights @ (m - mean_m) ** 2
    # more in flight never makes a sequence faster
    slope = max(0.0, weights @ ((m - mean_m) * (t - mean_t)) / spread) if spread > 1e-12 else 0.0
    return float(groups / max(mean_t + slope * (at - mean_m), 1e-9))


def make_window(
    window: int | str, responses_per_prompt: int, max_num_seqs: int, sequences_per_engine: int
) -> WindowController:
    """The controller for `rollout.window`. sequences_per_engine: all sequences of an iteration over the engines, rounded up."""
    if window == "auto":
        return AutoWindow(responses_per_prompt, min(max_num_seqs, sequences_per_engine))
    return FixedWindow(int(window))

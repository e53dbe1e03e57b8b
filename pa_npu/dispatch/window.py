"""The admission window: how many sequences each engine has in flight, fixed or found while running.

Few sequences in flight let groups finish one after another, so that training starts early; too few leave the engine
underused. Throughput X(c) of c sequences in flight saturates. What is wanted is the smallest c with which an iteration's
generation takes at most 1 / SATURATION of the shortest time, found from the groups of the run itself:

  measure   Every group gives a sample: with m groups in flight on its engine (average over its life), its longest
            response of L tokens took d seconds, t = d / L per token. By Little's law the engine then yields
            m * E[tokens] / E[d] tokens/s, and since E[tokens] / E[L] does not depend on m, levels are compared by
            X = m / t(m). Samples are binned by m; t(m) is a local line through the bins' weighted medians.
  climb     From about 16 sequences upwards by factors of 4, as long as a step gains at least MIN_GAIN, up to the cap.
  hold      An iteration of M groups runs in k = ceil(M / m) waves, which take (k - 1) t(m) + t(rest) per token. The
            smallest m within SATURATION of the best is held: for many waves that is the smallest with X(m) near its
            maximum, for few it is one that divides M, because a last wave of stragglers costs as much as a full one.
            Samples keep coming, at the window's level and, from each iteration's tail, below; the choice follows them.
  recheck   After 1, 2, 4, then every 8 iterations, some groups run at twice the window, in case the engine or the
            lengths have changed.
  share     M is what an engine gets of an iteration. When engines join or leave, the choice is made anew with what is known
            of t(m), and a recheck follows.

What is sampled does not depend on the window, because every request has a seed of its own: only time does.
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
# Groups of a full window see a little less than it on average, because the first and last of them see it fill and drain.
_EXTRAPOLATION = 1.15


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

    def begin_iteration(self, num_engines: int) -> None:
        """So many engines share the next iteration."""

    def observe(self, timing: GroupTiming) -> None:
        """A group of the current iteration has finished."""

    def end_iteration(self) -> None:
        """All groups of an iteration have finished."""


class FixedWindow:
    """rollout.window = N."""

    def __init__(self, sequences: int) -> None:
        self.sequences = sequences

    def begin_iteration(self, num_engines: int) -> None:
        """It is per engine already."""

    def observe(self, timing: GroupTiming) -> None:
        """Nothing to learn."""

    def end_iteration(self) -> None:
        """Nothing to decide."""


class AutoWindow:
    """rollout.window = auto. Counts in groups of `responses_per_prompt` sequences.

    max_sequences: the engine's own limit. sequences: of an iteration, for all engines, of which there may be more or fewer
    from iteration to iteration.
    """

    def __init__(self, responses_per_prompt: int, max_sequences: int, sequences: int, num_engines: int = 1) -> None:
        self._group = responses_per_prompt
        self._max_groups = max_sequences // responses_per_prompt
        self._groups = sequences // responses_per_prompt
        self._num_engines = num_engines
        self._share_groups()
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

    def begin_iteration(self, num_engines: int) -> None:
        """With another number of engines each has more or fewer waves; what is known of an engine's speed is used further.

        That may be wrong where engines share a machine, so moving down stays half of the way.
        """
        if num_engines == self._num_engines:
            return
        self._num_engines = num_engines
        self._share_groups()
        self._held, self._level = min(self._held, self._cap), min(self._level, self._cap)
        if self._climbing:
            return
        if self._bins:
            self._choose("engines changed")
        self._iterations_held, self._recheck_after = 0, 1

    def _share_groups(self) -> None:
        """What one engine has to do in an iteration, and the most that it can have in flight."""
        self._groups_per_iteration = max(1, math.ceil(self._groups / self._num_engines))
        self._cap = max(1, min(self._max_groups, self._groups_per_iteration))

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
        candidates = range(1, min(self._cap, math.ceil(_EXTRAPOLATION * levels[-1].groups)) + 1)
        times = {groups: self._iteration_time(levels, groups) for groups in candidates}
        shortest = min(times.values())
        choice = next(groups for groups in candidates if times[groups] <= shortest / SATURATION)
        moves_up = choice > (1 + _HYSTERESIS_UP) * self._held
        moves_down = choice < (1 - _HYSTERESIS_DOWN) * self._held
        if reason == "engines changed":  # the waves are others: one group more may save a whole wave
            moves_up, moves_down = choice > self._held, choice < self._held
        if reason == "climbed" or moves_up:
            self._held = choice
        elif moves_down:
            # half of the way on a log scale, then the smallest window with as many waves
            waves = self._waves(math.ceil(math.sqrt(choice * self._held)))
            self._held = math.ceil(self._groups_per_iteration / waves)
        if reason == "climbed" or moves_up or moves_down:
            logger.info(
                "window: %d sequences per engine (%s), %d waves; percent of the best generation time by window: %s",
                self._held * self._group,
                reason,
                self._waves(self._held),
                ", ".join(
                    f"{groups * self._group}: {100 * times[groups] / shortest:.0f}"
                    for groups in sorted({min(candidates[-1], max(1, round(level.groups))) for level in levels})
                ),
            )
        self._level = self._held

    def _waves(self, groups: int) -> int:
        return math.ceil(self._groups_per_iteration / groups)

    def _iteration_time(self, levels: list[_Level], groups: int) -> float:
        """Seconds per token of the longest responses, summed over an iteration's waves of `groups` groups."""
        full_waves = self._waves(groups) - 1
        rest = self._groups_per_iteration - full_waves * groups
        return full_waves * _token_seconds_at(levels, groups) + _token_seconds_at(levels, rest)

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
    """Relative throughput of a number of groups in flight."""
    return groups / _token_seconds_at(levels, groups)


def _token_seconds_at(levels: list[_Level], groups: float) -> float:
    """t(m) at m = groups, from a local straight line through the levels.

    The line is weighted by samples and by closeness on a log scale: t(m) is close to a + b m for every engine, so that
    distant levels add little bias, and near ones take out the noise that a single level has. Below the lowest level t
    stays what it is there; above the highest the line is followed for a little way.
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
    beyond = min(max(groups, at), _EXTRAPOLATION * m[-1])
    return float(max(mean_t + slope * (beyond - mean_m), 1e-9))


def make_window(
    window: int | str, responses_per_prompt: int, max_num_seqs: int, sequences: int, num_engines: int = 1
) -> WindowController:
    """The controller for `rollout.window`. sequences: of an iteration, for all engines."""
    if window == "auto":
        return AutoWindow(responses_per_prompt, max_num_seqs, sequences, num_engines)
    return FixedWindow(int(window))

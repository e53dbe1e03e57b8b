"""Learns how fast engines are, from the groups of a run.

A group whose longest response has L tokens, on an engine that meanwhile decodes n sequences and
computes P tokens of prompts, takes  L (a + b n) + p P  seconds. n is the mean over the group's
decode steps. It is reconstructed once an iteration is complete: a response of l tokens ended l / L
of the group's steps after the group began, and a step takes longer the more sequences live (some
rounds with the a and b found so far). Then a, b, p >= 0 follow by least squares on relative errors,
with exponential forgetting.

Each engine's seconds differ from the common ones by a factor, which is learned too. Before an
engine has generated, its factor follows from its expected speed, or is 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pa_npu.planning.iteration_model.subjects import EngineSpeed, GroupTiming

Array = npt.NDArray[np.float64]

# The share of earlier iterations' weight that is kept with each new one: the last three count for
# seven eighths.
_KEEP = 0.5
# The weight of the previous estimate against all that was seen. It decides only what the groups
# leave open, for instance where all of them had equally many sequences beside them.
_PRIOR = 1e-3
# Seconds per token of a prompt over those that a sequence adds to a decode step.
_USUAL_PROMPT = 0.25
_PROMPT_RATIOS = tuple(_USUAL_PROMPT * 2.0**power for power in (-3, -2, -1, 0, 1, 2, 3))
# The penalty of a factor of 2 from the usual ratio: as much as a mean error of 1%.
_PROMPT_PULL = 1e-4
# A decode step costs at least as much as so many sequences in it; engines have 10 to 400. Groups
# that disturbed each other can look as if a step cost nothing, which would make an engine with one
# group in flight as fast as a full one.
_MIN_STEP = 4.0
# The expected speed of an engine weighs as much as so many of its groups.
_EXPECTED_GROUPS = 0.5
_ROUNDS = 3
# A residual counts at most as so many times the median one: a stall says nothing about the engine.
_OUTLIER = 4.0
_MAX_FACTOR = 20.0


class EngineFit:
    """The speeds of the engines of a run.

    max_num_seqs: sequences that decode together; groups that waited in an engine's queue are not
    used.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._pooled: Array | None = None  # a, b, p
        self._expected: dict[str, float] = {}
        self._factors: dict[str, float] = {}
        # by engine: X'X [3, 3], X'y [3], weight of relative rows
        self._sums: dict[str, tuple[Array, Array, float]] = {}

    @property
    def pooled(self) -> EngineSpeed | None:
        """The speed of a usual engine; None before anything was seen."""
        return None if self._pooled is None else EngineSpeed(*map(float, self._pooled))

    def expect(self, speeds: Mapping[str, float]) -> None:
        """Sets the expected speeds of some engines, relative to the engines that are not named."""
        self._expected = {name: 1.0 / speed for name, speed in speeds.items()}

    def _factor(self, engine: str) -> float:
        """Returns the factor of an engine's seconds over the common ones."""
        return self._factors.get(engine, self._expected.get(engine, 1.0))

    def speed(self, engine: str) -> EngineSpeed:
        """Returns the speed of an engine. Before it has generated, that is the common speed with
        the expected factor.

        Raises ValueError before anything was seen.
        """
        if self._pooled is None:
            raise ValueError("no iteration was observed yet")
        a, b, p = self._pooled * self._factor(engine)
        return EngineSpeed(step_s=float(a), sequence_s=float(b), prompt_token_s=float(p))

    def observe(self, timings: Sequence[GroupTiming]) -> None:
        """Learns from all groups of an iteration."""
        by_engine: dict[str, list[GroupTiming]] = {}
        for timing in timings:
            if timing.end_s > timing.start_s and max(timing.lengths, default=0) > 0:
                by_engine.setdefault(timing.engine, []).append(timing)
        if not by_engine:
            return
        if not any(self._rows(name, groups)[1].any() for name, groups in by_engine.items()):
            return  # all groups waited in the engines' queues
        before = {
            name: (_KEEP * gram, _KEEP * moment, _KEEP * weight)
            for name, (gram, moment, weight) in self._sums.items()
        }
        estimate = self._pooled
        for _ in range(_ROUNDS):
            self._sums = dict(before)
            for name, groups in by_engine.items():
                rows, weights = self._rows(name, groups)
                gram, moment, weight = before.get(name, (np.zeros((3, 3)), np.zeros(3), 0.0))
                self._sums[name] = (
                    gram + (rows * weights[:, None]).T @ rows,
                    moment + rows.T @ weights,
                    weight + float(weights.sum()),
                )
            self._solve(estimate)

    def _rows(self, engine: str, groups: list[GroupTiming]) -> tuple[Array, Array]:
        """Returns ([groups, 3] steps, living sequence steps and prompt tokens of each group over
        its duration, [groups] weights).
        """
        step_s = 1.0
        sequence_s = 0.0
        if self._pooled is not None:
            step_s = max(float(self._pooled[0]), 1e-9)
            sequence_s = float(self._pooled[1])
        rows = living_rows(groups, self._max_num_seqs, step_s, sequence_s)
        longest = rows[:, 0]
        durations = np.array([group.end_s - group.start_s for group in groups])
        # Short responses are mostly overhead and count little; a group that waited does not count.
        max_length = max(float(longest.max()), 1.0)
        weights = np.minimum(1.0, longest / max_length * 2) * (longest > 0)
        rows = rows / durations[:, None]
        if self._pooled is not None:
            residual = np.abs(rows @ self._pooled * self._factor(engine) - 1.0)
            limit = _OUTLIER * max(float(np.median(residual)), 0.01)
            weights = weights * np.minimum(1.0, limit / np.maximum(residual, 1e-12))
        return rows, weights

    def _solve(self, before: Array | None) -> None:
        """Solves alternately for the common speed and for each engine's factor."""
        for _ in range(_ROUNDS):
            gram = np.zeros((3, 3))
            moment = np.zeros(3)
            weight = 0.0
            for name, (engine_gram, engine_moment, engine_weight) in self._sums.items():
                factor = self._factor(name)
                gram = gram + factor**2 * engine_gram
                moment = moment + factor * engine_moment
                weight += engine_weight
            self._pooled = _non_negative(gram, moment, weight, before)
            if len(self._sums) == 1:
                self._factors = {name: self._expected.get(name, 1.0) for name in self._sums}
                return
            for name, (engine_gram, engine_moment, engine_weight) in self._sums.items():
                share = float(self._pooled @ engine_gram @ self._pooled)
                correlation = float(self._pooled @ engine_moment)
                factor = self._expected.get(name, 1.0)
                # a weighted mean of logarithms, so that both directions count alike
                if share > 0 and correlation > 0:
                    power = engine_weight / (engine_weight + _EXPECTED_GROUPS)
                    factor *= (correlation / share / factor) ** power
                self._factors[name] = min(max(factor, 1 / _MAX_FACTOR), _MAX_FACTOR)


def living_rows(
    groups: Sequence[GroupTiming], max_num_seqs: int, step_s: float, sequence_s: float
) -> Array:
    """Returns [groups, 3] for the groups of one engine: steps of the longest response, sequences
    decoded together summed over these steps, prompt tokens computed meanwhile. A group that waited
    in the engine's queue has zeros.

    step_s, sequence_s: the engine's speed as known so far, for the duration of its steps.
    """
    starts = np.array([group.start_s for group in groups])
    ends = np.array([group.end_s for group in groups])
    longest = np.array([max(group.lengths) for group in groups], float)
    prompts = np.array([group.prompt_tokens for group in groups], float)
    sizes = np.array([len(group.lengths) for group in groups])
    shares = [np.asarray(group.lengths, float) / max(group.lengths) for group in groups]
    order = np.argsort(starts, kind="stable")
    # sequences that the engine has when a group comes, that group's included
    leased = np.array([sizes[(starts <= at) & (ends > at)].sum() for at in starts])
    queued = leased > max_num_seqs

    joins = np.repeat(starts, sizes)
    # `clock` counts decode steps at `times`; at first all steps are taken to be equally long
    times = np.array([starts.min(), ends.max()])
    clock = np.array([0.0, 1.0])
    for _ in range(2):
        intervals = zip(starts, ends, shares, strict=True)
        leaves = np.concatenate(
            [_at_share(start, end, share, times, clock) for start, end, share in intervals]
        )
        times = np.concatenate([joins, leaves])
        changes = np.concatenate([np.ones(len(joins)), -np.ones(len(leaves))])
        by_time = np.argsort(times, kind="stable")
        times = times[by_time]
        living = np.minimum(np.cumsum(changes[by_time]), max_num_seqs)[:-1]
        steps = np.diff(times) / (step_s + sequence_s * np.maximum(living, 1.0))
        clock = np.concatenate([[0.0], np.cumsum(steps)])

    # mean of the living sequences over the steps of each group
    area = np.concatenate([[0.0], np.cumsum(living * steps)])
    passed = np.interp(ends, times, clock) - np.interp(starts, times, clock)
    living_steps = np.interp(ends, times, area) - np.interp(starts, times, area)
    mean = living_steps / np.maximum(passed, 1e-12)

    # tokens of the prompts that came while a group was in the engine
    sorted_starts = starts[order]
    sums = np.concatenate([[0.0], np.cumsum(prompts[order])])
    first = np.searchsorted(sorted_starts, starts, "left")
    last = np.searchsorted(sorted_starts, ends, "left")
    computed = sums[last] - sums[first]

    rows = np.stack([longest, longest * mean, np.maximum(computed, prompts)], axis=1)
    rows[queued] = 0.0
    return rows


def _at_share(start: float, end: float, shares: Array, times: Array, clock: Array) -> Array:
    """Returns [responses] the times at which these shares of a group's steps had passed."""
    first, last = np.interp([start, end], times, clock)
    return np.interp(first + (last - first) * shares, clock, times)


def _non_negative(gram: Array, moment: Array, weight: float, before: Array | None) -> Array:
    """Returns (a, b, p) >= 0 with the least |X q - y|^2, y = 1; what the rows leave open is as in
    the estimate `before`.

    Without an earlier estimate all is a: then fewer sequences in flight look no faster, and no
    window becomes small without evidence. p is a multiple of b, since the same layers compute a
    token of a prompt and one of a response; the multiple that fits best is taken, or _USUAL_PROMPT
    where all fit alike, which they do where groups begin together. a is at least _MIN_STEP times b.
    """
    best = np.zeros(3)
    min_loss = np.inf
    direction = np.array([1.0, 0.0])
    if before is not None:
        direction = np.array([max(0.0, before[0] - _MIN_STEP * before[1]), before[1]])
    for ratio in _PROMPT_RATIOS:
        # (a - _MIN_STEP b, b) -> (a, b, p)
        folded = np.array([[1.0, _MIN_STEP], [0.0, 1.0], [0.0, ratio]])
        q = folded @ _two_non_negative(folded.T @ gram @ folded, folded.T @ moment, direction)
        error = float(q @ gram @ q - 2 * moment @ q) / weight
        loss = error + _PROMPT_PULL * np.log2(ratio / _USUAL_PROMPT) ** 2
        if loss < min_loss:
            best = q
            min_loss = loss
    return best


def _two_non_negative(gram: Array, moment: Array, direction: Array) -> Array:
    """Returns [2] the q >= 0 with the least q'Gq - 2m'q, with a weak pull to `direction`, which is
    first rescaled to fit.
    """
    share = float(direction @ gram @ direction)
    prior = direction
    if share > 0:
        prior = direction * (float(direction @ moment) / share)
    root = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    matrix = gram / np.outer(root, root) + _PRIOR * np.eye(2)
    vector = moment / root + _PRIOR * prior * root
    q = np.linalg.solve(matrix, vector)
    if q.min() < 0:
        kept = int(q.argmax())
        q = np.zeros(2)
        q[kept] = vector[kept] / matrix[kept, kept]
    return q / root

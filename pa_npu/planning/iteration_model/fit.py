"""How fast engines and trainers are, learned from the groups of a run.

A group whose longest response has L tokens, on an engine that meanwhile had n sequences decode and
P tokens of prompts to
compute, takes  L (a + b n) + p P  seconds. n is the mean over the group's decode steps, which is reconstructed once an iteration is
complete: a response of l tokens ended l / L of the group's steps after the group began, and a step
takes longer the more sequences live (some rounds with the a and b found so far). Then a, b, p >= 0
by least squares on relative errors, forgetting exponentially.

Engines differ by a factor of speed each, which is learned too; before anything was seen it is what
is expected of the engine, or 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pa_npu.planning.iteration_model.subjects import EngineSpeed, GroupTiming

Array = npt.NDArray[np.float64]

# Of earlier iterations, per iteration: the last three count for seven eighths.
_KEEP = 0.5
# What the estimate before weighs against all that was seen: it decides only what that leaves open
# (all groups had as many sequences beside them, say).
_PRIOR = 1e-3
# Seconds per token of a prompt over those that a sequence adds to a decode step.
_USUAL_PROMPT = 0.25
_PROMPT_RATIOS = tuple(_USUAL_PROMPT * 2.0**power for power in (-3, -2, -1, 0, 1, 2, 3))
# What a factor of 2 from the usual ratio costs: a mean error of 1%.
_PROMPT_PULL = 1e-4
# A decode step costs at least as much as so many sequences in it: engines have 10 to 400. Groups
# that disturbed each other can look as if it cost nothing, and then an engine with one group in
# flight as fast as a full one.
_LEAST_STEP = 4.0
# Groups that what is expected of an engine, usually that it is as fast as the others, weighs
# against its own.
_EXPECTED_GROUPS = 0.5
_ROUNDS = 3
# Residuals beyond so many times their median do not count more than that: a stall says nothing
# about the engine.
_OUTLIER = 4.0
_LARGEST_FACTOR = 20.0


class EngineFit:
    """Speeds of the engines of a run. max_num_seqs: sequences that decode together; what waited in
    an engine is no sample.
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
        """How fast engines are thought to be beside those that are not named."""
        self._expected = {name: 1.0 / speed for name, speed in speeds.items()}

    def _factor(self, engine: str) -> float:
        """Factor of an engine's seconds over those that all have in common."""
        return self._factors.get(engine, self._expected.get(engine, 1.0))

    def speed(self, engine: str) -> EngineSpeed:
        """Speed of an engine, or, where it has not generated yet, what follows from the others' and
        what is expected of it.

        Raises ValueError before anything was seen.
        """
        if self._pooled is None:
            raise ValueError("no iteration was observed yet")
        a, b, p = self._pooled * self._factor(engine)
        return EngineSpeed(float(a), float(b), float(p))

    def observe(self, timings: Sequence[GroupTiming]) -> None:
        """All groups of an iteration."""
        by_engine: dict[str, list[GroupTiming]] = {}
        for timing in timings:
            if timing.end_s > timing.start_s and max(timing.lengths, default=0) > 0:
                by_engine.setdefault(timing.engine, []).append(timing)
        if not by_engine:
            return
        if not any(self._rows(name, groups)[1].any() for name, groups in by_engine.items()):
            return  # all waited in the engines' own queues
        before = {
            name: (_KEEP * gram, _KEEP * moment, _KEEP * w)
            for name, (gram, moment, w) in self._sums.items()
        }
        estimate = self._pooled
        for _ in range(_ROUNDS):
            self._sums = dict(before)
            for name, groups in by_engine.items():
                rows, weights = self._rows(name, groups)
                gram, moment, weight = before.get(name, (np.zeros((3, 3)), np.zeros(3), 0.0))
                gram = gram + (rows * weights[:, None]).T @ rows
                self._sums[name] = gram, moment + rows.T @ weights, weight + float(weights.sum())
            self._solve(estimate)

    def _rows(self, engine: str, groups: list[GroupTiming]) -> tuple[Array, Array]:
        """([n, 3] of a group's steps, living sequence steps, and prompt tokens, over its duration;
        [n] weights).
        """
        a, b = (1.0, 0.0) if self._pooled is None else (max(self._pooled[0], 1e-9), self._pooled[1])
        rows = living_rows(groups, self._max_num_seqs, a, b)
        longest = rows[:, 0]
        durations = np.array([group.end_s - group.start_s for group in groups])
        # short responses are mostly overhead and count little
        weights = np.minimum(1.0, longest / max(float(longest.max()), 1.0) * 2) * (longest > 0)
        rows = rows / durations[:, None]
        if self._pooled is not None:
            residual = np.abs(rows @ self._pooled * self._factor(engine) - 1.0)
            limit = _OUTLIER * max(float(np.median(residual)), 0.01)
            weights = weights * np.minimum(1.0, limit / np.maximum(residual, 1e-12))
        return rows, weights

    def _solve(self, before: Array | None) -> None:
        """Alternately the speed that all engines have but for a factor, and each engine's factor."""
        for _ in range(_ROUNDS):
            factors = {name: self._factor(name) for name in self._sums}
            gram = sum(
                (factors[name] ** 2 * gram for name, (gram, _, _) in self._sums.items()),
                np.zeros((3, 3)),
            )
            moment = sum(
                (factors[name] * moment for name, (_, moment, _) in self._sums.items()), np.zeros(3)
            )
            weight = sum(weight for _, _, weight in self._sums.values())
            self._pooled = _non_negative(gram, moment, weight, before)
            if len(self._sums) == 1:
                self._factors = {name: self._expected.get(name, 1.0) for name in self._sums}
                return
            for name, (gram_of, moment_of, groups) in self._sums.items():
                share, found = (
                    float(self._pooled @ gram_of @ self._pooled),
                    float(self._pooled @ moment_of),
                )
                expected = self._expected.get(name, 1.0)
                # a weighted mean of logarithms, so that both directions count alike
                if share > 0 and found > 0:
                    expected *= (found / share / expected) ** (groups / (groups + _EXPECTED_GROUPS))
                self._factors[name] = min(max(expected, 1 / _LARGEST_FACTOR), _LARGEST_FACTOR)


def living_rows(
    groups: Sequence[GroupTiming], max_num_seqs: int, step_s: float, sequence_s: float
) -> Array:
    """[n, 3] for the groups of one engine: steps of the longest response, sequences decoded
    together summed over these steps, prompt tokens computed meanwhile. A group that waited in the
    engine's queue has zeros.

    step_s, sequence_s: what is known of the engine's speed, for the length of its steps in time.
    """
    starts = np.array([group.start_s for group in groups])
    ends = np.array([group.end_s for group in groups])
    longest = np.array([max(group.lengths) for group in groups], float)
    prompts = np.array([group.prompt_tokens for group in groups], float)
    sizes = np.array([len(group.lengths) for group in groups])
    shares = [
        np.asarray(group.lengths, float) / most for group, most in zip(groups, longest, strict=True)
    ]
    # leased before the group came, itself included
    order = np.argsort(starts, kind="stable")
    leased = np.array([sizes[(starts <= at) & (ends > at)].sum() for at in starts])
    queued = leased > max_num_seqs

    joins = np.repeat(starts, sizes)
    # every step as long as the others, at first
    times, clock = np.array([starts.min(), ends.max()]), np.array([0.0, 1.0])
    for _ in range(2):
        spans = zip(starts, ends, shares, strict=True)
        leaves = np.concatenate(
            [_at_share(start, end, share, times, clock) for start, end, share in spans]
        )
        times = np.concatenate([joins, leaves])
        changes = np.concatenate([np.ones(len(joins)), -np.ones(len(leaves))])
        by_time = np.argsort(times, kind="stable")
        times = times[by_time]
        living = np.minimum(np.cumsum(changes[by_time]), max_num_seqs)[:-1]
        # of each piece, in steps
        lengths = np.diff(times) / (step_s + sequence_s * np.maximum(living, 1.0))
        clock = np.concatenate([[0.0], np.cumsum(lengths)])
    area = np.concatenate([[0.0], np.cumsum(living * lengths)])
    passed = np.interp(ends, times, clock) - np.interp(starts, times, clock)
    mean = (np.interp(ends, times, area) - np.interp(starts, times, area)) / np.maximum(
        passed, 1e-12
    )
    sorted_starts, sums = starts[order], np.concatenate([[0.0], np.cumsum(prompts[order])])
    computed = (
        sums[np.searchsorted(sorted_starts, ends, "left")]
        - sums[np.searchsorted(sorted_starts, starts, "left")]
    )
    rows = np.stack([longest, longest * mean, np.maximum(computed, prompts)], axis=1)
    rows[queued] = 0.0
    return rows


def _at_share(start: float, end: float, shares: Array, times: Array, clock: Array) -> Array:
    """When so much of the steps of a group had passed."""
    first, last = np.interp([start, end], times, clock)
    return np.interp(first + (last - first) * shares, clock, times)


def _non_negative(gram: Array, moment: Array, weight: float, before: Array | None) -> Array:
    """(a, b, p) >= 0 with the least |X q - y|^2, y = 1; what the rows leave open is as the estimate
    before has it.

    Without one all is a: then fewer sequences in flight look no faster, and no window is made small
    without evidence. p is a multiple of b, since the same layers compute a token of a prompt and
    one of a response; the multiple that fits best is taken, _USUAL_PROMPT where they fit alike,
    which they do where groups begin together. a is at least _LEAST_STEP times b.
    """
    best, least = np.zeros(3), np.inf
    for ratio in _PROMPT_RATIOS:
        # (a - _LEAST_STEP b, b) -> (a, b, p)
        folded = np.array([[1.0, _LEAST_STEP], [0.0, 1.0], [0.0, ratio]])
        direction = np.array([1.0, 0.0])
        if before is not None:
            direction = np.array([max(0.0, before[0] - _LEAST_STEP * before[1]), before[1]])
        q = folded @ _two_non_negative(folded.T @ gram @ folded, folded.T @ moment, direction)
        value = (
            float(q @ gram @ q - 2 * moment @ q) / weight
            + _PROMPT_PULL * np.log2(ratio / _USUAL_PROMPT) ** 2
        )
        if value < least:
            best, least = q, value
    return best


def _two_non_negative(gram: Array, moment: Array, direction: Array) -> Array:
    """argmin of q'Gq - 2m'q over q >= 0 [2], with a weak pull to `direction`, rescaled to fit."""
    share = float(direction @ gram @ direction)
    prior = direction * (float(direction @ moment) / share if share > 0 else 1.0)
    root = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    matrix = gram / np.outer(root, root) + _PRIOR * np.eye(2)
    vector = moment / root + _PRIOR * prior * root
    q = np.linalg.solve(matrix, vector)
    if q.min() < 0:
        kept = int(q.argmax())
        q = np.zeros(2)
        q[kept] = vector[kept] / matrix[kept, kept]
    return q / root

"""How long the responses to a prompt will be, learned from the run's own groups.

A group holds its room on an engine until its longest response ends, so groups are ordered by that (order.py). Engines are told the
mean length: what a group will put on them.

An estimate is a baseline for all prompts times a ratio of the prompt's own:

  baseline   least squares over the prompt's length, forgetting exponentially, so that it follows lengths that grow in training
  ratio      exponential mean over the prompt's earlier groups of what was seen over the baseline of that time, from 1

Estimates steer when and where a group is generated, never what: seeds, and with order=prompt slots, follow from its index. So
they are not part of a checkpoint; a resumed run learns them again.
"""

from __future__ import annotations

from collections.abc import Sequence

from pa_npu.data.prompts import Prompt

Pair = tuple[float, float]
"""Lengths of a group: (mean of its responses, the longest), in tokens or as ratios. numpy takes several times as long for two."""

# Groups that the baseline remembers, about: some iterations of usual size.
_MEMORY = 1000
# A line through fewer groups than this is noise.
_MIN_FOR_SLOPE = 16
# The ratio of a prompt that was not seen.
_NO_RATIO = (1.0, 1.0)
# Of the newest group in a prompt's ratio. One group of 8 has most of the information, and the policy moves between epochs.
_NEWEST = 0.5


class ResponseLengths:
    """Running estimates in tokens. max_tokens: the length limit, and what is assumed before anything was seen."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._count, self._weight = 0, 0.0
        # exponentially forgotten sums: x and x^2 of prompt lengths, y and x y of the pairs
        self._x, self._xx = 0.0, 0.0
        self._y, self._xy = (0.0, 0.0), (0.0, 0.0)
        self._ratios: dict[int, Pair] = {}
        self._expected: dict[tuple[int, int], Pair] = {}  # by prompt and its length, until more is seen

    @property
    def num_observed(self) -> int:
        """Groups seen so far."""
        return self._count

    def mean(self, prompt: Prompt) -> float:
        """Expected tokens of a response."""
        return self._expect(prompt)[0]

    def longest(self, prompt: Prompt) -> float:
        """Expected tokens of the longest response of a group."""
        return self._expect(prompt)[1]

    def observe(self, groups: Sequence[tuple[Prompt, Sequence[int]]]) -> None:
        """Response lengths of an iteration's groups.

        All at once: those that finish first are short, and a baseline of them alone would make all others look long.
        """
        self._expected.clear()
        keep = 1.0 - 1.0 / _MEMORY
        pairs = [(sum(lengths) / len(lengths), float(max(lengths))) for _, lengths in groups]
        for (prompt, _), (mean, longest) in zip(groups, pairs, strict=True):
            x = float(len(prompt.tokens))
            self._count += 1
            self._weight = keep * self._weight + 1.0
            self._x, self._xx = keep * self._x + x, keep * self._xx + x * x
            self._y = keep * self._y[0] + mean, keep * self._y[1] + longest
            self._xy = keep * self._xy[0] + x * mean, keep * self._xy[1] + x * longest
        for (prompt, _), (mean, longest) in zip(groups, pairs, strict=True):
            base, ratio = self._baseline(prompt), self._ratios.get(prompt.prompt_id, _NO_RATIO)
            self._ratios[prompt.prompt_id] = (
                ratio[0] + _NEWEST * (mean / base[0] - ratio[0]),
                ratio[1] + _NEWEST * (longest / base[1] - ratio[1]),
            )

    def _expect(self, prompt: Prompt) -> Pair:
        key = prompt.prompt_id, len(prompt.tokens)
        known = self._expected.get(key)
        if known is None:
            base, ratio = self._baseline(prompt), self._ratios.get(prompt.prompt_id, _NO_RATIO)
            known = self._expected[key] = self._possible(base[0] * ratio[0]), self._possible(base[1] * ratio[1])
        return known

    def _possible(self, length: float) -> float:
        return min(max(length, 1.0), float(self._max_tokens))

    def _baseline(self, prompt: Prompt) -> Pair:
        if not self._count:
            return float(self._max_tokens), float(self._max_tokens)
        weight, mean_x = self._weight, self._x / self._weight
        spread = self._xx / weight - mean_x**2
        if self._count < _MIN_FOR_SLOPE or spread < 1.0:
            return self._y[0] / weight, self._y[1] / weight

        def on_line(y: float, xy: float) -> float:
            mean_y = y / weight
            slope = (xy / weight - mean_x * mean_y) / spread
            # prompts far from the others' lengths are not extrapolated to nothing, nor beyond the limit
            return min(max(mean_y + slope * (len(prompt.tokens) - mean_x), 0.25 * mean_y), 4.0 * mean_y)

        return on_line(self._y[0], self._xy[0]), on_line(self._y[1], self._xy[1])

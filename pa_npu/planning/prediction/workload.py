"""Prompt and response lengths for predictions: those that a run has seen, or assumed ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from pa_npu.config.schema import Config
from pa_npu.errors import DataError
from pa_npu.telemetry.records import read_records

Origin = Literal["measured", "calibrated", "estimated"]
"""Where a figure comes from. measured: from a given run. calibrated: follows from that run's
measurements, by the model of an iteration. estimated: published or assumed figures are in it.
"""
# Assumed lengths: the spread of their logarithm, by prompt and by response, and the mean as a share
# of the limit. Reasoning models are trained with limits of some three times what they usually need.
_PROMPT_SIGMA = 0.6
_RESPONSE_SIGMA = 0.4
_RESPONSE_MEAN = 0.3
_PROMPT_MEAN = 0.4
# The same for short answers, which leave less room below their limit.
_SHORT_LIMIT = 64  # tokens
_SHORT_SIGMA = 0.1
_SHORT_MEAN = 0.8
_ASSUMED_GROUPS = 512
_DRAWS = 24
_RECENT = 5  # iterations of a run whose share of groups with equal rewards is taken


@dataclass(frozen=True)
class Shape:
    """A group's prompt and the lengths of its responses, in tokens.

    computed: prompt and lengths as trainers compute them, where they differ (GroupTiming.computed).
    by_rule: whether its gradient is 0 by rule, so that trainers do not compute it.
    """

    prompt: int
    lengths: tuple[int, ...]
    computed: tuple[int, tuple[int, ...]] | None = None
    by_rule: bool = False

    def train_s(self, seconds: Callable[[int, Sequence[int]], float]) -> float:
        """Returns the seconds of training it, which `seconds` returns for prompt and lengths."""
        return 0.0 if self.by_rule else seconds(*self.trained)

    @property
    def trained(self) -> tuple[int, tuple[int, ...]]:
        """Prompt and lengths as trainers compute them."""
        return self.computed or (self.prompt, self.lengths)

    @property
    def tokens(self) -> int:
        """Returns the tokens as TPSPD counts them: the prompt once per response."""
        return len(self.lengths) * self.prompt + sum(self.lengths)


def mean_context(shapes: Sequence[Shape]) -> float:
    """Returns the mean, over all tokens that are decoded, of the tokens before them."""
    tokens = 0
    context = 0.0
    for shape in shapes:
        for length in shape.lengths:
            tokens += length
            context += length * (shape.prompt + 0.5 * length)
    return context / tokens


@dataclass(frozen=True)
class Workload:
    """The lengths of groups that were seen or assumed.

    shapes: in any order.
    response_scale: factor of the responses' lengths, before the limit cuts them.
    by_rule: share of the groups whose gradient is 0 by rule (schedule.skip_zero_advantage).
    """

    shapes: tuple[Shape, ...]
    origin: Origin
    response_scale: float = 1.0
    by_rule: float = 0.0

    @property
    def prompt_mean(self) -> float:
        return float(np.mean([shape.prompt for shape in self.shapes]))

    def response_means(self, config: Config) -> tuple[float, float]:
        """Returns the mean of an iteration's responses and that of its groups' longest, with the
        limit of `config`.
        """
        limit = config.rollout.max_response_tokens
        all_lengths: list[float] = []
        longest: list[float] = []
        for shape in self.shapes:
            lengths = [min(limit, max(1.0, self.response_scale * n)) for n in shape.lengths]
            all_lengths += lengths
            longest.append(max(lengths))
        return float(np.mean(all_lengths)), float(np.mean(longest))

    def draw(self, config: Config, seed: int, groups: int | None = None) -> list[Shape]:
        """Returns a typical iteration of `config`: among some draws the one whose means are nearest
        to those of all shapes.

        groups: how many to draw; None for as many as an iteration has.
        """
        groups = groups or config.schedule.prompts_per_iteration
        rng = np.random.default_rng([29, seed])
        table = np.array(
            [(shape.prompt, sum(shape.lengths), max(shape.lengths)) for shape in self.shapes], float
        )
        usual = table.mean(axis=0)
        permuted = -(-groups // len(self.shapes))
        draws = []
        for _ in range(_DRAWS):
            permutations = [rng.permutation(len(self.shapes)) for _ in range(permuted)]
            draws.append(np.concatenate(permutations)[:groups])

        def distance(order: npt.NDArray[np.int64]) -> float:
            return float(np.abs(table[order].mean(axis=0) / usual - 1.0).sum())

        nearest = min(draws, key=distance)
        drawn = [self._resized(self.shapes[int(index)], config, rng) for index in nearest]
        # the share's groups, evenly over the iteration
        return [
            replace(shape, by_rule=int((place + 1) * self.by_rule) > int(place * self.by_rule))
            for place, shape in enumerate(drawn)
        ]

    def _resized(self, shape: Shape, config: Config, rng: np.random.Generator) -> Shape:
        """Returns `shape` with the number of responses and the limits of `config`."""
        responses = config.rollout.responses_per_prompt
        limit = config.rollout.max_response_tokens
        lengths = list(shape.lengths)
        computed = shape.computed
        if computed is not None:  # a session keeps its number of branches
            prompt, after_prompt = computed
            computed = (prompt, tuple(round(self.response_scale * n) for n in after_prompt))
        elif len(lengths) != responses:
            lengths = [lengths[int(n)] for n in rng.integers(len(lengths), size=responses)]
        lengths = [min(limit, max(1, round(self.response_scale * n))) for n in lengths]
        return Shape(min(shape.prompt, config.data.max_prompt_tokens), tuple(lengths), computed)


def recorded_share(run_dir: Path | str) -> float | None:
    """Returns the share of groups with equal rewards in the last iterations that a run recorded;
    None without such records.
    """
    try:
        records = read_records(run_dir)[-_RECENT:]
    except DataError:
        return None
    shares = [record["equal_reward_ratio"] for record in records if "equal_reward_ratio" in record]
    return float(np.mean(shares)) if shares else None


def assumed_workload(config: Config) -> Workload:
    """Returns heavy-tailed lengths about a share of the limits."""
    limit = config.rollout.max_response_tokens
    share = _RESPONSE_MEAN
    if config.rollout.ignore_eos:
        share = 1.0
    elif limit <= _SHORT_LIMIT:
        share = _SHORT_MEAN
    prompt = max(1.0, _PROMPT_MEAN * config.data.max_prompt_tokens)
    return Workload(drawn_shapes(config, prompt, max(1.0, share * limit)), "estimated")


def drawn_shapes(config: Config, prompt: float, mean: float) -> tuple[Shape, ...]:
    """Draws groups about a mean length of prompts and of responses, with the assumed spread."""
    rng = np.random.default_rng(31)
    responses = config.rollout.responses_per_prompt
    limit = config.rollout.max_response_tokens
    prompt_sigma = _PROMPT_SIGMA
    response_sigma = _RESPONSE_SIGMA
    if config.rollout.ignore_eos:
        prompt_sigma = response_sigma = 0.0
    elif limit <= _SHORT_LIMIT:
        prompt_sigma = response_sigma = _SHORT_SIGMA
    median = mean * np.exp(-0.5 * (prompt_sigma**2 + response_sigma**2))
    shapes = []
    for _ in range(_ASSUMED_GROUPS):
        by_prompt = prompt_sigma * rng.standard_normal()
        by_response = response_sigma * rng.standard_normal(responses)
        drawn = median * np.exp(by_prompt + by_response)
        lengths = np.clip(np.round(drawn), 1, limit).astype(int)
        shapes.append(Shape(max(1, round(prompt)), tuple(int(length) for length in lengths)))
    return tuple(shapes)

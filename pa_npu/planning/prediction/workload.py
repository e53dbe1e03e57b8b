"""Prompts and response lengths like those that a run has seen, or as they are assumed where there was none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pa_npu.config.schema import Config

# measured: of the run that was given. calibrated: follows from what was measured there, by the
# model of an iteration.
# estimated: published or assumed figures are in it.
Origin = Literal["measured", "calibrated", "estimated"]
# Spread of a logarithm of lengths, by prompt and by response, and means over the limits, where
# nothing was seen: reasoning models are trained with limits of some three times what they usually
# need. Short answers leave less room.
_PROMPT_SIGMA, _RESPONSE_SIGMA, _MEAN_OF_LIMIT, _PROMPT_OF_LIMIT = 0.6, 0.4, 0.3, 0.4
_SHORT_LIMIT, _SHORT_SIGMA, _SHORT_MEAN = 64, 0.1, 0.8
_ASSUMED_GROUPS = 512
_DRAWS = 24


@dataclass(frozen=True)
class Shape:
    """A group's prompt and the lengths of its responses, in tokens. computed: GroupTiming's."""

    prompt: int
    lengths: tuple[int, ...]
    computed: tuple[int, tuple[int, ...]] | None = None

    @property
    def trained(self) -> tuple[int, tuple[int, ...]]:
        """Prompt and lengths as trainers compute them."""
        return self.computed or (self.prompt, self.lengths)

    @property
    def tokens(self) -> int:
        """As TPSPD counts them: the prompt once per response."""
        return len(self.lengths) * self.prompt + sum(self.lengths)


def mean_context(shapes: Sequence[Shape]) -> float:
    """Tokens before the one that a sequence decodes, a mean over all that are decoded."""
    tokens = sum(sum(shape.lengths) for shape in shapes)
    return (
        sum(length * (shape.prompt + 0.5 * length) for shape in shapes for length in shape.lengths)
        / tokens
    )


@dataclass(frozen=True)
class Workload:
    """shapes: of groups that were seen, in any order. response_scale: by which their lengths are
    multiplied before they are cut.
    """

    shapes: tuple[Shape, ...]
    origin: Origin
    response_scale: float = 1.0

    @property
    def prompt_mean(self) -> float:
        return float(np.mean([shape.prompt for shape in self.shapes]))

    def response_means(self, config: Config) -> tuple[float, float]:
        """Means of an iteration's responses and of its groups' longest, as far as the limit lets
        them.
        """
        scale, limit = self.response_scale, config.rollout.max_response_tokens
        groups = [
            [min(limit, max(1.0, scale * length)) for length in shape.lengths]
            for shape in self.shapes
        ]
        return float(np.mean([n for group in groups for n in group])), float(
            np.mean([max(group) for group in groups])
        )

    def draw(self, config: Config, seed: int, groups: int | None = None) -> list[Shape]:
        """As many groups as an iteration of config has, of its size, that are typical: of some
        draws the one whose means are nearest to those of all groups that were seen."""
        groups = groups or config.schedule.prompts_per_iteration
        rng = np.random.default_rng([29, seed])
        table = np.array(
            [(shape.prompt, sum(shape.lengths), max(shape.lengths)) for shape in self.shapes], float
        )
        usual = table.mean(axis=0)
        permuted = -(-groups // len(self.shapes))
        draws = [
            np.concatenate([rng.permutation(len(self.shapes)) for _ in range(permuted)])[:groups]
            for _ in range(_DRAWS)
        ]
        nearest = min(
            draws, key=lambda order: float(np.abs(table[order].mean(axis=0) / usual - 1.0).sum())
        )
        return [self._of_size(self.shapes[int(index)], config, rng) for index in nearest]

    def _of_size(self, shape: Shape, config: Config, rng: np.random.Generator) -> Shape:
        responses, limit = config.rollout.responses_per_prompt, config.rollout.max_response_tokens
        seen = list(shape.lengths)
        if shape.computed is None and len(seen) != responses:
            seen = [seen[int(n)] for n in rng.integers(len(seen), size=responses)]
        lengths = [min(limit, max(1, round(self.response_scale * length))) for length in seen]
        computed = shape.computed
        if computed is not None:  # sessions, which have as many branches as they were seen to have
            computed = (
                computed[0],
                tuple(round(self.response_scale * behind) for behind in computed[1]),
            )
        return Shape(min(shape.prompt, config.data.max_prompt_tokens), tuple(lengths), computed)


def assumed_workload(config: Config) -> Workload:
    """Heavy-tailed about a share of the limits."""
    prompt = max(1.0, _PROMPT_OF_LIMIT * config.data.max_prompt_tokens)
    limit = config.rollout.max_response_tokens
    share = (
        1.0
        if config.rollout.ignore_eos
        else _SHORT_MEAN
        if limit <= _SHORT_LIMIT
        else _MEAN_OF_LIMIT
    )
    mean = max(1.0, share * limit)
    return Workload(drawn_shapes(config, prompt, mean), "estimated")


def drawn_shapes(config: Config, prompt: float, mean: float) -> tuple[Shape, ...]:
    """Draw groups about a mean length of prompts and responses, with the spread that is assumed
    where none was seen.
    """
    rng = np.random.default_rng(31)
    responses, limit = config.rollout.responses_per_prompt, config.rollout.max_response_tokens
    of_prompt, of_response = (
        (_SHORT_SIGMA, _SHORT_SIGMA) if limit <= _SHORT_LIMIT else (_PROMPT_SIGMA, _RESPONSE_SIGMA)
    )
    if config.rollout.ignore_eos:
        of_prompt = of_response = 0.0
    median = mean * np.exp(-0.5 * (of_prompt**2 + of_response**2))
    shapes = []
    for _ in range(_ASSUMED_GROUPS):
        drawn = median * np.exp(
            of_prompt * rng.standard_normal() + of_response * rng.standard_normal(responses)
        )
        lengths = np.clip(np.round(drawn), 1, limit).astype(int)
        shapes.append(Shape(max(1, round(prompt)), tuple(int(length) for length in lengths)))
    return tuple(shapes)

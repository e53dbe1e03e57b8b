"""AdamW a second time, in numpy and fp64, and how far rounding may take a step from it.

    g' = g c                               c = min(1, clip_grad / (norm + 1e-6))
    m' = b1 m + (1 - b1) g'                v' = b2 v + (1 - b2) g'^2
    w' = w (1 - rate decay) - rate / (1 - b1^t) m' / (sqrt(v' / (1 - b2^t)) + epsilon)

Decoupled weight decay: Loshchilov and Hutter, arXiv 1711.05101, algorithm 2. Nothing here is shared
with what steps the weights, the schedule of the rate neither, so that a mistake in one shows as a
difference.

Limits follow from fp32 arithmetic alone: each operation is off by half a unit in the last place,
coefficients are rounded once, and a fused kernel may hold 1 - b^t in fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pa_npu.config.schema import Config

Values = npt.NDArray[np.float64]

_UNIT = 2.0**-23
"""Of fp32: the spacing of numbers at 1."""
_SMALLEST = 1e-37
"""Of fp32's normal numbers, times ten: a device may take smaller ones for 0."""


@dataclass(frozen=True, eq=False)
class Elements:
    """Elements of what an optimizer steps, fp64 [n] each: weights, mean and square moment."""

    weights: Values
    mean: Values
    square: Values


@dataclass(frozen=True, eq=False)
class Stepped:
    """Values that a step should have given to elements, and limits of how far rounding takes it
    from them.
    """

    expected: Elements
    limit: Elements


def scheduled_rate(config: Config, update: int) -> float:
    """Returns the learning rate of an update, from 1."""
    options = config.optimizer
    iterations = config.schedule.iterations
    begin = config.schedule.updates(options.warmup_of(iterations))
    end = max(config.schedule.updates(iterations), begin + 1)
    if update <= begin:
        return options.learning_rate * (update / begin)
    if options.decay == "constant":
        return options.learning_rate
    left = 1.0 - min(1.0, (update - begin) / (end - begin))
    if options.decay == "cosine":
        left = math.sin(0.5 * math.pi * left) ** 2
    return options.min_learning_rate + left * (options.learning_rate - options.min_learning_rate)


def clip_factor(config: Config, norm: float) -> float:
    """c, of a gradient with this norm."""
    largest = config.optimizer.clip_grad
    return min(1.0, largest / (norm + 1e-6)) if largest else 1.0


def step(
    before: Elements,
    gradient: Values,
    decay: Values,
    steps: Values,
    *,
    config: Config,
    rate: float,
    clip: float,
) -> Stepped:
    """Replays a step of elements. gradient: not yet clipped; NaN where none came, which leaves an
    element as it is.

    decay: weight decay of each. steps: how many steps each has had with this one. clip: the factor
    c.
    """
    options = config.optimizer
    (first, second), epsilon = options.betas, options.epsilon
    arrived = np.isfinite(gradient)
    steps = np.maximum(steps, 1.0)  # one to which nothing has ever come has had none
    clipped = np.where(arrived, gradient, 0.0) * clip
    size = np.abs(clipped)
    mean = first * before.mean + (1.0 - first) * clipped
    square = second * before.square + (1.0 - second) * clipped**2
    shrunk_mean, shrunk_square = 1.0 - first**steps, 1.0 - second**steps
    root = np.sqrt(square / shrunk_square)
    scale = root + epsilon
    change = rate / shrunk_mean * mean / scale
    weights = before.weights * (1.0 - rate * decay) - change

    mean_limit = 8 * _UNIT * (np.abs(before.mean) + size) + _SMALLEST
    square_limit = 16 * _UNIT * (square + clipped**2) + _SMALLEST
    # of the square root: its slope where the square is far from 0, else the root of all of it
    root_limit = np.minimum(
        square_limit / np.maximum(root, 1e-300), np.sqrt(square_limit)
    ) / np.sqrt(shrunk_square)
    of_fractions = _UNIT * (8 + 2 * first**steps / shrunk_mean + second**steps / shrunk_square)
    scale_limit = root_limit + of_fractions * scale
    change_limit = (
        rate / shrunk_mean * (mean_limit / scale + np.abs(mean) / scale * (scale_limit / scale))
    )
    weight_limit = (
        4 * _UNIT * (np.abs(before.weights) + np.abs(change))
        + change_limit
        + of_fractions * np.abs(change)
    )
    none = np.zeros_like(mean)
    return Stepped(
        Elements(
            np.where(arrived, weights, before.weights),
            np.where(arrived, mean, before.mean),
            np.where(arrived, square, before.square),
        ),
        Elements(
            np.where(arrived, weight_limit, none),
            np.where(arrived, mean_limit, none),
            np.where(arrived, square_limit, none),
        ),
    )

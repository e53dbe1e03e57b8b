"""A virtual-time engine for the admission window: decode steps of a set length, groups admitted while the window has room."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from pa_npu.dispatch.window import GroupTiming, WindowController

STRIDE = 4
"""Tokens per simulated step."""


@dataclass
class _Group:
    lengths: list[int]
    start_s: float
    in_flight_integral: float
    decoded: int = 0


@dataclass(frozen=True)
class SimulatedIteration:
    tokens_per_s: float
    window_at_end: int


def simulate(
    step_s: Callable[[int], float],
    window: WindowController,
    *,
    iterations: int,
    groups: int,
    responses: int = 8,
    tokens: tuple[int, int] = (64, 64),
    noise: float = 0.0,
    seed: int = 0,
) -> list[SimulatedIteration]:
    """Run iterations of `groups` groups on one engine whose step with c running sequences takes step_s(c) seconds.

    tokens: shortest and longest response. noise: standard deviation of the logarithm of a step's time.
    """
    random_numbers = random.Random(seed)
    results = []
    for _ in range(iterations):
        now_s, integral, produced, pending = 0.0, 0.0, 0, groups
        running: list[_Group] = []
        while pending or running:
            while pending and (len(running) + 1) * responses <= max(window.sequences, responses):
                lengths = [random_numbers.randint(*tokens) for _ in range(responses)]
                running.append(_Group(lengths, now_s, integral))
                produced += sum(lengths)
                pending -= 1
            decoding = sum(sum(length > group.decoded for length in group.lengths) for group in running)
            step = STRIDE * step_s(decoding) * random_numbers.lognormvariate(0.0, noise)
            now_s += step
            integral += step * len(running) * responses
            for group in list(running):
                group.decoded += STRIDE
                if group.decoded >= max(group.lengths):
                    running.remove(group)
                    duration_s = now_s - group.start_s
                    in_flight = (integral - group.in_flight_integral) / duration_s
                    window.observe(GroupTiming(in_flight, duration_s, max(group.lengths)))
        results.append(SimulatedIteration(produced / now_s, window.sequences))
        window.end_iteration()
    return results

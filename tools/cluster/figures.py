"""A predicted number with its interval and its origin: measured, calibrated or estimated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pa_npu.planning.prediction.workload import Origin

_ORDER: tuple[Origin, ...] = ("measured", "calibrated", "estimated")


@dataclass(frozen=True)
class Figure:
    """value, within low to high as far as is known."""

    value: float
    low: float
    high: float
    origin: Origin

    def map(self, change: Callable[[float], float]) -> Figure:
        """Returns the figure that follows from this one by a monotonic function."""
        ends = sorted((change(self.low), change(self.high)))
        return Figure(change(self.value), ends[0], ends[1], weakest(self.origin, "calibrated"))


def figure(value: float, relative: float, origin: Origin) -> Figure:
    """value, low at 1 / (1 + relative) of it and high at 1 + relative."""
    return Figure(value, value / (1.0 + relative), value * (1.0 + relative), origin)


def weakest(*origins: Origin) -> Origin:
    """Returns the origin of a number that is made of others."""
    return max(origins, key=_ORDER.index)

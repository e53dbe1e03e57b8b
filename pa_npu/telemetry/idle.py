"""Idle, defined once: of records, of the console's line, and of the viewer's tiles, timeline and advice.

All are shares of an iteration, which lasts from the end of one publish to the end of the next.

trainer   waits for a group, or at the border that ends the iteration for the coordinator and the
          engines. Sending weights is work.
engine    has no request in flight. Loading weights is idle; an evaluation is work.
device    of a run whose engines and trainers share devices: its trainer waits while its engine
          decodes nothing.

A number without a name is the mean over all trainers, engines or devices.
"""

from __future__ import annotations


def trainer_idle(wait_s: float, iteration_s: float) -> float:
    """wait_s: for groups and at the border."""
    return min(1.0, max(0.0, wait_s / iteration_s))


def engine_idle(busy_s: float, iteration_s: float) -> float:
    """busy_s: with a request in flight."""
    return min(1.0, max(0.0, 1.0 - busy_s / iteration_s))


def device_idle(wait_s: float, decode_s: float, iteration_s: float) -> float:
    """decode_s: of the wait of its trainer, what its engine decoded in."""
    return trainer_idle(wait_s - decode_s, iteration_s)

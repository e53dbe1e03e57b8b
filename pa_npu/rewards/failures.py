"""Ends a run whose reward functions keep failing: training on their zeros teaches nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from pa_npu.errors import DataError

WINDOW = 64  # groups that the share is taken over
LEAST = 8  # groups that must have been scored before it is judged


class FailingShare:
    """How many of the last groups each function failed for. most: the share of them that is tolerated (1 tolerates all)."""

    def __init__(self, labels: Sequence[str], most: float) -> None:
        self._most = most
        self._failed: dict[str, deque[bool]] = {label: deque(maxlen=WINDOW) for label in labels}

    def note(self, errors: Mapping[str, str]) -> None:
        """One scored group. errors: what went wrong, by the function's label. Raises DataError where it is too often."""
        for label, failed in self._failed.items():
            failed.append(label in errors)
            if label in errors and len(failed) >= LEAST and sum(failed) > self._most * len(failed):
                raise DataError(
                    f"reward.functions: {label} failed for {sum(failed)} of the last {len(failed)} groups, which were trained "
                    f"without it (last: {errors[label]}); correct the function, or raise reward.max_failing_share = "
                    f"{self._most:g}"
                )

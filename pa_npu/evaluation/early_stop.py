"""When a run ends before its last iteration: an evaluation reached the target, or several in a row were no better.

The verdict follows from the evaluations up to a version alone, so a run that goes on from a checkpoint ends where the run that was
not interrupted does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pa_npu.config.sections import EvaluateConfig


class EarlyStop:
    """wishes: stop_at and patience, of which one is set at least. Version 0 is what others are compared with, and ends nothing."""

    def __init__(self, wishes: EvaluateConfig) -> None:
        self._target = wishes.stop_at
        self._patience = wishes.patience
        self._name = wishes.metric or "accuracy"
        self._best: tuple[float, int] | None = None
        self._without = 0  # evaluations since the best one
        self.why: str | None = None

    def observe(self, record: Mapping[str, Any]) -> None:
        """An evaluation's record, in the order of versions. `why` says what ends the run, once something does."""
        version, value = int(record["version"]), float(record["best_by"])
        if self._best is None or value > self._best[0]:
            self._best, self._without = (value, version), 0
        else:
            self._without += 1
        if version == 0 or self.why is not None:
            return
        if self._target is not None and value >= self._target:
            self.why = f"{self._name} is {value:.3f}, evaluate.stop_at = {self._target:g}"
        elif self._patience is not None and self._without >= self._patience:
            best, at = self._best
            self.why = (
                f"{self._name} was not above the {best:.3f} of version {at} in {self._without} evaluations, "
                f"evaluate.patience = {self._patience}"
            )

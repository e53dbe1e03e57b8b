"""Which prompts of a dataset are passed over, because in earlier epochs all their responses were right, or all wrong.

    asked ──all right──> streak + 1 ──skip_after in a row──> passed over for skip_epochs, or for good
          ──all wrong──> streak - 1 ──(the same)
          ──some of both, or unknown──> streak 0

Everything follows from the responses, in the order in which iterations are complete, and never from time. The state is small
enough for every checkpoint: two arrays, compressed.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pa_npu.errors import DataError

_FOR_GOOD = 2**31 - 1
_SHORTEST_EPOCHS = np.dtype("<i4")


@dataclass(frozen=True)
class Outcome:
    """The worth of a prompt's responses. right: the share that is correct; None where a reward function failed.

    reward: their mean.
    """

    prompt_id: int
    source: str
    right: float | None
    reward: float


class Difficulty:
    """The record of which prompts, 0 to num_prompts - 1, are too easy or too hard. skip, after, epochs: data.skip, skip_after,
    skip_epochs."""

    def __init__(
        self, num_prompts: int, skip: Literal["solved", "unsolved", "both"], after: int = 1, epochs: int | None = None
    ) -> None:
        self._skip = skip
        self._after = after
        self._epochs = epochs
        self._streaks = np.zeros(num_prompts, np.int8)  # solved above 0, unsolved below, in so many epochs in a row
        self._until = np.zeros(num_prompts, np.int32)  # passed over in epochs before this one
        self.num_passed = 0  # since the run began

    def passes_over(self, index: int, epoch: int) -> bool:
        """Whether the prompt is left out of this epoch; counted."""
        passed = bool(epoch < self._until[index])
        self.num_passed += passed
        return passed

    def observe(self, index: int, epoch: int, right: float | None) -> None:
        """Record what the prompt's responses were; `epoch` is the one that prompts are taken from now."""
        streak = int(self._streaks[index])
        if right == 1:
            streak = max(streak, 0) + 1
        elif right == 0:
            streak = min(streak, 0) - 1
        else:
            streak = 0
        self._streaks[index] = max(-100, min(streak, 100))
        wanted = {"solved": streak > 0, "unsolved": streak < 0, "both": streak != 0}[self._skip]
        if wanted and abs(streak) >= self._after:
            self._until[index] = _FOR_GOOD if self._epochs is None else min(epoch + 1 + self._epochs, _FOR_GOOD)

    def begin_epoch(self, epoch: int, least: int) -> None:
        """Forgets all where fewer than `least` prompts would be asked in this epoch."""
        if int((self._until <= epoch).sum()) < min(least, len(self._until)):
            self._streaks[:] = 0
            self._until[:] = 0

    def counts(self, epoch: int) -> tuple[int, int]:
        """How many prompts are passed over in this epoch: solved, unsolved."""
        passed = epoch < self._until
        return int((passed & (self._streaks > 0)).sum()), int((passed & (self._streaks < 0)).sum())

    def state(self) -> dict[str, Any]:
        """For a checkpoint, JSON."""
        raw = self._streaks.tobytes() + self._until.astype(_SHORTEST_EPOCHS).tobytes()
        return {"passed": self.num_passed, "prompts": base64.b64encode(zlib.compress(raw)).decode()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises DataError where this is no state of as many prompts."""
        count = len(self._streaks)
        try:
            raw = zlib.decompress(base64.b64decode(state["prompts"], validate=True))
            if len(raw) != 5 * count:
                raise ValueError(f"{len(raw)} bytes for {count} prompts")
            self.num_passed = int(state["passed"])
        except (LookupError, TypeError, ValueError, binascii.Error, zlib.error) as error:
            raise DataError(
                f"data.skip: the checkpoint's record of prompts is damaged ({error}); take an earlier checkpoint"
            ) from None
        self._streaks = np.frombuffer(raw[:count], np.int8).copy()
        self._until = np.frombuffer(raw[count:], _SHORTEST_EPOCHS).astype(np.int32)

"""Which prompts of a dataset are passed over, because in earlier epochs all their responses were right, or all wrong.

Everything follows from the responses, in the order in which iterations are complete, and never from time. The state is small
enough for every checkpoint: one array, compressed.
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
    """The record of which prompts, 0 to num_prompts - 1, are too easy or too hard. skip: data.skip."""

    def __init__(self, num_prompts: int, skip: Literal["solved", "unsolved", "both"]) -> None:
        self._skip = skip
        self._out = np.zeros(num_prompts, np.int8)  # passed over: 1 as solved, -1 as unsolved
        self.num_passed = 0  # since the run began

    def passes_over(self, index: int) -> bool:
        """Whether the prompt is left out; counted."""
        passed = bool(self._out[index])
        self.num_passed += passed
        return passed

    def observe(self, index: int, right: float | None) -> None:
        """Record what the prompt's responses were."""
        found = 0 if right is None else int(right == 1) - int(right == 0)
        if {"solved": found > 0, "unsolved": found < 0, "both": found != 0}[self._skip]:
            self._out[index] = found

    def begin_epoch(self, least: int) -> None:
        """Forgets all where fewer than `least` prompts would be asked in this epoch."""
        if int((self._out == 0).sum()) < min(least, len(self._out)):
            self._out[:] = 0

    def counts(self) -> tuple[int, int]:
        """How many prompts are passed over: solved, unsolved."""
        return int((self._out > 0).sum()), int((self._out < 0).sum())

    def state(self) -> dict[str, Any]:
        """For a checkpoint, JSON."""
        return {"passed": self.num_passed, "prompts": base64.b64encode(zlib.compress(self._out.tobytes())).decode()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises DataError where this is no state of as many prompts."""
        count = len(self._out)
        try:
            raw = zlib.decompress(base64.b64decode(state["prompts"], validate=True))
            if len(raw) not in (count, 5 * count):  # the longer one, of 0.1, has epochs behind signed streaks
                raise ValueError(f"{len(raw)} bytes for {count} prompts")
            self.num_passed = int(state["passed"])
        except (LookupError, TypeError, ValueError, binascii.Error, zlib.error) as error:
            raise DataError(
                f"data.skip: the checkpoint's record of prompts is damaged ({error}); take an earlier checkpoint"
            ) from None
        self._out = np.sign(np.frombuffer(raw[:count], np.int8))
        if len(raw) > count:
            self._out *= np.frombuffer(raw[count:], "<i4") > 0

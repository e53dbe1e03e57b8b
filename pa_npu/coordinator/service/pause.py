"""Pause: holds back the dispatch of further groups for a time that ends by itself."""

from __future__ import annotations

import asyncio
import time

from pa_npu.errors import UserError


class Pause:
    """longest_s: of one pause; trainers must not give up meanwhile."""

    def __init__(self, longest_s: float) -> None:
        self.longest_s = longest_s
        self._until_s = 0.0
        self._resumed = asyncio.Event()

    @property
    def left_s(self) -> float:
        """Of the pause that is on; 0 without one."""
        return max(0.0, self._until_s - time.monotonic())

    def pause(self, seconds: float) -> None:
        """From now on. Raises UserError."""
        if not 0 < seconds <= self.longest_s:
            raise UserError(
                f"for_s: {seconds:g} must be above 0 and at most {self.longest_s:g}, half of trainer.wait_timeout_s"
            )
        self._until_s = time.monotonic() + seconds
        self._resumed.clear()

    def resume(self) -> None:
        self._until_s = 0.0
        self._resumed.set()

    async def passed(self) -> None:
        """Returns at once without a pause, and else at its end."""
        while (left_s := self.left_s) > 0:
            try:
                await asyncio.wait_for(self._resumed.wait(), left_s)
            except asyncio.TimeoutError:
                return

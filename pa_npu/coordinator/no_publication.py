"""Crossing an iteration border without engines: the trainers say that they hold a version, and its iteration begins.

NoPublication has the calls of BorderCrossing (border.py), for runs whose groups nobody writes.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.coordinator.record import Border
from pa_npu.data.prompts import Prompt
from pa_npu.publish.coordinator_side import EnginesHold
from pa_npu.publish.messages import READY


@dataclass(eq=False, repr=False)
class NoPublication:
    """Takes a run from one weight version to the next. published: the one that is trained now; None
    before the first.
    """

    config: Config
    channel: StoreChannel
    published: int | None = field(default=None, init=False)

    async def cross(self, version: int, prompt: Prompt | None, *, is_first: bool) -> Border:
        """Waits until the trainers hold `version`. Raises DeadlineExceeded."""
        run = self.config.run
        within_s = run.startup_timeout_s if is_first else self.config.wait_timeout_s
        await READY.wait_async(self.channel, within_s, version=version)
        self.published = version
        now_s = time.perf_counter()
        return Border(EnginesHold(None, now_s, now_s, now_s, now_s), use={}, engines=0)

    async def rest(self, version: int) -> Border:
        """Never asked for: `cross` takes all of a border."""
        raise AssertionError(f"the border of version {version} is crossed already")

    def expect(self, version: int, crossed: asyncio.Future[Border]) -> None:
        """Nothing arrives while an iteration is trained."""

    async def close(self) -> None:
        """Nothing is under way."""

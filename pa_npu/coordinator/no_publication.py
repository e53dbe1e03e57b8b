"""The publication of a run without engines: trainers say that they hold a version, and its iteration begins."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from pa_npu.control.channel import StoreChannel
from pa_npu.control.tasks import TaskScope
from pa_npu.coordinator.publication import OnCrossed, Publication, ended
from pa_npu.coordinator.record import BorderOutcome
from pa_npu.data.prompts import Prompt
from pa_npu.publish.engines_hold import EnginesHold
from pa_npu.publish.messages import READY


@dataclass(eq=False, repr=False, kw_only=True)
class NoPublication(Publication):
    """Brings versions to nobody.

    Args:
        first: the version that the run begins with.
        startup_timeout_s: how long trainers may take until they hold the first version.
        wait_timeout_s: the same of every later version.
    """

    channel: StoreChannel
    first: int
    startup_timeout_s: float
    wait_timeout_s: float
    _version: int = field(default=-1, init=False)

    @property
    def version(self) -> int:
        assert self._version >= 0, "no border has been crossed"
        return self._version

    async def cross(
        self, version: int, prompt: Prompt, on_crossed: OnCrossed, scope: TaskScope
    ) -> asyncio.Future[BorderOutcome]:
        """Waits until the trainers hold `version`. Raises DeadlineExceeded."""
        within_s = self.startup_timeout_s if version == self.first else self.wait_timeout_s
        await READY.wait_async(self.channel, within_s, version=version)
        self._version = version
        now_s = time.perf_counter()
        held = EnginesHold(
            probe=None, ready_s=now_s, loaded_s=now_s, compared_s=now_s, done_s=now_s
        )
        return await ended(BorderOutcome(held, use={}, engines=0), on_crossed)

    def expect(self, version: int, crossed: asyncio.Future[BorderOutcome]) -> None:
        """Nothing comes while an iteration is trained."""

    async def close(self) -> None:
        """Nothing is under way."""

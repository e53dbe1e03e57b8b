"""Engines on trainers' devices (rollout.shared_engines): trainers get nothing before these have ended what they began with."""

from __future__ import annotations

from pa_npu.coordinator.variants import Variant
from pa_npu.dispatch.schedule import Schedule
from pa_npu.engines.pool import EnginePool


class SharedEngines(Variant):
    """Holds groups back while an engine and a trainer would compute on one device at the same time."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    async def deliverable(self, schedule: Schedule) -> None:
        """Waits until shared engines are idle, in an iteration whose schedule gives them groups of their own."""
        if schedule.shared:
            await self._pool.shared_idle()

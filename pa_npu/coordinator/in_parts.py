"""Iterations whose responses go on under newer weights (schedule.on_publish=continue): several are produced beside each other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from pa_npu.control.messages import WRITTEN_AHEAD, WrittenAhead
from pa_npu.control.tasks import TaskScope
from pa_npu.coordinator.interruption import Interruptions
from pa_npu.coordinator.iterations_ahead import IterationsAhead
from pa_npu.data.prompts import Prompt
from pa_npu.samples.rollout_buffer import RolloutBuffer


class IterationsInParts(IterationsAhead):
    """Each iteration is begun by one version and goes on under the next ones; a version ends when it has written its parts.

    The other arguments are those of IterationsAhead.
    """

    def __init__(self, interruptions: Interruptions, buffer: RolloutBuffer, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._interruptions = interruptions
        self._buffer = buffer

    def prepare(self, last: int) -> asyncio.Task[None] | None:
        """Nothing: earlier iterations may still be observed."""
        return None

    async def written(self, version: int) -> None:
        """Nothing: what a version has not written the next one does."""

    def published(self, version: int) -> None:
        self._interruptions.publish(version)

    async def end_version(self, version: int) -> None:
        await super().end_version(version)
        await self._interruptions.quiet()
        await self._complete.pop(version).wait()
        self._put_written(version + 1)

    async def produce_due(self, version: int, published: int | None, last: int, scope: TaskScope) -> int:
        self._scope = scope
        return await super().produce_due(version, published, last, scope)

    async def _produce_next(self, prompts: Sequence[Prompt], published: int | None, scope: TaskScope | None) -> None:
        self._interruptions.admits()
        self._start(prompts, self._scope, None)

    def _put_written(self, version: int) -> None:
        """Before `version` is saved: the parts of responses that it goes on with."""
        schedule = self._config.schedule
        if not self._config.saves(version) or version >= schedule.iterations:
            return
        iterations = list(range(version, min(version + self._freshness.max_staleness, schedule.iterations)))
        buffer = self._buffer.written(version)
        for iteration in iterations:
            for group in self._interruptions.so_far(iteration):
                buffer.put(group, 0, group.index)
        WRITTEN_AHEAD.put(self._channel, WrittenAhead(iterations, schedule.prompts_per_iteration), version=version)

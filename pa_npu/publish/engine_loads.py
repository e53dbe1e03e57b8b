"""EngineLoads: asks one engine to load a weight version, and checks its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from pa_npu.engines.protocol import EngineError, LoadedWeights, RolloutEngine, WeightGroups
from pa_npu.publish.while_healthy import while_healthy

T = TypeVar("T")


class EngineLoads:
    """Requests about weights to single engines, all with the same limits.

    Args:
        num_workers: of each engine.
        limit_s: how long an engine may take once the trainers send.
        health_timeout_s: how long an engine may take to answer that it is healthy.
    """

    def __init__(self, *, num_workers: int, limit_s: float, health_timeout_s: float) -> None:
        self._num_workers = num_workers
        self._limit_s = limit_s
        self._health_timeout_s = health_timeout_s

    async def load(
        self,
        engine: RolloutEngine,
        version: int,
        joins: WeightGroups | None,
        begins_within_s: float | None = None,
    ) -> LoadedWeights:
        """Loads `version` into an engine. Raises EngineError or DeadlineExceeded.

        Args:
            engine: that loads.
            version: of the weights.
            joins: the groups that the engine joins first; None if it is in them.
            begins_within_s: how long the trainers may take until they send; None if they are ready.
        """
        if joins is not None:
            await engine.join_weight_groups(joins, deadline_s=self._limit_s)
        deadline_s = self._limit_s + (begins_within_s or 0.0)
        loaded = await engine.load_weights(
            version, deadline_s=deadline_s, begins_within_s=begins_within_s
        )
        return self._checked(engine, loaded, version)

    async def prepare(self, engine: RolloutEngine, version: int) -> LoadedWeights:
        """Receives `version` into an engine's second buffer. Raises as `load` does."""
        received = await engine.prepare_weights(version, deadline_s=self._limit_s)
        return self._checked(engine, received, version)

    async def swap(self, engine: RolloutEngine, version: int) -> LoadedWeights:
        """Makes an engine write by what it has prepared. Raises as `load` does."""
        loaded = await engine.swap_weights(version, deadline_s=self._limit_s)
        return self._checked(engine, loaded, version)

    async def while_healthy(
        self,
        engine: RolloutEngine,
        work: Coroutine[Any, Any, T],
        sending: asyncio.Task[float] | None = None,
    ) -> T:
        """Returns the result of `work`, as long as the engine that does it is healthy.

        Raises EngineError as soon as the engine is not healthy, and DeadlineExceeded if it takes
        longer than the limit.

        sending: for work that was asked for before the trainers send; see while_healthy.
        """
        return await while_healthy(
            engine,
            work,
            health_timeout_s=self._health_timeout_s,
            sending=sending,
            limit_s=self._limit_s,
        )

    def _checked(self, engine: RolloutEngine, loaded: LoadedWeights, version: int) -> LoadedWeights:
        """Returns `loaded`. Raises EngineError if a worker holds another version."""
        if loaded.versions != (version,) * self._num_workers:
            raise EngineError(
                f"engine {engine.name}: workers hold weight versions {list(loaded.versions)} after "
                f"the publish of {version}"
            )
        return loaded

"""From scored groups to the buffer: a number, advantages, a replica and its slot, and what the iteration's record says of it.

Delivery       each group as soon as it is released                        schedule.stream=true
HeldDelivery   all groups when the last one is there, by the same steps    schedule.stream=false
RolesDelivery  each when its replica's devices decode no more (roles.py)   placement.colocate with schedule.stream
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import numpy as np

from pa_npu.algorithm.advantages import batch_advantages, group_advantages
from pa_npu.config.schema import Config
from pa_npu.coordinator.episode import ScoredGroup, check_size
from pa_npu.coordinator.production import Production
from pa_npu.dispatch.assignment import Assignment
from pa_npu.samples.group import Group
from pa_npu.samples.rollout_buffer import RolloutBuffer

GroupCost = Callable[[int, Sequence[int]], float]
"""Cost of training a group, from the length of its prompt and those of its responses; dispatch.work.GroupWork is one."""


class Delivery:
    """One iteration's groups, each as it is released.

    work: what training a group costs. store_thread: for the buffer's blocking calls, in order. told: of every group that is put.
    """

    def __init__(
        self,
        config: Config,
        production: Production,
        assignment: Assignment,
        work: GroupCost,
        buffer: RolloutBuffer,
        store_thread: Executor,
        told: Sequence[Callable[[Group, ScoredGroup], None]],
    ) -> None:
        self._config = config
        self._seed = config.run.seed
        self._kind = config.algorithm.advantage
        self._production = production
        self._assignment = assignment
        self._group_work = work
        self._buffer = buffer
        self._store_thread = store_thread
        self._told = told
        self._held: list[tuple[int, ScoredGroup]] = []

    async def take(self, number: int, scored: ScoredGroup) -> None:
        """A group that is trained under this number."""
        check_size(self._config, scored.prompt, scored.samples)
        self._production.add(number, scored)
        await self._deliver(number, scored)

    async def finish(self, num_groups: int) -> float:
        """All groups have been taken. Asserts that they fill all slots (I2); returns the replicas' imbalance."""
        self._assignment.finish(num_groups)
        return self._assignment.imbalance

    @property
    def numbers(self) -> dict[str, Any]:
        """More of the iteration's numbers for its record."""
        return {}

    async def close(self) -> None:
        """End what runs beside the iteration, which may have failed."""

    async def _deliver(self, number: int, scored: ScoredGroup) -> None:
        await self._deliver_to(number, scored, self._assignment.assign(number, self._work(scored)))

    async def _deliver_to(self, number: int, scored: ScoredGroup, slot: tuple[int, int]) -> None:
        await self._put(number, scored, group_advantages(scored.rewards, self._kind), {slot: None})

    async def _put(
        self,
        number: int,
        scored: ScoredGroup,
        advantages: np.ndarray,
        slots: Mapping[tuple[int, int], tuple[int, int] | None],
    ) -> None:
        """slots: each (replica, slot) that gets it, and which samples that replica trains; None: all."""
        group, loop = (
            scored.group(self._seed, self._production.iteration, number, advantages),
            asyncio.get_running_loop(),
        )
        for slot, part in slots.items():
            sent = group if part is None else replace(group, part=part)
            await loop.run_in_executor(self._store_thread, self._buffer.put, sent, *slot)
        for tell in self._told:
            tell(group, scored)
        self._production.put(group, scored, advantages, {replica: part for (replica, _), part in slots.items()})

    def _work(self, scored: ScoredGroup) -> float:
        return self._group_work(*scored.trained_as)


class HeldDelivery(Delivery):
    """One iteration's groups, all at its end; advantages and replicas may be of the whole batch."""

    async def _deliver(self, number: int, scored: ScoredGroup) -> None:
        self._held.append((number, scored))

    async def finish(self, num_groups: int) -> float:
        rewards = [scored.rewards for _, scored in self._held]
        if self._kind == "batch-std":
            advantages = batch_advantages(rewards)
        else:
            advantages = [group_advantages(values, self._kind) for values in rewards]
        slots = self._assignment.assign_all(
            [number for number, _ in self._held], [self._work(scored) for _, scored in self._held]
        )
        for (number, scored), values, slot in zip(self._held, advantages, slots, strict=True):
            await self._put(number, scored, values, {slot: None})
        return await super().finish(num_groups)

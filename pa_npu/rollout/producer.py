"""The producer: one iteration's dispatch, from prompts to groups in the rollout buffer.

    prompts, in order ──admit──> engine ──completions──> rewards ──> advantages ──> replica, slot ──> buffer
              (window per engine)            (each group on its own, as soon as the one before its arrow is done)

Groups are admitted whole and in order; they finish, and are delivered, in any order. With schedule.stream=false they
are held until the batch is complete, then delivered by the same code. Nothing here waits for trainers, so the producer
cannot stall them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import numpy as np

from pa_npu.algorithm.advantages import batch_advantages, group_advantages
from pa_npu.buffer.rollout_buffer import RolloutBuffer
from pa_npu.config.schema import Config
from pa_npu.data.prompts import Prompt
from pa_npu.rollout.assignment import Assignment
from pa_npu.rollout.pool import EnginePool, Lease
from pa_npu.rollout.production import Production
from pa_npu.rollout.protocol import Sampling
from pa_npu.rollout.scoring import Rewards, ScoredGroup, reward_input
from pa_npu.rollout.seeds import group_seed
from pa_npu.rollout.selection import Selection
from pa_npu.rollout.tasks import TaskScope
from pa_npu.rollout.window import GroupTiming, WindowController
from pa_npu.telemetry.timeline import Timeline, now


class Producer:
    """Produces iterations, one at a time.

    store_thread: a single-threaded executor for the buffer's blocking calls; one thread keeps their order.
    """

    def __init__(
        self,
        config: Config,
        pool: EnginePool,
        rewards: Rewards,
        buffer: RolloutBuffer,
        window: WindowController,
        sampling: Sampling,
        timeline: Timeline,
        store_thread: Executor,
    ) -> None:
        self._config = config
        self._pool = pool
        self._rewards = rewards
        self._buffer = buffer
        self._window = window
        self._sampling = sampling
        self._timeline = timeline
        self._store_thread = store_thread
        # mean response length so far, for the choice of the engine with the fewest in-flight tokens
        self._responses, self._response_tokens = 0, 0

    async def produce(
        self, iteration: int, prompts: Sequence[Prompt], another: Callable[[], Prompt] | None = None
    ) -> Production:
        """All groups of `iteration`, one per prompt, into the buffer. The first failure cancels the rest and is raised.

        another: gives a further prompt; needed with schedule.dynamic_sampling, when groups are replaced.
        """
        config = self._config
        selection = Selection(config)
        assignment = Assignment(config.schedule.order, config.data_parallel, config.groups_per_replica)
        production = Production(iteration, config.telemetry.samples_per_iteration)
        held: list[ScoredGroup] = []
        num_sequences = config.rollout.responses_per_prompt
        self._window.begin_iteration(max(1, len(self._pool.engines)))

        async def complete(index: int, prompt: Prompt, lease: Lease) -> None:
            scored = await self._generate_and_score(iteration, index, prompt, lease)
            production.judge(scored)
            for group in selection.judge(scored):
                production.add(group)
                if config.streams(iteration):
                    await self._deliver(group, self._advantages(group), assignment)
                else:
                    held.append(group)

        async with TaskScope() as scope:
            while (index := await selection.next_index()) is not None:
                prompt = prompts[index] if another is None or index < len(prompts) else another()
                tokens = num_sequences * (len(prompt.tokens) + self._expected_length())
                # every group in flight ends by its own deadline, and an engine that is gone is replaced by its own
                lease = await self._pool.admit(
                    num_sequences, tokens, lambda: self._window.sequences, config.engine_wait_s
                )
                scope.start(complete(index, prompt, lease), f"group {index} of iteration {iteration}")
        for group, advantages in zip(held, self._held_advantages(held), strict=True):
            await self._deliver(group, advantages, assignment)
        assignment.finish()
        production.end(self._window.sequences)
        self._window.end_iteration()
        return production

    async def _generate_and_score(self, iteration: int, index: int, prompt: Prompt, lease: Lease) -> ScoredGroup:
        start_s = now()
        completions, lease = await self._pool.generate(
            lease,
            prompt.tokens,
            group_seed(self._config.run.seed, iteration, index),
            self._sampling,
            lambda: self._window.sequences,
            deadline_s=self._config.rollout.request_timeout_s,
            again_deadline_s=self._config.engine_wait_s,
        )
        tokens = sum(len(completion.tokens) for completion in completions)
        self._timeline.complete(
            f"group {index}", start_s, now(), f"engine {lease.engine.name}", iteration=iteration, tokens=tokens
        )
        self._window.observe(
            GroupTiming(
                lease.in_flight_mean, lease.duration_s, max(len(completion.tokens) for completion in completions)
            )
        )
        self._responses += len(completions)
        self._response_tokens += tokens
        start_s = now()
        result = await self._rewards.score(reward_input(prompt, completions))
        self._timeline.complete(f"reward {index}", start_s, now(), "rewards", iteration=iteration)
        return ScoredGroup(iteration, index, prompt, completions, result)

    def _advantages(self, group: ScoredGroup) -> np.ndarray:
        kind = self._config.algorithm.advantage
        if kind == "batch-std":
            raise ValueError(
                "batch-std advantages need the whole batch; the configuration refuses them with stream=true"
            )
        return group_advantages(np.asarray(group.result.total, np.float32), kind)

    def _held_advantages(self, groups: Sequence[ScoredGroup]) -> list[np.ndarray]:
        if self._config.algorithm.advantage == "batch-std":
            return list(batch_advantages([np.asarray(group.result.total, np.float32) for group in groups]))
        return [self._advantages(group) for group in groups]

    async def _deliver(self, group: ScoredGroup, advantages: np.ndarray, assignment: Assignment) -> None:
        replica, slot = assignment.assign(group.index, group.prompt_length + group.num_response_tokens)
        await asyncio.get_running_loop().run_in_executor(
            self._store_thread, self._buffer.put, group.with_advantages(advantages), replica, slot
        )

    def _expected_length(self) -> int:
        if not self._responses:
            return self._sampling.max_tokens
        return self._response_tokens // self._responses

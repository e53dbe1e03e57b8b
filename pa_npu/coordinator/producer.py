"""The producer: one iteration's dispatch, from prompts to groups in the rollout buffer.

    prompts, by schedule ──admit──> environment on an engine ──samples──> rewards ──> advantages ──> replica, slot ──> buffer
                    (window per engine)            (each group on its own, as soon as the one before its arrow is done)

Groups are admitted whole, each to one engine, in the order, at the times and with the windows of the iteration's schedule, which
the controller chooses at its border (pa_npu/planning/iteration_model); they finish, and are delivered, in any order. What a group
samples follows from its index, so a schedule changes times and, with order=completion, slots, but no sample. With
schedule.stream=false groups are held until the batch is complete, then delivered by the same code. Nothing here waits for
trainers, so the producer cannot stall them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import numpy as np

from pa_npu.algorithm.advantages import batch_advantages, group_advantages
from pa_npu.config.schema import Config
from pa_npu.control.tasks import TaskScope
from pa_npu.coordinator.carried import Carried, Share
from pa_npu.coordinator.episode import Rewards, run_episode, score
from pa_npu.coordinator.interruption import Interruptions
from pa_npu.coordinator.pacing import Pace
from pa_npu.coordinator.production import Produced, Production
from pa_npu.coordinator.service.rollouts import RolloutService
from pa_npu.coordinator.tail import TailMeter
from pa_npu.data.prompts import Prompt
from pa_npu.dispatch.assignment import Assignment
from pa_npu.dispatch.lengths import ResponseLengths
from pa_npu.dispatch.selection import Selection
from pa_npu.engines.pool import EnginePool, Lease
from pa_npu.engines.protocol import Sampling
from pa_npu.environments.protocol import Environment
from pa_npu.planning.iteration_model.cluster import GroupTiming
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.iteration_model.messages import GroupOutlook, IterationOutlook
from pa_npu.rewards.types import RewardResult
from pa_npu.samples.rollout_buffer import RolloutBuffer
from pa_npu.samples.seeds import group_seed
from pa_npu.samples.types import Group, Sample, group_lengths
from pa_npu.telemetry.sample_store import kept_groups
from pa_npu.telemetry.timeline import Timeline, now


class Producer:
    """Produces iterations, one at a time; with `interruptions` the next may begin while responses of one wait for a version.

    work: what training a group costs, from its prompt's and its responses' lengths (GroupWork).
    store_thread: a single-threaded executor for the buffer's blocking calls; one thread keeps their order.
    """

    def __init__(
        self,
        config: Config,
        pool: EnginePool,
        environment: Environment,
        rewards: Rewards,
        buffer: RolloutBuffer,
        controller: ScheduleController,
        sampling: Sampling,
        timeline: Timeline,
        work: Callable[[int, Sequence[int]], float],
        store_thread: Executor,
        interruptions: Interruptions | None = None,
        service: RolloutService | None = None,
    ) -> None:
        self._config = config
        self._pool = pool
        self._environment = environment
        self._rewards = rewards
        self._buffer = buffer
        self._controller = controller
        self._sampling = sampling
        self._timeline = timeline
        self._work = work
        self._store_thread = store_thread
        self._interruptions = interruptions
        self._service = service
        self._lengths = ResponseLengths(sampling.max_tokens)

    async def prepare(self, iteration: int, prompts: Sequence[Prompt]) -> None:
        """Choose the schedule of an iteration ahead of `produce`, in a thread; none may begin or be learned from meanwhile."""
        await asyncio.to_thread(self._controller.prepare, self._outlook(iteration, prompts))

    async def produce(
        self,
        iteration: int,
        prompts: Sequence[Prompt],
        another: Callable[[], Prompt] | None = None,
        share: Share | None = None,
        *,
        version: int | None = None,
        all_dispatched: Callable[[], None] = lambda: None,
    ) -> Produced:
        """All groups of `iteration`, one per prompt, into the buffer. The first failure cancels the rest and is raised.

        another: gives a further prompt; needed with schedule.dynamic_sampling, when groups are replaced. share: with
        schedule.tokens_per_update, what the update takes of carried groups and of these. version: by which engines must write
        them; None: any. all_dispatched: called when engines have, or have had, every group, of which none is replaced.
        """
        config = self._config
        selection = Selection(config, len(prompts))
        assignment = Assignment(
            config.schedule.order,
            config.data_parallel,
            config.groups_per_replica,
            config.schedule.updates_per_iteration,
            self._expected_work(prompts),
        )
        tail = TailMeter(self._pool)
        kept = kept_groups(config.telemetry.samples)
        production = Production(iteration, config.telemetry.samples_per_iteration, kept, interrupts=config.interrupts)
        held: list[tuple[int, int]] = []  # (dispatch index, number) of groups to train, by completion
        scored: dict[int, tuple[Prompt, list[Sample], RewardResult]] = {}
        seen: dict[int, tuple[Prompt, list[int]]] = {}
        num_sequences = config.rollout.responses_per_prompt
        streams = config.streams(iteration)
        replica_work = [0.0] * config.data_parallel
        schedule = self._controller.begin_iteration(self._outlook(iteration, prompts), iteration)
        pace = Pace(schedule, self._pool.num_places(everywhere=schedule.everywhere))

        def work(samples: Sequence[Sample]) -> float:
            return self._work(*group_lengths(samples))

        num_carried = 0 if share is None else len(share.carried)

        async def take(positions: Sequence[int]) -> None:
            """These groups are trained in this update; carried ones come first."""
            for position in positions:
                production.add(position, *scored[position])
                _, samples, result = scored[position]
                slot = config.mesh.slot_of(position)
                replica_work[slot[0]] += work(samples)
                await put(position, position, self._advantages(result), slot)

        async def put(index: int, number: int, advantages: np.ndarray, slot: tuple[int, int]) -> None:
            prompt, samples, result = scored.pop(index)
            identity = {
                "run_seed": config.run.seed,
                "iteration": iteration,
                "index": number,
                "prompt_id": prompt.prompt_id,
            }
            rewards = np.asarray(result.total, np.float32)
            group = Group.of_samples(samples, rewards, advantages, **identity)
            await self._put(group, *slot)
            if self._service is not None:
                self._service.produced(group, prompt, samples)
            production.put(number, samples, replica=slot[0])
            production.keep(number, prompt, samples, result, advantages)

        async def complete(index: int, prompt: Prompt, lease: Lease) -> None:
            lease, samples, result = await self._generate_and_score(
                iteration, index, prompt, lease, tail, pace, version
            )
            scored[num_carried + index] = prompt, samples, result
            seen[index] = prompt, [sample.num_trained for sample in samples]
            production.judge(index, prompt, result)
            trained = result.is_informative or not config.schedule.dynamic_sampling
            judged_s = time.perf_counter()
            ready = selection.judge(index, result.is_informative)
            if schedule.shared:  # they have the trainers' devices until they have ended what they began with
                await self._pool.shared_idle()
            start_s = time.perf_counter()
            if share is not None:
                taken = share.update.complete(num_carried + index, sum(seen[index][1]))
                if streams:
                    await take(taken)
                share.tell_size()
            for released, number in ready if share is None else ():
                production.add(number, *scored[released])
                _, samples, result = scored[released]
                if streams:
                    slot = assignment.assign(number, work(samples))
                    await put(released, number, self._advantages(result), slot)
                else:
                    held.append((released, number))
            if self._interruptions is None:  # else the lease is of a part
                put_s = time.perf_counter() - start_s
                timing = _timing(index, prompt, lease, seen[index][1], judged_s, put_s, trained)
                self._controller.observe(timing, iteration)

        if share is not None:
            for position, group in enumerate(share.carried):
                scored[position] = group.prompt, group.samples, group.result
            await take(share.update.taken())
            share.tell_size()
        async with TaskScope() as scope:
            while (number := await self._next_number(selection, tail)) is not None:
                # replacements come as they are needed, after the prompts that the iteration began with
                index = pace.index(number)
                prompt = prompts[index] if another is None or index < len(prompts) else another()
                tokens = self._expected_tokens(prompt)
                if self._service is not None:
                    await self._service.pause.passed()
                if self._interruptions is None:  # else a turn might wait for a group that waits for the next version
                    await pace.turn()
                # every group in flight ends by its own deadline, and an engine that is gone is replaced by its own
                lease = await self._pool.admit(
                    *(num_sequences, tokens, pace.window, config.engine_wait_s),
                    place=pace.place(),
                    everywhere=schedule.everywhere,
                    version=version,
                )
                if (taken := pace.taken_by(lease.engine.name)) is not None:
                    index, prompt = taken, prompts[taken]
                    lease.expect(self._expected_tokens(prompt))
                pace.dispatched(lease.engine.name)
                tail.dispatched(lease.engine)
                scope.start(self._at_work(complete(index, prompt, lease)), f"group {index} of iteration {iteration}")
                if selection.num_dispatched == len(prompts):
                    all_dispatched()
        if share is not None:
            await take(sorted(scored.keys() - set(share.update.left)))  # nothing where groups were streamed
            share.tell_size()
            imbalance = max(replica_work) * config.data_parallel / sum(replica_work) - 1.0
            self._lengths.observe([seen[index] for index in sorted(seen)])
            carried = [Carried(*scored[position]) for position in share.update.left]
            return replace(production.end(schedule.largest_window, tail.tail_waste, imbalance), carried=carried)
        works = [work(scored[index][1]) for index, _ in held]
        advantages = self._held_advantages([scored[index][2] for index, _ in held])
        slots = assignment.assign_all([number for _, number in held], works)
        for (index, number), values, slot in zip(held, advantages, slots, strict=True):
            await put(index, number, values, slot)
        assignment.finish()
        produced = production.end(schedule.largest_window, tail.tail_waste, assignment.imbalance)
        self._lengths.observe([seen[index] for index in sorted(seen)])
        return produced

    def _at_work(self, group: Coroutine[Any, Any, None]) -> Coroutine[Any, Any, None]:
        """The same, known to have work for the version from now on."""
        return group if self._interruptions is None else self._interruptions.count(group)

    def _outlook(self, iteration: int, prompts: Sequence[Prompt]) -> IterationOutlook:
        groups = [
            GroupOutlook(len(prompt.tokens), self._lengths.longest(prompt), self._lengths.mean(prompt))
            for prompt in prompts
        ]
        uses = self._pool.use()
        names = tuple(engine.name for engine in self._pool.engines)
        shared = tuple(name for name in names if uses[name].shared)
        # trainers that are behind wait for no group: what counts is when the last one is there
        streams = self._config.streams(iteration) and not self._config.iterations_ahead
        windows = {name: own for name in names if (own := uses[name].window) is not None}
        speeds = {name: uses[name].speed for name in names if uses[name].speed != 1.0}
        return IterationOutlook(groups, names, streams, shared, windows, speeds)

    def _expected_tokens(self, prompt: Prompt) -> int:
        """Of a group, prompts and responses."""
        return self._config.rollout.responses_per_prompt * (len(prompt.tokens) + round(self._lengths.mean(prompt)))

    def _expected_work(self, prompts: Sequence[Prompt]) -> float | None:
        """Of training all groups of an iteration; None before any length was seen."""
        if not self._lengths.num_observed:
            return None
        num_sequences = self._config.rollout.responses_per_prompt
        return sum(
            self._work(len(prompt.tokens), [round(self._lengths.mean(prompt))] * num_sequences) for prompt in prompts
        )

    async def _next_number(self, selection: Selection, tail: TailMeter) -> int | None:
        if selection.must_wait:
            tail.nothing_left()
        return await selection.next_index()

    async def _generate_and_score(
        self,
        iteration: int,
        index: int,
        prompt: Prompt,
        lease: Lease,
        tail: TailMeter,
        pace: Pace,
        version: int | None,
    ) -> tuple[Lease, list[Sample], RewardResult]:
        """The lease is the one under which the group ended, closed."""
        start_s = now()
        rollout, seed = self._config.rollout, group_seed(self._config.run.seed, iteration, index)
        with self._pool.session(
            lease,
            pace.window,
            deadline_s=rollout.request_timeout_s,
            again_deadline_s=self._config.engine_wait_s,
            what=f"group {index} of iteration {iteration}",
            version=version,
        ) as session:
            parts = self._interruptions
            generate = None if parts is None else parts.of_group(session, iteration, index, seed, self._sampling)
            samples = await run_episode(
                self._environment, prompt, rollout.responses_per_prompt, session, seed, self._sampling, generate
            )
        tail.received()
        lease = session.lease
        pace.completed(lease.engine.name)
        lengths = [sample.num_trained for sample in samples]
        shape = {
            "tokens": sum(lengths),
            "prompt": len(prompt.tokens),
            "lengths": lengths,
        }  # what a planner fits speeds to
        self._timeline.complete(
            f"group {index}", start_s, now(), f"engine {lease.engine.name}", iteration=iteration, **shape
        )
        start_s = now()
        result = await score(self._rewards, prompt, samples)
        self._timeline.complete(f"reward {index}", start_s, now(), "rewards", iteration=iteration)
        return lease, samples, result

    def _advantages(self, result: RewardResult) -> np.ndarray:
        kind = self._config.algorithm.advantage
        if kind == "batch-std":
            raise ValueError(
                "batch-std advantages need the whole batch; the configuration refuses them with stream=true"
            )
        return group_advantages(np.asarray(result.total, np.float32), kind)

    def _held_advantages(self, results: Sequence[RewardResult]) -> list[np.ndarray]:
        if self._config.algorithm.advantage == "batch-std":
            return list(batch_advantages([np.asarray(result.total, np.float32) for result in results]))
        return [self._advantages(result) for result in results]

    async def _put(self, group: Group, replica: int, slot: int) -> None:
        await asyncio.get_running_loop().run_in_executor(self._store_thread, self._buffer.put, group, replica, slot)


def _timing(
    index: int, prompt: Prompt, lease: Lease, lengths: Sequence[int], judged_s: float, put_s: float, trained: bool
) -> GroupTiming:
    """Of a group whose lease is closed. judged_s: when it had been scored. put_s: seconds that its delivery took after that."""
    end_s = lease.start_s + lease.duration_s
    delivered_s = judged_s - end_s + put_s
    return GroupTiming(
        index, lease.engine.name, lease.start_s, end_s, len(prompt.tokens), tuple(lengths), delivered_s, trained
    )

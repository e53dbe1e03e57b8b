"""The engines' side of a weight publish: join the trainers' groups, load a version everywhere, forget old prefixes, probe.

The trainers' side is pa_npu.publish.publisher (and, between two publishes, pa_npu.publish.late_engines); what runs inside the
engines is pa_npu.engines.vllm.worker. When an engine dies meanwhile, the attempt is given up on both sides and made again with
those that are left: nothing is in flight at a border, so an attempt that fails costs time only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.tasks import cancel, gather
from pa_npu.data.prompts import Prompt
from pa_npu.engines.membership import Fleet, Member
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import EngineError, RolloutEngine, Sampling, WeightGroups
from pa_npu.errors import DeadlineExceeded, InvariantViolation
from pa_npu.publish.transport import Abandonment, epoch_name
from pa_npu.samples.seeds import group_seed

logger = logging.getLogger(__name__)

# Workers have the same deadline and a better message (which bucket, which stage); the client's only catches workers that hang.
_GRACE_S = 15.0
# Keeps the seeds of probes apart from those of groups, whose index is far below.
_PROBE_INDEX = 2**32
_ATTEMPTS = 4
_HEALTH_EVERY_S = 2.0


@dataclass(frozen=True)
class Connection:
    """How engines reach the trainers' groups: the store's address, the backend, and each pipeline stage's manifest, in order.

    stages: for publishes to all engines. late_stages: for deliveries to one engine inside an iteration.
    """

    store: tuple[str, int]
    backend: str
    stages: Sequence[dict[str, Any]]
    late_stages: Sequence[dict[str, Any]]


class EnginePublish:
    """Loads weight versions into the engines of a fleet."""

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        pool: EnginePool,
        channel: StoreChannel,
        connection: Connection,
        sampling: Sampling,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._pool = pool
        self._channel = channel
        self._connection = connection
        self._sampling = sampling
        self._workers = config.rollout.tensor_parallel
        self._deadline_s = config.publish.timeout_s
        self._epoch = -1
        self._connected: list[Member] | None = None  # the members of the groups of this epoch, while these are whole
        self._late_number = 0
        fleet.deliver_late = self.deliver_late

    async def publish(self, version: int, prompt: Prompt) -> dict[str, Any] | None:
        """All engines load `version` while the trainers send it; returns the probe.

        Nothing may be in flight: a response has one version (I1). Raises EngineError when attempt after attempt fails.
        """
        if self._pool.num_in_flight:
            raise InvariantViolation(
                f"I1 version: {self._pool.num_in_flight} sequences are in flight while weight version {version} arrives"
            )
        start_s = time.perf_counter()
        reason = ""
        async with self._fleet.border():
            for attempt in range(_ATTEMPTS):
                key = f"publish/{version}/{attempt}"
                members = await self._fleet.members()
                try:
                    probe = await self._attempt(version, key, members, prompt)
                except (EngineError, DeadlineExceeded) as error:
                    reason = str(error)
                    logger.warning("publish of weight version %d failed: %s", version, reason)
                    self._abandon(self._connection.stages, self._epoch, reason)
                    self._connected = None
                    await self._fleet.check(members)
                    self._channel.put_json(f"{key}/verdict", {"done": False, "reason": reason})
                    continue
                logger.info(
                    "weight version %d on %d engines after %.2f s", version, len(members), time.perf_counter() - start_s
                )
                self._fleet.serve(members, version)
                self._channel.put_json(f"{key}/verdict", {"done": True, "probe": probe})
                return probe
        raise EngineError(f"weight version {version} could not be published in {_ATTEMPTS} attempts: {reason}")

    async def deliver_late(self, engine: RolloutEngine, version: int) -> bool:
        """One engine loads the running iteration's version; false where a trainer rank has begun to change it."""
        number, self._late_number = self._late_number, self._late_number + 1
        self._channel.put_json(f"late/{number}", {"version": version, "workers": self._workers})
        answers = [
            await self._channel.wait_json_async(
                f"late/{number}/answer/{rank}",
                self._deadline_s,
                f"trainer rank {rank} to hold weight version {version}",
            )
            for rank in self._sending_ranks()
        ]
        self._channel.put_json(f"late/{number}/go", all(answers))
        if not all(answers):
            return False
        stages = self._connection.late_stages
        try:
            await self._while_healthy(engine, self._connect(engine, 0, 1, stages, number))
            await self._while_healthy(engine, self._receive_on(engine, version))
        except (EngineError, DeadlineExceeded) as error:
            self._abandon(stages, number, str(error))
            raise
        return True

    def _sending_ranks(self) -> list[int]:
        """Replica 0: tensor parallel varies fastest, then data parallel, then pipeline."""
        trainer = self._config.trainer
        per_stage = trainer.tensor_parallel * self._config.data_parallel
        return [
            stage * per_stage + rank
            for stage in range(trainer.pipeline_parallel)
            for rank in range(trainer.tensor_parallel)
        ]

    async def _attempt(
        self, version: int, key: str, members: Sequence[Member], prompt: Prompt
    ) -> dict[str, Any] | None:
        joins = self._connected != list(members)
        self._epoch += joins
        self._connected = list(members)
        self._channel.put_json(f"{key}/members", {"epoch": self._epoch, "workers": self._workers * len(members)})

        async def load(number: int, engine: RolloutEngine) -> None:
            if joins:
                await self._connect(engine, number, len(members), self._connection.stages, self._epoch)
            await self._receive_on(engine, version)

        loads = [self._while_healthy(member.engine, load(i, member.engine)) for i, member in enumerate(members)]
        loading = asyncio.ensure_future(gather(loads))
        broken = asyncio.ensure_future(self._broken(key))
        try:
            await asyncio.wait({loading, broken}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                raise EngineError(f"the trainers could not send: {broken.result()}")
            await loading
        finally:
            await cancel([loading, broken])
        return await self._probe(version, members, prompt)

    async def _while_healthy(self, engine: RolloutEngine, work: Coroutine[Any, Any, None]) -> None:
        """`work` on an engine, which may never answer when its worker dies meanwhile. Raises EngineError then."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=_HEALTH_EVERY_S))[0]:
                await engine.check_health(deadline_s=self._config.rollout.probe_timeout_s)
            await task
        finally:
            await cancel([task])

    async def _broken(self, key: str) -> str:
        """Why the trainers' side of an attempt failed, once it has."""
        reason = await self._channel.wait_json_async(
            f"{key}/broken", 2 * self._deadline_s + _GRACE_S, "a failure that did not come"
        )
        return str(reason)

    def _abandon(self, stages: Sequence[dict[str, Any]], epoch: int, reason: str) -> None:
        for stage in stages:
            Abandonment(*self._connection.store, epoch_name(stage["name"], epoch)).declare(reason)

    async def _connect(
        self, engine: RolloutEngine, number: int, count: int, stages: Sequence[dict[str, Any]], epoch: int
    ) -> None:
        """The engine's workers join one group per stage, as numbers 1 + number * workers and following.

        Workers are numbered through all `count` engines; rank 0 of each group is the stage's leader.
        """
        named = [stage | {"name": epoch_name(stage["name"], epoch)} for stage in stages]
        rank, world_size = 1 + number * self._workers, 1 + count * self._workers
        groups = WeightGroups(
            self._connection.store, rank, world_size, named, self._connection.backend, self._deadline_s
        )
        await engine.join_weight_groups(groups, deadline_s=self._deadline_s + _GRACE_S)

    async def _receive_on(self, engine: RolloutEngine, version: int) -> None:
        loaded = await engine.load_weights(version, deadline_s=self._deadline_s + _GRACE_S)
        if loaded.versions != (version,) * self._workers:
            raise EngineError(
                f"engine {engine.name}: workers hold weight versions {list(loaded.versions)} after the publish of {version}"
            )
        # keys and values of the old weights: log-probs off by 1.6 if kept
        await engine.reset_prefix_cache(deadline_s=self._deadline_s)

    async def _probe(self, version: int, members: Sequence[Member], prompt: Prompt) -> dict[str, Any] | None:
        """One sampled response per engine, all to the same prompt, with log-probs for the trainers to compare (I5)."""
        num_tokens = self._config.publish.probe_tokens
        if not num_tokens:
            return None
        sampling = Sampling(
            # as many as asked for, whatever ends a response
            max_tokens=min(num_tokens, self._sampling.max_tokens),
            temperature=self._sampling.temperature,
            ignore_eos=True,
        )
        seed = group_seed(self._config.run.seed, version, _PROBE_INDEX)

        async def sample(number: int, engine: RolloutEngine) -> dict[str, Any]:
            deadline_s = self._config.rollout.request_timeout_s
            completions = await engine.generate(prompt.tokens, 1, seed + number, sampling, deadline_s=deadline_s)
            return {"tokens": completions[0].tokens.tolist(), "logprobs": completions[0].logprobs.tolist()}

        responses = await gather([sample(number, member.engine) for number, member in enumerate(members)])
        return {"prompt_tokens": [int(token) for token in prompt.tokens], "responses": responses}

"""The engines' side of a weight publish: join the trainers' groups, load a version everywhere, forget old prefixes, probe.

The trainers' side is pa_npu.weights.publisher; what runs inside the engines is pa_npu.weights.receiver.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.data.prompts import Prompt
from pa_npu.errors import InvariantViolation
from pa_npu.rollout.pool import EnginePool
from pa_npu.rollout.protocol import EngineError, RolloutEngine, Sampling
from pa_npu.rollout.seeds import group_seed
from pa_npu.rollout.tasks import gather

logger = logging.getLogger(__name__)

# Workers have the same deadline and a better message (which bucket, which stage); the client's only catches workers that hang.
_GRACE_S = 15.0
# Keeps the seeds of probes apart from those of groups, whose index is far below.
_PROBE_INDEX = 2**32


class EnginePublish:
    """Loads weight versions into all engines of a pool."""

    def __init__(self, config: Config, pool: EnginePool, sampling: Sampling) -> None:
        self._config = config
        self._pool = pool
        self._sampling = sampling
        self._deadline_s = config.publish.timeout_s

    async def connect(self, store: tuple[str, int], stages: Sequence[dict[str, Any]], backend: str) -> None:
        """Every worker joins one group per pipeline stage. stages: the trainers' manifests, in stage order.

        Workers are numbered through all engines, from 1; rank 0 of each group is the stage's leader.
        """
        workers = self._config.rollout.tensor_parallel
        world_size = 1 + workers * len(self._pool.engines)

        async def join(number: int, engine: RolloutEngine) -> None:
            args = [*store, 1 + number * workers, world_size, list(stages), backend, self._deadline_s]
            await engine.rpc("pa_connect", args, deadline_s=self._deadline_s + _GRACE_S)

        await gather([join(number, engine) for number, engine in enumerate(self._pool.engines)])
        logger.info("%d engines connected to %d pipeline stages over %s", len(self._pool.engines), len(stages), backend)

    async def receive(self, version: int) -> None:
        """All engines load `version` while the trainers send it. Nothing may be in flight: a response has one version (I1)."""
        if self._pool.num_in_flight:
            raise InvariantViolation(
                f"I1 version: {self._pool.num_in_flight} sequences are in flight while weight version {version} arrives"
            )
        start_s = time.perf_counter()
        await self._pool.on_all(lambda engine: self._receive_on(engine, version))
        logger.info("weight version %d on all engines after %.2f s", version, time.perf_counter() - start_s)

    async def _receive_on(self, engine: RolloutEngine, version: int) -> None:
        results = await engine.rpc("pa_receive", [version], deadline_s=self._deadline_s + _GRACE_S)
        versions = [result.get("version") for result in results]
        if versions != [version] * self._config.rollout.tensor_parallel:
            raise EngineError(
                f"engine {engine.name}: workers hold weight versions {versions} after the publish of {version}"
            )
        # keys and values of the old weights: log-probs off by 1.6 if kept
        await engine.reset_prefix_cache(deadline_s=self._deadline_s)

    async def probe(self, version: int, prompt: Prompt) -> dict[str, Any] | None:
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

        responses = await gather([sample(number, engine) for number, engine in enumerate(self._pool.engines)])
        return {"prompt_tokens": [int(token) for token in prompt.tokens], "responses": responses}


async def wait_all_ready(pool: EnginePool, deadline_s: float) -> None:
    start_s = time.monotonic()
    await pool.on_all(lambda engine: engine.wait_ready(deadline_s=deadline_s))
    logger.info("%d engines ready after %.1f s", len(pool.engines), time.monotonic() - start_s)

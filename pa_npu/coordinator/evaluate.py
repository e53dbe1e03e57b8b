"""Greedy accuracy on the held-out prompts, through the same engines, clients and rewards as training."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pa_npu.control.tasks import TaskScope
from pa_npu.coordinator.episode import Rewards, run_episode, score
from pa_npu.data.prompts import Prompt
from pa_npu.engines.pool import EnginePool, Lease
from pa_npu.engines.protocol import Sampling
from pa_npu.environments.protocol import Environment
from pa_npu.errors import PaNpuError


@dataclass(frozen=True)
class Evaluation:
    """accuracy: share of questions whose greedy answer is correct."""

    version: int
    accuracy: float
    questions: int
    seconds: float


async def evaluate(
    version: int,
    prompts: Sequence[Prompt],
    pool: EnginePool,
    environment: Environment,
    rewards: Rewards,
    sampling: Sampling,
    *,
    max_in_flight: int,
    request_timeout_s: float,
    engine_wait_s: float,
) -> Evaluation:
    """One greedy response per prompt, max_in_flight per engine. sampling: as in training, but for the temperature."""
    if not prompts:
        raise PaNpuError("evaluation: there are no held-out prompts; set data.test or leave evaluation out")
    greedy = dataclasses.replace(sampling, temperature=0.0, logprobs=False)
    start_s = time.perf_counter()
    correct = [False] * len(prompts)

    async def answer(number: int, prompt: Prompt, lease: Lease) -> None:
        with pool.session(
            lease,
            lambda _: max_in_flight,
            deadline_s=request_timeout_s,
            again_deadline_s=engine_wait_s,
            what=f"held-out prompt {number} at version {version}",
        ) as session:
            samples = await run_episode(environment, prompt, 1, session, 0, greedy)
        result = await score(rewards, prompt, samples)
        correct[number] = bool(result.correct[0])

    async with TaskScope() as scope:
        for number, prompt in enumerate(prompts):
            lease = await pool.admit(1, len(prompt.tokens) + greedy.max_tokens, lambda _: max_in_flight, engine_wait_s)
            scope.start(answer(number, prompt, lease), f"evaluate {number}")
    return Evaluation(version, sum(correct) / len(correct), len(correct), time.perf_counter() - start_s)

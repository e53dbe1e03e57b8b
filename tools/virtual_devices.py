"""A run's iterations on paced devices in virtual time: the coordinator is real, engines and trainers only take time.

Producer, pool, schedule controller, changes of roles and delivery are those of a run, on the clock
of a loop that does not wait (tools/bench_balance.py). An engine decodes its sequences one token a
step, computes the prompts of what comes to it, and hands on what it has; a replica trains its slots
in turn. Publishes, HTTP and decisions take no time.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from pa_npu.config.schema import Config
from pa_npu.coordinator.assembly import make_roles
from pa_npu.coordinator.delivery import Delivery
from pa_npu.coordinator.engine_groups import producer_on_engines
from pa_npu.coordinator.features import Feature
from pa_npu.coordinator.roles_delivery import RolesDelivery
from pa_npu.data.prompts import Prompt
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import Generation, Sampling
from pa_npu.environments.protocol import EnvironmentContext
from pa_npu.environments.single_turn import SingleTurn
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.iteration_model.subjects import EngineSpeed, IterationTimes, Rules
from pa_npu.rewards.functions import RewardInput, RewardResult
from pa_npu.samples.group import Group
from pa_npu.telemetry.timeline import Timeline

# a script sees its own directory only
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.bench_balance import Inline, VirtualLoop

Lengths = Sequence[Sequence[int]]
Draw = Callable[[int], Lengths]
"""Returns the lengths of an iteration's groups."""


@dataclass
class _Sequence:
    """left: tokens to come. begins: at which step of the engine; None while it waits for a place."""

    left: int
    done: asyncio.Future[int]
    begins: float | None = None


class PacedEngine:
    """An engine on the loop's clock. lengths: of the groups of this iteration, by their prompts'
    first token.
    """

    def __init__(self, name: str, pace: EngineSpeed, max_running: int) -> None:
        self.name = name
        self.slowness = 1.0
        """What multiplies the seconds of its decode steps."""
        self._pace = pace
        self._max_running = max_running
        self.lengths: Lengths = ()
        self.by_seed: dict[int, int] = {}
        self._now_s = self._steps = self._prompts_s = 0.0
        self._running: list[tuple[float, int, _Sequence]] = []
        self._waiting: deque[_Sequence] = deque()
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None

    async def generate(
        self,
        prompt_tokens: np.ndarray,
        n: int,
        seed: int,
        sampling: Sampling,
        *,
        deadline_s: float,
        written: np.ndarray | None = None,
    ) -> list[Generation]:
        if n > 1:
            self.by_seed |= {
                seed + i: length for i, length in enumerate(self.lengths[int(prompt_tokens[0])])
            }
        first = 0 if written is None else len(written)
        self._advance()
        self._prompts_s += self._pace.prompt_token_s * (len(prompt_tokens) + first)
        future = asyncio.get_running_loop().create_future
        mine = [_Sequence(self.by_seed[seed + i] - first, future()) for i in range(n)]
        self._waiting += mine
        self._set_timer()
        counts = [await sequence.done for sequence in mine]
        return [
            Generation(
                np.full(count, (seed + number) % 2**31, np.int32),  # no two answers are alike
                np.full(count, -1.0, np.float32),
                "",
                "stop" if count == sequence.left else "cut",
                version=0,
            )
            for number, (count, sequence) in enumerate(zip(counts, mine, strict=True))
        ]

    async def cut_responses(self, *, deadline_s: float) -> None:
        """Ends all as they stand."""
        self._advance()
        for _, _, sequence in self._running:
            assert sequence.begins is not None
            sequence.done.set_result(min(sequence.left - 1, int(self._steps - sequence.begins)))
        for sequence in self._waiting:
            sequence.done.set_result(0)
        self._running = []
        self._prompts_s = 0.0
        self._waiting.clear()
        self._set_timer()

    async def close(self) -> None:
        """Nothing to close."""

    def _step_s(self) -> float:
        return self.slowness * (self._pace.step_s + self._pace.sequence_s * len(self._running))

    def _advance(self) -> None:
        now_s = asyncio.get_running_loop().time()
        seconds = now_s - self._now_s
        self._now_s = now_s
        spent = min(self._prompts_s, seconds)
        self._prompts_s -= spent
        if self._running:
            self._steps += (seconds - spent) / self._step_s()

    def _set_timer(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            sequence = self._waiting.popleft()
            self._count = self._count + 1
            sequence.begins = self._steps
            heapq.heappush(self._running, (self._steps + sequence.left, self._count, sequence))
        if self._timer is not None:
            self._timer.cancel()
        if self._running:
            in_s = self._prompts_s + max(0.0, self._running[0][0] - self._steps) * self._step_s()
            self._timer = asyncio.get_running_loop().call_at(self._now_s + in_s, self._end_some)

    def _end_some(self) -> None:
        self._advance()
        self._steps = max(self._steps, self._running[0][0])
        while self._running and self._running[0][0] <= self._steps + 1e-6:
            sequence = heapq.heappop(self._running)[2]
            sequence.done.set_result(sequence.left)
        self._set_timer()


class Shelf:
    """A buffer whose replicas train their slots in turn, token_s for each token."""

    readers = 1

    def __init__(self, token_s: float) -> None:
        self._token_s = token_s
        self._there: dict[tuple[int, int], tuple[float, float]] = {}

    def put(self, group: Group, replica: int, slot: int) -> None:
        tokens = int(group.lengths[slice(*(group.part or (0, None)))].sum())
        self._there[replica, slot] = asyncio.get_running_loop().time(), self._token_s * tokens

    def trained(self) -> tuple[float, float]:
        """(when the last replica is done, mean seconds of training)."""
        ends_s: dict[int, float] = {}
        for (replica, _), (there_s, seconds) in sorted(self._there.items()):
            ends_s[replica] = max(ends_s.get(replica, 0.0), there_s) + seconds
        return max(ends_s.values()), sum(seconds for _, seconds in self._there.values()) / len(
            ends_s
        )


class _Rewards:
    async def score(self, group: RewardInput) -> RewardResult:
        total = np.arange(len(group.responses), dtype=np.float32)
        return RewardResult(total, {"stub": total}, total > 0, ())


def run(
    config: Config,
    pace: EngineSpeed,
    token_s: float,
    prompt: int,
    lengths: Draw,
    iterations: int,
    *,
    unsteady: float = 0.0,
) -> list[dict[str, Any]]:
    """Returns records of iterations with what tables need.

    Args:
        pace: of an engine.
        token_s: of a replica.
        prompt: tokens of a prompt.
        lengths: of an iteration's groups.
        iterations: of the run.
        unsteady: standard deviation of the logarithm of an engine's decode steps, drawn for each
            engine and iteration, the same in every run.
    """

    def work(prompt: int, responses: Sequence[int]) -> float:
        return float(prompt * len(responses) + sum(responses))

    records: list[dict[str, Any]] = []
    controller = ScheduleController(Rules.from_config(config), work)
    loop = VirtualLoop()
    prompts = [
        Prompt(i, np.full(prompt, i, np.int32), str(i), "", {})
        for i in range(config.schedule.prompts_per_iteration)
    ]
    longest = config.rollout.max_response_tokens

    async def all_iterations() -> None:
        async with EnginePool() as pool:
            engines = [
                PacedEngine(f"e{k}", pace, config.rollout.max_num_seqs)
                for k in range(config.rollout.engines)
            ]
            by_seed: dict[int, int] = {}
            for index, engine in enumerate(engines):
                engine.by_seed = by_seed
                pool.add(engine, engine_index=index, shared=config.placement.colocate)  # type: ignore[arg-type]
                pool.serve(engine)  # type: ignore[arg-type]
            timeline = Timeline(None, "")
            features: list[Feature] = []
            make_delivery: Callable[..., Delivery] = Delivery
            roles = make_roles(config, pool, timeline, controller)
            if roles is not None:
                features.append(roles)
                make_delivery = partial(RolesDelivery, roles=roles)
            producer = producer_on_engines(
                config=config,
                pool=pool,
                environment=SingleTurn(EnvironmentContext(None, longest)),
                rewards=_Rewards(),  # type: ignore[arg-type]
                buffer=Shelf(token_s),  # type: ignore[arg-type]
                controller=controller,
                sampling=Sampling(longest, 1.0),
                timeline=timeline,
                work=work,
                store_thread=Inline(),
                features=features,
                streamed=make_delivery,
            )
            for iteration in range(iterations):
                by_seed.clear()
                drawn = np.random.default_rng([iteration, 9]).standard_normal(len(engines))
                for engine, number in zip(engines, drawn.tolist(), strict=True):
                    engine.lengths = lengths(iteration)
                    engine.slowness = math.exp(unsteady * number)
                shelf = Shelf(token_s)
                producer.buffer = shelf  # type: ignore[assignment]
                begin_s = loop.time()
                produced = await producer.produce(iteration, prompts)
                end_s, train_s = shelf.trained()
                seconds = max(end_s, loop.time()) - begin_s
                end = controller.end_iteration(
                    IterationTimes(seconds, 0.0, train_s, 0.0), iteration
                )
                records.append(
                    produced.numbers | {"iteration_s": seconds, "prediction_error": end.error}
                )
                await asyncio.sleep(max(0.0, end_s - loop.time()))

    try:
        with (
            mock.patch.object(time, "perf_counter", loop.time),
            mock.patch.object(time, "thread_time", loop.time),  # decisions take none
        ):
            loop.run_until_complete(all_iterations())
    finally:
        loop.close()
    assert all(math.isfinite(record["iteration_s"]) for record in records)
    return records

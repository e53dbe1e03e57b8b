"""Engines, rewards and a buffer that do what a test says, and the producer between them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from pa_npu.config.schema import Config
from pa_npu.coordinator.delivery import Produced
from pa_npu.coordinator.engine_groups import producer_on_engines
from pa_npu.coordinator.producer import Producer
from pa_npu.coordinator.updates import EveryGroup, InformativeGroups
from pa_npu.data.prompts import Prompt
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import EngineError, Generation, Sampling
from pa_npu.environments.protocol import EnvironmentContext
from pa_npu.environments.single_turn import SingleTurn
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.iteration_model.subjects import Rules
from pa_npu.rewards.functions import RewardInput, RewardResult
from pa_npu.samples.group import Group
from pa_npu.telemetry.timeline import Timeline
from tests.helpers.stuck import comes

GROUPS, RESPONSES = 8, 4


class ScriptedEngine:
    """Answers a group when its turn comes: `order` lists dispatch indices by completion.

    A turn that never comes is an error.
    """

    def __init__(
        self,
        name: str,
        order: list[int],
        fail_at: int | None = None,
        before_last: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.name = name
        self.asked: list[tuple[int, int, int]] = []
        self.answered = 0
        self.on_asked: Callable[[], object] = lambda: None
        self._turns = [asyncio.Event() for _ in order]
        self._order = order
        self._fail_at = fail_at
        self._before_last = before_last
        if self._turns:
            self._turns[0].set()

    async def generate(
        self, prompt_tokens: np.ndarray, n: int, seed: int, sampling: Sampling, *, deadline_s: float
    ) -> list[Generation]:
        index = int(prompt_tokens[0])
        self.asked.append((index, n, seed))
        self.on_asked()
        if index == self._fail_at:
            raise EngineError(f"engine {self.name}: died")
        turn = self._order.index(index)
        await comes(self._turns[turn], lambda: self._why_no_turn(index))
        if turn == len(self._turns) - 1 and self._before_last is not None:
            await self._before_last()
        if turn + 1 < len(self._turns):
            self._turns[turn + 1].set()
        self.answered += 1
        return [completion(index, i) for i in range(n)]

    def _why_no_turn(self, index: int) -> str:
        before = self._order[self.answered]
        asked = (
            "has no answer yet"
            if before in [asked for asked, _, _ in self.asked]
            else "was never asked for"
        )
        return (
            f"engine {self.name}: group {index} never had its turn, because group {before} "
            f"comes first and {asked}"
        )

    async def close(self) -> None:
        pass


def completion(index: int, i: int) -> Generation:
    length = 1 + (index + i) % 5
    return Generation(
        tokens=np.full(length, 10 * index + i, np.int32),
        logprobs=np.full(length, -0.25 * (i + 1), np.float32),
        text=f"{index}/{i}",
        finish_reason="stop" if i else "length",
        version=5,
    )


class ScriptedRewards:
    """Response i of group `index` gets (index * i) % 3."""

    def __init__(self) -> None:
        self.all_but_last = asyncio.Event()
        self._scored = 0

    async def score(self, group: RewardInput) -> RewardResult:
        pairs = [tuple(map(int, text.split("/"))) for text in group.responses]
        total = np.array([(index * i) % 3 for index, i in pairs], np.float32)
        self._scored += 1
        if self._scored == GROUPS - 1:
            self.all_but_last.set()
        return RewardResult(
            total, {"math": total}, total > 0, ("late",) if pairs[0][0] == 3 else ()
        )


class Shelf:
    """A rollout buffer that remembers what was put, and in which order."""

    readers = 1

    def __init__(self) -> None:
        self.groups: dict[tuple[int, int], Group] = {}
        self.by_rule: set[int] = set()

    def put(self, group: Group, replica: int, slot: int, *, by_rule: bool = False) -> None:
        assert (replica, slot) not in self.groups
        if by_rule:
            self.by_rule.add(group.index)
        self.groups[replica, slot] = group


def prompts() -> list[Prompt]:
    return [
        Prompt(100 + i, np.full(3, i, np.int32), str(i), f"question {i}", {"id": i})
        for i in range(GROUPS)
    ]


def config(**sections: dict[str, object]) -> Config:
    tree: dict[str, dict[str, object]] = {
        "run": {"seed": 7},
        "model": {"path": "m"},
        "data": {"train": "t"},
        "rollout": {"responses_per_prompt": RESPONSES, "window": 64, "max_response_tokens": 16},
        "trainer": {"devices": 2},
        "schedule": {"prompts_per_iteration": GROUPS, "order": "completion"},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return Config.model_validate(tree)


def make_producer(
    config: Config,
    engines: list[ScriptedEngine],
    rewards: ScriptedRewards,
    shelf: Shelf,
    store_thread: ThreadPoolExecutor,
    window: ScheduleController | int = 64,
) -> Producer:
    def work(prompt: int, responses: Sequence[int]) -> float:
        return prompt + sum(responses)

    if isinstance(window, int):
        window = ScheduleController(replace(Rules.from_config(config), window=window), work)
    return producer_on_engines(
        config,
        EnginePool(engines),  # type: ignore[arg-type]
        SingleTurn(EnvironmentContext(None, config.rollout.max_response_tokens)),
        rewards,
        shelf,  # type: ignore[arg-type]
        window,
        Sampling(config.rollout.max_response_tokens, 1.0),
        Timeline(None, ""),
        work,
        store_thread,
    )


async def produce(
    config: Config,
    engines: list[ScriptedEngine],
    store_thread: ThreadPoolExecutor,
    window: int = 64,
) -> tuple[Produced, Shelf]:
    shelf = Shelf()
    producer = make_producer(config, engines, ScriptedRewards(), shelf, store_thread, window)
    return await producer.produce(5, prompts()), shelf


def dynamic(**schedule: object) -> Config:
    return config(
        schedule={
            "prompts_per_iteration": 4,
            "order": "prompt",
            "dynamic_sampling": True,
            **schedule,
        }
    )


def informative(chosen: Config, further: Iterator[Prompt]) -> EveryGroup:
    return InformativeGroups(prompts()[:4], chosen.schedule.order, lambda: next(further))

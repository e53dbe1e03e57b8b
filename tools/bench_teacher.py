#!/usr/bin/env python
"""How much of the time of a teacher's engine is hidden behind generation and training.

    python tools/bench_teacher.py [--groups 24] [--responses 8] [--tokens 200] [--repeats 3]

The run's own producer, engine pool and teachers work with devices that take their time by sleeping
and no core: an engine that decodes (all its sequences in each step), a teacher that scores one
sequence after another, and a trainer that takes groups as they arrive. Response lengths are
lognormal. Each row gives the seconds of an iteration without a teacher, with one, and with one that
scores only after the whole iteration is generated, and the share of the teacher's own time that is
hidden:

    hidden = 1 - (iteration with teacher - iteration without) / seconds in which the teacher computed

The teacher's speed is given as its time for an iteration over the longest of generation and
training. Up to 1 it is not the slowest part, and its time can be hidden but for the last group's.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

# run as a file, this folder's parent is not on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pa_npu.config.schema import Config
from pa_npu.coordinator.demonstrations import Demonstrations
from pa_npu.coordinator.engine_groups import producer_on_engines
from pa_npu.coordinator.scoring_teachers import ScoringTeacher
from pa_npu.coordinator.teachers import Teachers
from pa_npu.data.prompts import Prompt
from pa_npu.data.row_sets import Row, RowSet
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import Generation, Sampling, Scores, Scoring
from pa_npu.environments.protocol import EnvironmentContext
from pa_npu.environments.single_turn import SingleTurn
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.iteration_model.subjects import Rules
from pa_npu.rewards.functions import RewardInput, RewardResult
from pa_npu.samples.group import Group
from pa_npu.samples.teachers import score_columns
from pa_npu.samples.types import Sample
from pa_npu.telemetry.timeline import Timeline

_PROMPT_TOKENS = 32
WINDOW = 64
_VERSION = 0


class SleepingEngine:
    """Decodes all that it has in steps of step_s, which take no core."""

    name = "engine"

    def __init__(self, step_s: float, lengths: dict[int, list[int]]) -> None:
        self._step_s = step_s
        self._lengths = lengths

    async def generate(
        self, prompt_tokens: np.ndarray, n: int, seed: int, sampling: Sampling, *, deadline_s: float
    ) -> list[Generation]:
        lengths = self._lengths[int(prompt_tokens[0])]
        await asyncio.sleep(max(lengths) * self._step_s)
        generations = []
        for number, length in enumerate(lengths):
            drawn = np.random.default_rng(seed + number)
            tokens = drawn.integers(5, 1000, length).astype(np.int32)
            logprobs = -drawn.random(length).astype(np.float32)
            generations.append(Generation(tokens, logprobs, "", "stop", _VERSION))
        return generations

    async def close(self) -> None:
        pass


class SleepingTeacher(ScoringTeacher):
    """Scores one sequence after another. busy_s: in which it computed."""

    def __init__(self, config: Config, token_s: float) -> None:
        super().__init__("large", config, Scoring())
        self._token_s = token_s
        self._device = asyncio.Lock()
        self.busy_s = 0.0

    async def score(self, prompt: Prompt, sample: Sample, label: str, session: Any) -> Scores:
        async with self._device:
            start_s = time.perf_counter()
            await asyncio.sleep(len(sample.tokens) * self._token_s)
            self.busy_s += time.perf_counter() - start_s
        zeros = np.zeros(len(sample.tokens), np.float32)
        return Scores(zeros, np.zeros((len(zeros), 0), np.int32), zeros[:, None][:, :0])

    async def check(self, iteration: int) -> None:
        pass


class AfterAll(SleepingTeacher):
    """The control: scores nothing before the last response of the iteration is there."""

    def __init__(self, config: Config, token_s: float, sequences: int) -> None:
        super().__init__(config, token_s)
        self._left = sequences
        self._all_here = asyncio.Event()

    async def score(self, prompt: Prompt, sample: Sample, label: str, session: Any) -> Scores:
        self._left -= 1
        if not self._left:
            self._all_here.set()
        await self._all_here.wait()
        return await super().score(prompt, sample, label, session)


class NoRewards:
    async def score(self, group: RewardInput) -> RewardResult:
        total = np.zeros(len(group.responses), np.float32)
        return RewardResult(total, {"none": total}, total > 0, ())


class Trainer:
    """A buffer whose groups are trained in order of arrival, token_s for each of their tokens."""

    readers = 1

    def __init__(self, token_s: float) -> None:
        self._token_s = token_s
        self._groups: asyncio.Queue[Group] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.demonstrations_s = 0.0

    def put(self, group: Group, replica: int, slot: int, *, by_rule: bool = False) -> None:
        self._loop.call_soon_threadsafe(self._groups.put_nowait, group)

    async def train(self, number: int) -> None:
        for _ in range(number):
            group = await self._groups.get()
            start_s = time.perf_counter()
            await asyncio.sleep(len(group.tokens) * self._token_s)
            if not group.written.any():
                self.demonstrations_s += time.perf_counter() - start_s


@dataclass(frozen=True)
class Measured:
    """Seconds of an iteration, in which the teacher computed, and in which demonstrations were
    trained.
    """

    iteration_s: float
    teacher_s: float
    demonstrations_s: float = 0.0


def configuration(groups: int, responses: int, with_teacher: bool, demonstrated: int = 0) -> Config:
    tree: dict[str, Any] = {
        "run": {"device": "cpu"},
        "model": {"path": "m", "dtype": "fp32"},
        "data": {"train": "t"},
        "rollout": {"responses_per_prompt": responses, "max_response_tokens": 4096},
        "schedule": {"prompts_per_iteration": groups, "skip_zero_advantage": False},
        "telemetry": {"samples": 0},
    }
    if with_teacher:
        tree |= {"algorithm": {"name": "distill"}, "teacher": {"large": {"url": "http://none"}}}
    if demonstrated:
        tree["data"]["demonstrations"] = {"path": "d", "share": demonstrated / groups}
    return Config.model_validate(tree)


async def iteration(
    lengths: dict[int, list[int]],
    step_s: float,
    train_token_s: float,
    score_token_s: float | None,
    *,
    streamed: bool = True,
    demonstrated: int = 0,
) -> Measured:
    """One iteration. score_token_s: None has no teacher. demonstrated: groups of demonstrations,
    which are like the first groups.
    """
    groups, responses = len(lengths), len(lengths[0])
    config = configuration(groups, responses, score_token_s is not None, demonstrated)
    teachers, teacher = None, None
    if score_token_s is not None:
        teacher = (
            SleepingTeacher(config, score_token_s)
            if streamed
            else AfterAll(config, score_token_s, groups * responses)
        )
        teachers = Teachers(config, {1: teacher}, score_columns(config))

    def work(prompt: int, lengths: Sequence[int]) -> float:
        return prompt + sum(lengths)

    rules = replace(Rules.from_config(config), window=WINDOW)
    trainer = Trainer(train_token_s)
    with ThreadPoolExecutor(1) as store_thread:
        producer = producer_on_engines(
            config,
            EnginePool([SleepingEngine(step_s, lengths)]),  # type: ignore[list-item]
            SingleTurn(EnvironmentContext(None, config.rollout.max_response_tokens)),
            NoRewards(),  # type: ignore[arg-type]
            trainer,  # type: ignore[arg-type]
            ScheduleController(rules, work),
            Sampling(config.rollout.max_response_tokens, 1.0),
            Timeline(None, ""),
            work,
            store_thread,
            teachers=teachers,
        )
        if demonstrated:
            producer.demonstrations = demonstrations_like(config, lengths)
        prompts = [
            Prompt(index, np.full(_PROMPT_TOKENS, index, np.int32), "", "", {})
            for index in range(groups)
        ]
        start_s = time.perf_counter()
        await asyncio.gather(
            producer.produce(_VERSION, prompts), trainer.train(groups + demonstrated)
        )
        seconds = time.perf_counter() - start_s
    teacher_s = 0.0 if teacher is None else teacher.busy_s
    return Measured(seconds, teacher_s, trainer.demonstrations_s)


def demonstrations_like(config: Config, lengths: dict[int, list[int]]) -> Demonstrations:
    """Rows of the lengths of an iteration's responses, in their order."""
    rows: list[Row] = []
    for of_group in lengths.values():
        for length in of_group:
            tokens = np.full(_PROMPT_TOKENS + length, len(rows), np.int32)
            weight = np.ones(len(tokens), np.float32)
            weight[:_PROMPT_TOKENS] = 0
            rows.append(Row(len(rows), tokens, weight, "", 0))
    return Demonstrations(config, RowSet("demonstrations", tuple(rows), len(rows), 0, 0, ""))


def drawn_lengths(groups: int, responses: int, tokens: int, seed: int) -> dict[int, list[int]]:
    random.seed(seed)
    return {
        index: [
            max(4, round(tokens * random.lognormvariate(-0.125, 0.5))) for _ in range(responses)
        ]
        for index in range(groups)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200, help="mean length of a response")
    parser.add_argument("--generate", type=float, default=6.0, help="seconds of generation, about")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    lengths = drawn_lengths(arguments.groups, arguments.responses, arguments.tokens, 1)
    num_tokens = sum(sum(of_group) for of_group in lengths.values())
    waves = arguments.groups * arguments.responses / WINDOW
    step_s = arguments.generate / waves / (1.7 * arguments.tokens)
    train_s = arguments.generate
    print("| teacher / slowest | without | streamed | hidden | after all |")
    print("|---|---|---|---|---|")
    for share in (0.25, 0.5, 0.75, 1.0, 1.5):
        rows = []
        for _ in range(arguments.repeats):
            score_token_s = share * arguments.generate / num_tokens
            train_token_s = train_s / num_tokens
            alone = asyncio.run(iteration(lengths, step_s, train_token_s, None))
            beside = asyncio.run(iteration(lengths, step_s, train_token_s, score_token_s))
            after = asyncio.run(
                iteration(lengths, step_s, train_token_s, score_token_s, streamed=False)
            )
            hidden = 1 - (beside.iteration_s - alone.iteration_s) / beside.teacher_s
            rows.append((alone.iteration_s, beside.iteration_s, hidden, after.iteration_s))
        without, streamed, hidden, after_s = (
            statistics.median(column) for column in zip(*rows, strict=True)
        )
        print(
            f"| {share:.2f} | {without:.2f} s | {streamed:.2f} s | {hidden:.0%} | {after_s:.2f} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()

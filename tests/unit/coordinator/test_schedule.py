"""The real producer, pool and pace in virtual time are what the model says: same dispatch, same completions, same end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from helpers.virtual_cluster import CPU_ENGINE

from pa_npu.attention.trie import pack
from pa_npu.config.schema import Config
from pa_npu.coordinator.engine_groups import producer_on_engines
from pa_npu.coordinator.episode import ScoredGroup
from pa_npu.coordinator.features import AdmissionPace
from pa_npu.data.prompts import Prompt
from pa_npu.dispatch.schedule import (
    DispatchTurn,
    EngineSpeed,
    Schedule,
    SlowEngineLimit,
    same_windows,
)
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import Generation, Sampling
from pa_npu.environments.protocol import EnvironmentContext
from pa_npu.environments.single_turn import SingleTurn
from pa_npu.planning.iteration_model.controller import Learned, ScheduleController
from pa_npu.planning.iteration_model.subjects import (
    GroupOutlook,
    GroupTiming,
    IterationOutlook,
    IterationTimes,
    Rules,
    VirtualCluster,
    VirtualGroup,
)
from pa_npu.rewards.functions import RewardInput, RewardResult
from pa_npu.samples.group import Group
from pa_npu.samples.types import Sample, SampleBuilder, SampleTurn, group_lengths
from pa_npu.samples.wire import to_bytes
from pa_npu.telemetry.timeline import Timeline
from tools.bench_balance import Inline, VirtualLoop
from tools.simulate import simulate
from tools.virtual_engine import VirtualEngine

GROUPS = 16
RESPONSES = 8
PROMPT = 128
TRAIN_S = 0.21


class Engine:
    """The model's engine behind the protocol of a real one, on the loop's clock."""

    def __init__(self, name: str, speed: EngineSpeed, lengths: Sequence[Sequence[int]]) -> None:
        self.name = name
        self._engine: VirtualEngine[asyncio.Event] = VirtualEngine(speed)
        self._lengths = lengths
        self._timer: asyncio.TimerHandle | None = None

    async def generate(
        self, prompt_tokens: np.ndarray, n: int, seed: int, sampling: Sampling, *, deadline_s: float
    ) -> list[Generation]:
        lengths = self._lengths[int(prompt_tokens[0])]
        done = asyncio.Event()
        self._engine.add(done, asyncio.get_running_loop().time(), len(prompt_tokens), lengths, 0.0)
        self._set_timer()
        await done.wait()
        return [
            Generation(
                np.full(m, (seed + i) % 50, np.int32),
                np.full(m, -1.0, np.float32),
                "",
                "stop",
                version=0,
            )
            for i, m in enumerate(lengths)
        ]

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if np.isfinite(self._engine.next_s):
            self._timer = asyncio.get_running_loop().call_at(self._engine.next_s, self._end_some)

    def _end_some(self) -> None:
        for done in self._engine.end_some():
            done.set()
        self._set_timer()

    async def close(self) -> None:
        """Nothing to close."""


class Rewards:
    async def score(self, group: RewardInput) -> RewardResult:
        total = np.arange(len(group.responses), dtype=np.float32)
        return RewardResult(total, {"stub": total}, total > 0, ())


class Shelf:
    """A buffer whose one replica takes its slots in turn, TRAIN_S each."""

    readers = 1

    def __init__(self) -> None:
        self.groups: dict[tuple[int, int], bytes] = {}
        self._there_s: dict[int, float] = {}

    def put(self, group: Group, replica: int, slot: int) -> None:
        self.groups[replica, slot] = to_bytes(group)
        self._there_s[slot] = asyncio.get_running_loop().time()

    def trained_s(self) -> float:
        end_s = 0.0
        for slot in range(GROUPS):
            end_s = max(end_s, self._there_s[slot]) + TRAIN_S
        return end_s


class Recording(ScheduleController):
    def __init__(self, config: Config, follow: Schedule | None) -> None:
        super().__init__(Rules.from_config(config), lambda prompt, lengths: prompt + sum(lengths))
        self.timings: list[GroupTiming] = []
        self.schedules: list[Schedule] = []
        self.errors: list[float | None] = []
        self._follow = follow

    def begin_iteration(self, outlook: IterationOutlook, iteration: int = 0) -> Schedule:
        chosen = super().begin_iteration(outlook, iteration)
        self.schedules.append(self._follow or chosen)
        self.timings = []
        return self.schedules[-1]

    def observe(self, timing: GroupTiming, iteration: int = 0) -> None:
        self.timings.append(timing)
        super().observe(timing, iteration)


def run(
    lengths: Sequence[Sequence[int]],
    engines: dict[str, EngineSpeed],
    follow: Schedule | None = None,
    iterations: int = 1,
    **schedule: object,
) -> tuple[Recording, list[Shelf], list[float]]:
    """Iterations of the real producer; returns also when each had ended."""
    config = Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "rollout": {
                "responses_per_prompt": RESPONSES,
                "max_response_tokens": 64,
                "max_num_seqs": 128,
            },
            "schedule": {"prompts_per_iteration": GROUPS, **schedule},
        }
    )
    prompts = [Prompt(i, np.full(PROMPT, i, np.int32), "", "", {}) for i in range(GROUPS)]
    controller = Recording(config, follow)
    shelves = []
    ends_s = []

    async def all_iterations() -> None:
        async with EnginePool() as pool:
            for name, speed in engines.items():
                engine = Engine(name, speed, lengths)
                pool.add(engine)
                pool.serve(engine)
            producer: Any = producer_on_engines(
                config,
                pool,
                SingleTurn(EnvironmentContext(None, 64)),
                Rewards(),
                Shelf(),
                controller,
                Sampling(64, 1.0),
                Timeline(None, ""),
                lambda prompt, responses: prompt + sum(responses),
                Inline(),
            )
            for iteration in range(iterations):
                shelves.append(Shelf())
                producer.buffer = shelves[-1]
                start_s = asyncio.get_running_loop().time()
                await producer.produce(iteration, prompts)
                end_s = max(shelves[-1].trained_s(), asyncio.get_running_loop().time())
                ends_s.append(end_s - start_s)
                times = IterationTimes(ends_s[-1], 0.0, GROUPS * TRAIN_S, 0.0)
                controller.errors.append(controller.end_iteration(times, iteration).error)
                await asyncio.sleep(end_s - asyncio.get_running_loop().time())

    loop = VirtualLoop()
    try:
        with mock.patch.object(time, "perf_counter", loop.time):
            loop.run_until_complete(all_iterations())
    finally:
        loop.close()
    return controller, shelves, ends_s


def model(
    lengths: Sequence[Sequence[int]],
    engines: dict[str, EngineSpeed],
    schedule: Schedule,
    tokens: int = 64,
):
    groups = [
        VirtualGroup(i, PROMPT, tuple(map(float, row)), TRAIN_S, RESPONSES * (PROMPT + tokens))
        for i, row in enumerate(lengths)
    ]
    return simulate(VirtualCluster(engines, 10**6), groups, schedule)


EQUAL = [[64] * RESPONSES] * GROUPS
MIXED = [[5 + (7 * g + 11 * i) % 60 for i in range(RESPONSES)] for g in range(GROUPS)]
TWO = {"a": CPU_ENGINE, "b": CPU_ENGINE.scaled(1.7)}
SCHEDULES = {
    "window": Schedule("w", tuple(range(GROUPS)), (same_windows("ab", 24),)),
    "backwards": Schedule("w", tuple(reversed(range(GROUPS))), (same_windows("ab", 40),)),
    "levels": Schedule(
        "l", tuple(range(GROUPS)), (same_windows("ab", 16), same_windows("ab", 48, 6))
    ),
    "turns": Schedule(
        "t",
        tuple(range(GROUPS)),
        (same_windows("ab", 128),),
        tuple(
            DispatchTurn(max(0, i - 5), 0.13 * i if i < 5 else 0.05 * (i % 3))
            for i in range(GROUPS)
        ),
    ),
    "reach": Schedule(
        "r",
        tuple(reversed(range(GROUPS))),
        (same_windows("ab", 16),),
        slow_engine_limit=SlowEngineLimit(
            tuple(float(5 + (7 * i) % 60) for i in range(GROUPS)), {"b": 0.02}, 1.5
        ),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("engines", [{"a": CPU_ENGINE}, TWO], ids=["one engine", "two engines"])
@pytest.mark.parametrize("lengths", [EQUAL, MIXED], ids=["equal", "mixed"])
def test_the_coordinator_does_what_the_model_says_to_the_microsecond(name, engines, lengths):
    controller, _, ends_s = run(lengths, engines, SCHEDULES[name])
    outcome = model(lengths, engines, SCHEDULES[name])
    real = {t.index: (t.engine, t.start_s, t.end_s) for t in controller.timings}
    for timing in outcome.timings:
        engine, start_s, end_s = real[timing.index]
        assert engine == timing.engine, f"group {timing.index}"
        assert (start_s, end_s) == pytest.approx((timing.start_s, timing.end_s), abs=1e-6), (
            f"group {timing.index}"
        )
    assert ends_s[0] == pytest.approx(outcome.end_s, abs=1e-6)


def test_a_run_chooses_turns_predicts_itself_and_is_quicker_for_it():
    controller, _, ends_s = run(EQUAL, {"a": CPU_ENGINE}, iterations=6)
    assert controller.schedules[-1].turns, controller.schedules[-1].name
    assert max(abs(error) for error in controller.errors[1:] if error is not None) <= 0.05, (
        controller.errors
    )
    best = min(
        model(
            EQUAL,
            {"a": CPU_ENGINE},
            Schedule("w", tuple(range(GROUPS)), (same_windows("a", 8 * w),)),
        ).end_s
        for w in range(1, 17)
    )
    assert ends_s[-1] <= 0.95 * best, f"{ends_s}, the best constant window {best}"


@pytest.mark.parametrize("lengths", [EQUAL, MIXED], ids=["equal", "mixed"])
def test_with_prompt_order_every_schedule_trains_the_same_bytes_in_the_same_slots(lengths):
    """Periodic with what was chosen, with other schedules, and synchronous."""
    controller, shelves, _ = run(lengths, TWO, iterations=4, order="prompt")
    _, held, _ = run(lengths, TWO, iterations=4, order="prompt", stream=False)
    assert len({schedule.name for schedule in controller.schedules}) > 1, (
        "negative control: it followed several"
    )
    for number in range(4):
        assert shelves[number].groups == held[number].groups
    for schedule in SCHEDULES.values():
        _, others, _ = run(lengths, TWO, schedule, order="prompt")
        assert others[0].groups == held[0].groups


async def test_a_turn_that_waits_for_a_completion_is_woken_by_it_and_one_in_the_past_does_not_wait():
    schedule = Schedule(
        "t",
        (0, 1, 2),
        (same_windows("a", 8),),
        (DispatchTurn(0, 0.0), DispatchTurn(1, 0.0), DispatchTurn(0, -5.0)),
    )
    pace = AdmissionPace(schedule, 1)
    lease: Any = SimpleNamespace(engine=SimpleNamespace(name="a"))
    await asyncio.wait_for(pace.before_admit(), 1)
    pace.admitted(lease, 0)
    waiting = asyncio.create_task(pace.before_admit())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    pace.generated(lease)
    await asyncio.wait_for(waiting, 5)
    pace.admitted(lease, 0)
    await asyncio.wait_for(pace.before_admit(), 1)


def branch(turns: Sequence[tuple[int, int, bool]]) -> Sample:
    """A sample of (number, tokens, trained) turns, each shown 10 tokens before."""
    sample = SampleBuilder(np.zeros(10, np.int32))
    for place, (number, length, trained) in enumerate(turns):
        if place:
            sample.show(np.full(10, number, np.int32))
        written = np.full(length, number, np.int32)
        if trained:
            sample.write(written, np.zeros(length, np.float32), 0)
        else:
            sample.show(written)
    reported = [
        SampleTurn(0, number, "", length, trained, None) for number, length, trained in turns
    ]
    return sample.finish(True, "", 0.0, reported)


def test_trees_of_sessions_cost_their_unique_tokens() -> None:
    """Two branches of a turn of 100 tokens, and a session of one turn."""
    samples = [
        branch([(1, 100, True), (2, 30, True)]),
        branch([(1, 100, False), (3, 40, True)]),
        branch([(4, 5, True)]),
    ]
    assert [len(sample.tokens) for sample in samples] == [150, 160, 15]
    prompt, lengths = group_lengths(samples)
    assert (prompt, lengths) == (10, [140, 50, 5])
    assert prompt + sum(lengths) == pack([sample.tokens for sample in samples]).layout.total
    prompt_of_ten = Prompt(0, samples[0].tokens[:10], "0", "prompt", {})
    nothing = np.zeros(3, np.float32)
    result = RewardResult(nothing, {"stub": nothing}, nothing > 0, ())
    assert ScoredGroup(prompt_of_ten, samples, result).computed == (10, (140, 50, 5))
    single = [branch([(1, 100, True)]), branch([(4, 5, True)])]
    assert ScoredGroup(prompt_of_ten, single, result).computed is None


def test_what_training_takes_is_learned_and_expected_by_unique_tokens() -> None:
    """The same seconds for as many computed tokens, whatever part of them was written."""

    def tokens(prompt: int, lengths: Sequence[int]) -> float:
        return prompt + sum(lengths)

    rules = Rules("auto", "auto", 2, 8, 200, 1, "completion", 1)
    outlook = IterationOutlook([GroupOutlook(10, 40.0, 40.0)], ["engine"])
    actual = []
    for computed in (None, (10, (180, 80))):
        learned = Learned(rules, tokens)
        timing = GroupTiming(0, "engine", 0.0, 1.0, 10, (40, 40), computed=computed)
        seconds = (270 if computed else 90) * 0.01
        learned.observe(outlook, [timing], IterationTimes(5.0, 0.1, seconds + 0.5, 0.5))
        (group,) = learned.expected(outlook)
        assert group.train_s == pytest.approx(seconds) and group.lengths == (40.0, 40.0), (
            "engines write as before"
        )
        actual.append(learned.speeds)
    assert (
        actual[0] is not None
        and actual[1] is not None
        and actual[0][1] == pytest.approx(actual[1][1])
    )

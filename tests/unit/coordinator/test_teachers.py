"""Teachers that engines compute: a group's columns, and a teacher that is lost, changes, or contradicts itself."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.roster import Roster, teacher_prefix
from pa_npu.coordinator.scoring_teachers import (
    EngineTeacher,
    PolicyTeacher,
    ScoringTeacher,
    TaughtRun,
)
from pa_npu.coordinator.teacher_witness import WITNESSES, Witnesses
from pa_npu.coordinator.teachers import Teachers
from pa_npu.data.prompts import Prompt
from pa_npu.engines.group_session import GroupSession
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import (
    EngineCapabilities,
    EngineGone,
    Generation,
    Sampling,
    Scores,
    Scoring,
)
from pa_npu.environments.protocol import EnvironmentFailed
from pa_npu.errors import ConfigError, DeadlineExceeded, InvariantViolation, UserError
from pa_npu.samples.teachers import score_columns
from pa_npu.samples.types import Sample, SampleBuilder
from tests.helpers.scripted_production import (
    GROUPS,
    ScriptedEngine,
    ScriptedRewards,
    Shelf,
    config,
    make_producer,
    prompts,
)

PROMPT = np.array([3, 4], np.int32)


def config_with(teacher: dict[str, Any], **sections: dict[str, Any]) -> Config:
    algorithm = {"name": "distill", "distill_divergence": "forward", "distill_top_k": 2}
    return config(
        algorithm=algorithm, teacher={"large": teacher}, model={"dtype": "fp32"}, **sections
    )


def said_of(tokens: np.ndarray, num_choices: int = 2, shift: float = 0.0) -> Scores:
    """What a scripted teacher says: a function of each token and its place."""
    places = np.arange(len(tokens), dtype=np.float32)
    logprobs = -(0.01 * tokens + 0.1 * places + shift).astype(np.float32)
    logprobs[0] = 0
    choices = np.stack([tokens, tokens + 1], 1).astype(np.int32)[:, :num_choices]
    of_choices = np.stack([logprobs, logprobs - 1, logprobs - 2], 1)
    return Scores(logprobs, choices, of_choices if num_choices else of_choices[:, :0], None)


class TeacherEngine:
    """Scores as `said_of`; writes the tokens 1, 2, ... with the same log-probs."""

    def __init__(self, name: str, shift: float = 0.0, writes: float = 0.0) -> None:
        self.name = name
        self.shift = shift
        self.writes = writes
        self.scored: list[list[int]] = []
        self.gone = False
        self.hangs = False
        self.capabilities = EngineCapabilities("vllm", scores_at_temperature=True)

    async def wait_ready(self, *, deadline_s: float) -> EngineCapabilities:
        return self.capabilities

    async def generate(
        self, prompt_tokens: np.ndarray, n: int, seed: int, sampling: Sampling, *, deadline_s: float
    ) -> list[Generation]:
        tokens = np.arange(1, 1 + sampling.max_tokens, dtype=np.int32)
        logprobs = said_of(np.concatenate([prompt_tokens, tokens]), 0, self.shift + self.writes)
        return [Generation(tokens, logprobs.logprobs[len(prompt_tokens) :], "", "length")]

    async def score(self, tokens: np.ndarray, scoring: Scoring, *, deadline_s: float) -> Scores:
        if self.gone:
            raise EngineGone(f"engine {self.name}: it has died")
        if self.hangs:
            raise DeadlineExceeded(f"engine {self.name}: not answered")
        self.scored.append(tokens.tolist())
        return said_of(tokens, scoring.num_choices, self.shift)

    async def probe(self, *, deadline_s: float) -> None:
        pass

    async def close(self) -> None:
        pass


class Job:
    """A teacher with engines in a roster in memory. run_dir: for its witness."""

    def __init__(
        self, run_dir: Path, engines: dict[str, TeacherEngine], temperature: float = 1.0
    ) -> None:
        chosen = config_with(
            {"model": "m", "engines": len(engines)},
            run={"dir": str(run_dir), "seed": 7},
            rollout={"temperature": temperature},
        )
        store = dist.HashStore()
        self.roster = Roster(StoreChannel(store, teacher_prefix(chosen, "large")), "")
        for url in engines:
            self.roster.announce(url)
        prompt = Prompt(0, PROMPT, "", "", {})
        inputs: Any = SimpleNamespace(
            spec=SimpleNamespace(vocab_size=1000),
            key="",
            train=SimpleNamespace(first=prompt),
            channel=lambda prefix: StoreChannel(store, prefix),
        )
        scoring = Scoring(temperature, 2)
        run = TaughtRun(chosen, inputs, scoring, Witnesses(str(run_dir)))
        self.teacher = EngineTeacher("large", run)
        self.teacher.membership._make_engine = lambda url: engines[url]  # type: ignore[assignment, return-value]
        self.prompt = prompt

    async def __aenter__(self) -> EngineTeacher:
        await self.teacher.membership.__aenter__()
        try:
            await self.teacher.ready()
        except BaseException:
            await self.teacher.membership.__aexit__()
            raise
        return self.teacher

    async def __aexit__(self, *exc_info: object) -> None:
        await self.teacher.membership.__aexit__()

    async def score(self, tokens: list[int]) -> Scores:
        sample = sample_of(tokens)
        return await self.teacher.score(self.prompt, sample, "group 1", None)


def sample_of(tokens: list[int], version: int = 5) -> Sample:
    builder = SampleBuilder(PROMPT)
    written = np.array(tokens, np.int32)
    builder.write(written, said_of(np.concatenate([PROMPT, written]), 0).logprobs[2:], version)
    return builder.finish(True, "")


async def test_a_group_leaves_with_what_its_teacher_says_of_its_trained_tokens() -> None:
    """One teacher of two: rows of the other one, which trainers hold, have blank columns."""
    names = ("large", "held")
    chosen = config(
        algorithm={"name": "distill", "distill_divergence": "forward", "distill_top_k": 2},
        data={"teacher_column": "task"},
        teacher={"large": {"url": "http://h:1"}, "held": {"model": "m"}},
    )
    rows = [
        replace(prompt, row={"task": names[number % 2]}) for number, prompt in enumerate(prompts())
    ]

    class Scripted(ScoringTeacher):
        def __init__(self, name: str, config: Config, scoring: Scoring) -> None:
            super().__init__(name, config, scoring)
            self.checked: list[int] = []

        async def score(self, prompt: Prompt, sample: Sample, label: str, session: Any) -> Scores:
            assert label.endswith("of iteration 5") and session is None
            return said_of(sample.tokens)

        async def check(self, iteration: int) -> None:
            self.checked.append(iteration)

    columns = score_columns(chosen)
    teacher = Scripted("large", chosen, Scoring())
    shelf, engine = Shelf(), ScriptedEngine("a", list(range(GROUPS)))
    with ThreadPoolExecutor(1) as store_thread:
        producer = make_producer(chosen, [engine], ScriptedRewards(), shelf, store_thread)
        producer.source.teachers = Teachers(chosen, {1: teacher}, columns)  # type: ignore[attr-defined]
        await producer.produce(5, rows)
    assert teacher.checked == [5], "once an iteration"
    for group in shelf.groups.values():
        start = 0
        for sample in group.samples([""] * group.num_samples):
            expected = said_of(sample.tokens)
            values = (expected.logprobs, expected.choices, expected.choice_logprobs)
            trained = sample.trained & (group.index % 2 == 0)
            for column, value in zip(columns, values, strict=True):
                found = group.columns[column][start : start + len(sample.tokens)]
                assert np.array_equal(found[trained], value[trained])
                assert (found[~trained] == column.elsewhere).all()
            start += len(sample.tokens)


async def test_engines_of_a_teacher_score_alike_and_leave_a_witness(tmp_path: Path) -> None:
    engines = {name: TeacherEngine(name) for name in "ab"}
    job = Job(tmp_path, engines)
    async with job:
        found = await asyncio.gather(*(job.score([7, number]) for number in range(8)))
        assert {tuple(scores.logprobs) for scores in found} == {
            tuple(said_of(np.array([3, 4, 7, number])).logprobs) for number in range(8)
        }
        assert all(engine.scored for engine in engines.values()), "each was met"
    kept = json.loads((tmp_path / WITNESSES).read_text())["teacher.large"]
    assert kept["tokens"][:2] == PROMPT.tolist() and len(kept["tokens"]) == 2 + 16


async def test_a_lost_engines_sequences_go_to_another_one(tmp_path: Path) -> None:
    engines = {name: TeacherEngine(name) for name in "ab"}
    job = Job(tmp_path, engines)
    async with job:
        engines["a"].gone = True
        found = await asyncio.gather(*(job.score([7, number]) for number in range(4)))
        assert [scores.logprobs[3] for scores in found] == [
            said_of(np.array([3, 4, 7, number])).logprobs[3] for number in range(4)
        ]
        assert job.roster.replacement_wanted(0, 0) == "engine a: it has died"
        assert [engine.name for engine in job.teacher.pool.engines] == ["b"]


async def test_a_slow_engine_that_works_is_named_with_the_keys_that_help(tmp_path: Path) -> None:
    engine = TeacherEngine("a")
    job = Job(tmp_path, {"a": engine})
    async with job:
        engine.hangs = True
        with pytest.raises(UserError, match=r"teacher\.large: engine a works, .*concurrent"):
            await job.score([7])


@pytest.mark.parametrize("when", ["in an iteration", "as an engine starts", "in a later attempt"])
async def test_a_teacher_that_changes_ends_the_run(when: str, tmp_path: Path) -> None:
    engine = TeacherEngine("a")
    job = Job(tmp_path, {"a": engine})
    async with job as teacher:
        await teacher.check(3)
        engine.shift = 0.01
        if when == "in an iteration":
            with pytest.raises(InvariantViolation, match=r"in iteration 4 differ by 0.0"):
                await teacher.check(4)
        elif when == "as an engine starts":
            with pytest.raises(InvariantViolation, match=r"of engine a differ by 0.0"):
                await teacher.meet(engine)
    if when == "in a later attempt":
        with pytest.raises(InvariantViolation, match=r"I7 gradient: teacher.large: .* is another"):
            async with Job(tmp_path, {"a": TeacherEngine("a", shift=0.01)}):
                pass
        async with Job(tmp_path, {"a": TeacherEngine("a")}):
            pass


async def test_scores_of_another_distribution_than_it_writes_by_end_the_run(tmp_path: Path) -> None:
    """As log-probs at another temperature would be."""
    job = Job(tmp_path, {"a": TeacherEngine("a", writes=0.05)})
    with pytest.raises(InvariantViolation, match=r"I5 agreement: .* differ from its scores"):
        async with job:
            pass


async def test_an_engine_that_scores_at_temperature_1_only_is_refused(tmp_path: Path) -> None:
    engine = TeacherEngine("a")
    engine.capabilities = EngineCapabilities("vllm")
    with pytest.raises(ConfigError, match=r"temperature 1 only, and rollout\.temperature = 0\.5"):
        async with Job(tmp_path, {"a": engine}, temperature=0.5):
            pass
    async with Job(tmp_path, {"a": engine}):
        pass


class PolicyEngine(TeacherEngine):
    async def score(self, tokens: np.ndarray, scoring: Scoring, *, deadline_s: float) -> Scores:
        scores = await super().score(tokens, scoring, deadline_s=deadline_s)
        return replace(scores, version=5)


async def session_of(engine: TeacherEngine) -> GroupSession:
    pool = EnginePool([engine])  # type: ignore[list-item]
    lease = await pool.admit(1, 1, lambda _: 8, 1.0)
    return GroupSession(pool, lease, lambda _: 8, deadline_s=1.0, again_deadline_s=1.0)


async def test_the_policy_scores_its_response_behind_the_prompt_with_its_hint() -> None:
    chosen = config_with({"hint_column": "hint"})
    run = TaughtRun(chosen, SimpleNamespace(), Scoring(1.0, 2), Witnesses(str(chosen.run.dir)))
    teacher = PolicyTeacher("large", run)
    prompt = Prompt(0, PROMPT, "", "", {}, hinted={"large": np.array([3, 8, 8, 4], np.int32)})
    engine, sample = PolicyEngine("a"), sample_of([7, 9])
    with await session_of(engine) as session:
        scores = await teacher.score(prompt, sample, "group 1", session)
        await teacher.score(prompt, sample, "group 2", session)
        assert engine.scored == [[3, 4, 7, 9], [3, 8, 8, 4, 7, 9], [3, 8, 8, 4, 7, 9]], (
            "without the hint it is scored once, to compare with what it was sampled with"
        )
        hinted = said_of(np.array([3, 8, 8, 4, 7, 9]))
        assert scores.logprobs[2:].tolist() == hinted.logprobs[4:].tolist()
        assert scores.choices[2:].tolist() == hinted.choices[4:].tolist()
        assert (scores.choices[:2] == -1).all()
        with pytest.raises(InvariantViolation, match=r"I1 version: .* scored by 5"):
            await teacher.score(prompt, sample_of([7], version=4), "group 1", session)
        other = Prompt(0, PROMPT + 1, "", "", {}, hinted=prompt.hinted)
        with pytest.raises(EnvironmentFailed, match=r"does not begin with its prompt"):
            await teacher.score(other, sample, "group 1", session)
        await teacher.check(1)
        engine.shift = 0.01
        with pytest.raises(InvariantViolation, match=r"I5 agreement: teacher.large: the scores"):
            await teacher.score(prompt, sample, "group 1", session)

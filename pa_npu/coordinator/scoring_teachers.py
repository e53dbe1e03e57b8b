"""The kinds of teachers that engines compute: on engines of the run's own, on a server, and the policy with a hint.

A teacher must stay what it is. At the run's start one of its engines writes a few tokens, and then
scores them: both log-probs must agree. The scores of these tokens, its witness, are kept in
RUN/teachers.json. Every engine that is started, a server that comes back, and every iteration has to
give them again, in later attempts of the run too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pa_npu.config.schema import Config
from pa_npu.control.roster import Roster, teacher_prefix
from pa_npu.coordinator.inputs import RunInputs
from pa_npu.coordinator.teacher_witness import Witness, Witnesses
from pa_npu.data.prompts import Prompt
from pa_npu.engines.client import EngineClient
from pa_npu.engines.group_session import GroupSession
from pa_npu.engines.member import Member
from pa_npu.engines.membership import EngineMembership
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import (
    EngineError,
    EngineGone,
    RolloutEngine,
    Sampling,
    Scores,
    Scoring,
)
from pa_npu.engines.registry import engine_kind
from pa_npu.engines.teacher_server import served_teacher, server_url
from pa_npu.environments.protocol import EnvironmentFailed
from pa_npu.errors import ConfigError, DeadlineExceeded, InvariantViolation, UserError
from pa_npu.planning.teachers import teacher_engine_config
from pa_npu.samples.types import Sample

logger = logging.getLogger(__name__)

# The version under which a teacher's engines serve: theirs never changes.
_VERSION = 0
_WITNESS_TOKENS = 16
_PAUSE_S = 2.0
# A request that so many engines were lost with is the cause.
_MAX_SENDS = 4
# Mean difference of log-probs of the same tokens, in nats. fp32: kernels of a pass over a whole
# sequence and of decoding differ by 1e-6 in both engines; a temperature off by 1% gives
# 1e-2. bf16: 0.01 to 0.02 between two passes; another model gives more than 0.1.
AGREES_WITHIN = {"fp32": 1e-4, "bf16": 0.05}


@dataclass(frozen=True, eq=False)
class TaughtRun:
    """What the teachers of a run share. scoring: how their engines are asked."""

    config: Config
    inputs: RunInputs
    scoring: Scoring
    witnesses: Witnesses


class ScoringTeacher(ABC):
    """A teacher whose log-probs come from an engine.

    Args:
        name: the teacher's in the configuration.
        config: the run's.
        scoring: how its engine is asked.
    """

    def __init__(self, name: str, config: Config, scoring: Scoring) -> None:
        self.name = name
        self.key = f"teacher.{name}"
        self.config = config
        self.scoring = scoring

    @abstractmethod
    async def score(
        self, prompt: Prompt, sample: Sample, label: str, session: GroupSession | None
    ) -> Scores:
        """Returns the scores of a sample's tokens, one row for each.

        session: of the group, where the engine that wrote it scores it.
        """

    @abstractmethod
    async def check(self, iteration: int) -> None:
        """Checks at an iteration's beginning that the teacher is what it was."""


class _KnownTeacher(ScoringTeacher):
    """A teacher with weights of its own, which is known by a witness. dtype: of its weights."""

    def __init__(self, name: str, run: TaughtRun, dtype: str) -> None:
        super().__init__(name, run.config, run.scoring)
        self._witnesses = run.witnesses
        self._witness = run.witnesses.read(self.key)
        self._prompt = run.inputs.train.first.tokens
        self._vocab_size = run.inputs.spec.vocab_size
        self._limit = AGREES_WITHIN[dtype]
        self._deadline_s = run.config.rollout.request_timeout_s

    async def score(
        self, prompt: Prompt, sample: Sample, label: str, session: GroupSession | None
    ) -> Scores:
        return await self._ask(sample.tokens, self.scoring, label)

    @abstractmethod
    async def _ask(self, tokens: npt.NDArray[np.int32], scoring: Scoring, label: str) -> Scores: ...

    async def check(self, iteration: int) -> None:
        assert self._witness is not None, "the teacher has been met before the first iteration"
        scores = await self._ask(
            self._witness.tokens, self._plain, f"the witness of iteration {iteration}"
        )
        self._compare(scores, f"in iteration {iteration}")

    @property
    def _plain(self) -> Scoring:
        return replace(self.scoring, num_choices=0)

    async def meet(self, engine: RolloutEngine) -> None:
        """Checks an engine that has been started: it writes and scores alike, and is the teacher
        that the run began with.

        Raises InvariantViolation.
        """
        sampling = Sampling(
            max_tokens=min(_WITNESS_TOKENS, self.config.rollout.max_response_tokens),
            temperature=self.scoring.temperature,
            ignore_eos=True,
        )
        (written,) = await engine.generate(
            self._prompt, 1, self.config.run.seed, sampling, deadline_s=self._deadline_s
        )
        tokens = np.concatenate([self._prompt, written.tokens])
        scores = await engine.score(tokens, self._plain, deadline_s=self._deadline_s)
        apart = np.abs(scores.logprobs[len(self._prompt) :] - written.logprobs)
        if not apart.mean() <= self._limit:
            raise InvariantViolation(
                f"I5 agreement: {self.key}: engine {engine.name} wrote {len(apart)} tokens with "
                f"log-probs that differ from its scores of them by {apart.mean():.3g} in the mean, "
                f"more than {self._limit:g}: scores are not those of the distribution at "
                f"rollout.temperature = {self.scoring.temperature:g}"
            )
        if self._witness is None:
            self._witness = Witness(tokens, scores.logprobs)
            self._witnesses.keep(self.key, self._witness)
        else:
            again = await engine.score(
                self._witness.tokens, self._plain, deadline_s=self._deadline_s
            )
            self._compare(again, f"of engine {engine.name}")

    def _compare(self, scores: Scores, when: str) -> None:
        assert self._witness is not None
        apart = np.abs(scores.logprobs - self._witness.logprobs)
        if not apart.mean() <= self._limit:
            raise InvariantViolation(
                f"I7 gradient: {self.key}: the teacher's log-probs {when} differ by "
                f"{apart.mean():.3g} in the mean from those that the run began with, more than "
                f"{self._limit:g}: it is another model, or has changed; restore it, or begin "
                "another run"
            )


class EngineTeacher(_KnownTeacher):
    """A teacher with engines of the run's, which the launcher starts, watches and starts again."""

    def __init__(self, name: str, run: TaughtRun) -> None:
        super().__init__(name, run, run.config.model.dtype)
        config = run.config
        teacher_config = teacher_engine_config(config, name)
        kind = engine_kind(teacher_config.rollout.backend)
        self._concurrent = config.teacher[name].concurrent
        self.pool = EnginePool(probe_timeout_s=teacher_config.rollout.probe_timeout_s)

        def make_engine(url: str) -> RolloutEngine:
            return kind.client(url, self._vocab_size, run.inputs.key)

        self.membership = EngineMembership(
            config=teacher_config.rollout,
            pool=self.pool,
            roster=Roster(run.inputs.channel(teacher_prefix(config, name)), run.inputs.key or ""),
            make_engine=make_engine,
            startup_timeout_s=config.run.startup_timeout_s,
        )

    async def open(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(self.pool)
        await stack.enter_async_context(self.membership)

    async def ready(self) -> None:
        """Waits until all its engines answer, and lets them serve."""
        await self.membership.wait_all_ready()
        members = await self.membership.members()
        for member in members:  # one after another: the first makes the witness
            await self._welcome(member)
        self.membership.serve(members, _VERSION, self._deliver)

    async def _deliver(self, member: Member, version: int) -> bool:
        await self._welcome(member)
        return True

    async def _welcome(self, member: Member) -> None:
        capabilities = member.capabilities
        at_temperature = capabilities is not None and capabilities.scores_at_temperature
        if self.scoring.temperature != 1.0 and not at_temperature:
            raise ConfigError(cannot_scale(self.key, member.name, self.scoring.temperature))
        await self.meet(member.engine)

    async def _ask(self, tokens: npt.NDArray[np.int32], scoring: Scoring, label: str) -> Scores:
        for sends in range(1, _MAX_SENDS + 1):
            lease = await self.pool.admit(
                1,
                len(tokens),
                lambda _: self._concurrent,
                self.config.deadlines.engine_wait_s,
                again=True,  # anything may come in any order
            )
            engine = lease.engine
            try:
                return await engine.score(tokens, scoring, deadline_s=self._deadline_s)
            except EngineGone as error:
                reason = str(error)
            except DeadlineExceeded as error:
                reason = await self._why_late(engine, len(tokens), label, error)
            finally:
                lease.close()
            if sends == _MAX_SENDS or not await self.pool.report_lost(engine, reason):
                raise EngineError(
                    f"{self.key}: {sends} engines were lost while they scored {label}, the last: "
                    f"{reason}"
                )
        raise AssertionError("unreachable: the loop ends by return or raise")

    async def _why_late(
        self, engine: RolloutEngine, num_tokens: int, label: str, late: DeadlineExceeded
    ) -> str:
        """Returns why an engine counts as lost. Raises UserError if it works and is too slow."""
        try:
            await engine.probe(deadline_s=self.pool.probe_timeout_s)
        except (EngineError, DeadlineExceeded) as error:
            return f"{late}, nor a probe after it: {error}"
        raise UserError(
            f"{self.key}: engine {engine.name} works, but has not scored {num_tokens} tokens of "
            f"{label} within {self._deadline_s:g} s; lower {self.key}.concurrent, give it more "
            "engines, or raise rollout.request_timeout_s"
        )


class ServerTeacher(_KnownTeacher):
    """A teacher on a server that somebody else keeps. It may be gone for as long as an engine may
    take to start.
    """

    def __init__(self, name: str, run: TaughtRun) -> None:
        super().__init__(name, run, "bf16")
        self._teacher = run.config.teacher[name]
        self._secret = run.inputs.teacher_key
        self._at_once = asyncio.Semaphore(self._teacher.concurrent)
        self._meeting = asyncio.Lock()
        self._engine: EngineClient | None = None  # that has been met

    async def open(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self._close)

    async def _close(self) -> None:
        if self._engine is not None:
            await self._engine.close()

    async def ready(self) -> None:
        """Waits until the server answers, and looks whether it is the teacher."""
        await self._ask(self._prompt, self._plain, "the first prompt")

    async def _ask(self, tokens: npt.NDArray[np.int32], scoring: Scoring, label: str) -> Scores:
        async with self._at_once:
            end_s = time.monotonic() + self.config.run.startup_timeout_s
            while True:
                engine: EngineClient | None = None
                try:
                    engine = await self._known()
                    return await engine.score(tokens, scoring, deadline_s=self._deadline_s)
                except (EngineGone, DeadlineExceeded) as error:
                    await self._wait_again(engine, error, label, end_s)

    async def _known(self) -> EngineClient:
        """Returns the server's client. One that is new is looked at first: is it the teacher?"""
        async with self._meeting:
            if self._engine is None:
                url = server_url(str(self._teacher.url))
                try:
                    model = await asyncio.to_thread(served_teacher, url, self.key, self._secret)
                except UserError as error:  # it did answer before the run
                    raise EngineGone(str(error)) from None
                engine = EngineClient(url, self._vocab_size, self._secret, served_model=model)
                try:
                    if self.scoring.temperature != 1.0:
                        await engine.wait_ready(deadline_s=self._deadline_s)
                    await self.meet(engine)
                except BaseException:
                    await engine.close()
                    raise
                self._engine = engine
            return self._engine

    async def _wait_again(
        self, engine: EngineClient | None, error: Exception, label: str, end_s: float
    ) -> None:
        """Leaves a client whose server does not answer; waits before another attempt.

        Raises EngineError at the end.
        """
        if time.monotonic() > end_s:
            raise EngineError(
                f"{self.key}.url: {self._teacher.url} has not answered for "
                f"{self.config.run.startup_timeout_s:g} s (run.startup_timeout_s), while {label} "
                f"was to be scored: {error}"
            ) from None
        logger.warning("%s does not answer, trying again: %s", self.key, error)
        if engine is not None and self._engine is engine:  # another server may come in its place
            self._engine = None
            await engine.close()
        await asyncio.sleep(_PAUSE_S)


class PolicyTeacher(ScoringTeacher):
    """The policy itself behind a prompt with a hint, scored by the version that wrote the group.

    Once an iteration it also scores a sample behind the prompt without a hint, which must give the
    log-probs that it was sampled with.
    """

    def __init__(self, name: str, run: TaughtRun) -> None:
        super().__init__(name, run.config, run.scoring)
        self._is_checked = False
        self._limit = AGREES_WITHIN[run.config.model.dtype]

    async def check(self, iteration: int) -> None:
        self._is_checked = False

    async def score(
        self, prompt: Prompt, sample: Sample, label: str, session: GroupSession | None
    ) -> Scores:
        assert session is not None, "the engine that wrote the group scores it"
        length = len(prompt.tokens)
        if not np.array_equal(sample.tokens[:length], prompt.tokens):
            raise EnvironmentFailed(
                f"{self.key}.hint_column: a sample of prompt {prompt.prompt_id} does not begin "
                "with its prompt, so that no hint can be put there; use an environment that shows "
                "the prompt as it is"
            )
        if not self._is_checked and sample.written.any():
            self._is_checked = True
            await self._check_sample(sample, label, session)
        hinted = np.concatenate([prompt.hinted[self.name], sample.tokens[length:]])
        scores = await session.score(hinted, self.scoring)
        self._check_version(scores, sample, label)
        first = len(hinted) - (len(sample.tokens) - length)

        def moved(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            rows = np.zeros((len(sample.tokens), *values.shape[1:]), values.dtype)
            rows[length:] = values[first:]
            return rows

        choices = moved(scores.choices)
        choices[:length] = -1
        return Scores(
            moved(scores.logprobs), choices, moved(scores.choice_logprobs), scores.version
        )

    async def _check_sample(self, sample: Sample, label: str, session: GroupSession) -> None:
        scores = await session.score(sample.tokens, replace(self.scoring, num_choices=0))
        written = sample.written
        apart = np.abs(scores.logprobs[written] - sample.logprobs[written])
        if not apart.mean() <= self._limit:
            raise InvariantViolation(
                f"I5 agreement: {self.key}: the scores of a sample of {label} differ from the "
                f"log-probs that it was written with by {apart.mean():.3g} in the mean, more than "
                f"{self._limit:g}"
            )

    def _check_version(self, scores: Scores, sample: Sample, label: str) -> None:
        versions = set(sample.versions[sample.written].tolist())
        if versions != {scores.version}:
            raise InvariantViolation(
                f"I1 version: {self.key}: {label} was written by weight version "
                f"{sorted(versions)}, and scored by {scores.version}"
            )


def cannot_scale(key: str, engine: str, temperature: float) -> str:
    """Returns the line for an engine that scores at temperature 1 only."""
    return (
        f"{key}: engine {engine} gives log-probs at temperature 1 only, and rollout.temperature = "
        f"{temperature:g}; set it to 1, take a release of the engine that this package knows, or "
        "let trainers hold the teacher"
    )

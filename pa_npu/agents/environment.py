"""A prompt becomes sessions, and their trees become samples: SessionEnvironment, and AgentEnvironment (environment.name=agents).

    rollout ──num_samples sessions──> a program each, or whoever takes tasks ──requests──> gateway ──> policy
                   └── ended, with outcome and reward ──> one sample per leaf

A session whose program was killed, or whose engine died, begins again with the same seeds. Its
outcome says how it ended (session.py); agent.discards names those that are not trained. Rewards are
the agents' where any session of the group has one, and then a session without one has 0; else the
run's reward functions read the transcript: what follows the first request of the session's last
branch (Session.last_leaf).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from pa_npu.agents.chat import Chat
from pa_npu.agents.gateway import Gateway
from pa_npu.agents.programs import Programs
from pa_npu.agents.session import Limits, Session, Sessions
from pa_npu.agents.tree import num_unique
from pa_npu.config.schema import Config
from pa_npu.config.sections.operation import LOOPBACK
from pa_npu.control.tasks import cancel, gather
from pa_npu.data.prompts import Prompt
from pa_npu.environments.protocol import (
    Environment,
    EnvironmentContext,
    EnvironmentFailed,
    Generate,
)
from pa_npu.samples.types import Sample

logger = logging.getLogger(__name__)

_ATTEMPTS = 4  # at a session that is lost
_GRACE_S = 10.0  # for the reward of an agent whose session has reached a limit
_COME_S = 60.0  # for an agent whose session is over, or that starts, to ask for a task


class SessionEnvironment(ABC):
    """Makes samples of sessions; who works at them is its subclass's."""

    waits_are_bounded = True  # by the limits of what a session waits for
    _loss = "its program killed by a signal; look for what kills it, such as a lack of memory"

    def __init__(self, context: EnvironmentContext) -> None:
        config = context.config
        assert config is not None, "make_environment gives it"
        self._config: Config = config
        self._settings = config.agent
        self._chat = Chat(config, context.tokenizer)
        self._limits = Limits(
            context.max_turns, config.data.max_prompt_tokens, context.max_response_tokens
        )

    @abstractmethod
    async def _attempt(self, prompt: Prompt, number: int, generate: Generate) -> Session:
        """A session that has ended, or was lost."""

    @property
    def _said(self) -> str:
        """The last that is known of whoever works at sessions."""
        return ""

    async def rollout(self, prompt: Prompt, num_samples: int, generate: Generate) -> list[Sample]:
        written = await self.sessions_of(prompt, num_samples, generate)
        rewarded = self.are_rewarded(prompt, written)
        trained = [session for session in written if session.outcome not in self._settings.discards]
        samples = [one for session in trained or written for one in self.samples(session, rewarded)]
        generate.num_trained = sum(session.tree.num_written for session in trained or written)
        generate.counted.update(
            tokens=sum(len(sample.tokens) for sample in samples), tokens_unique=num_unique(samples)
        )
        # where nothing may be trained, equal rewards give the group no advantages
        return samples if trained else [replace(sample, reward=0.0) for sample in samples]

    def are_rewarded(self, prompt: Prompt, sessions: Sequence[Session]) -> bool:
        """Whether the agents have rewarded the group. Raises EnvironmentFailed where nobody can."""
        rewarded = any(session.is_rewarded for session in sessions)
        if not rewarded and not prompt.answer and self._config.rewards_read_answers:
            raise EnvironmentFailed(
                f"environment.name: {self._config.environment.name}: no session of prompt "
                f"{prompt.prompt_id} was given a reward, and its row has no answer that "
                "reward.functions could compare with; give rewards, or answers"
            )
        return rewarded

    async def sessions_of(
        self, prompt: Prompt, num_sessions: int, generate: Generate
    ) -> list[Session]:
        """Sessions that have ended and asked the policy for something.

        Raises EnvironmentFailed where there is none.
        """
        sessions = await gather(
            [self._session(prompt, number, generate) for number in range(num_sessions)]
        )
        generate.counted.update(f"sessions_{session.outcome}" for session in sessions)
        written = [session for session in sessions if len(session.tree.nodes) > 1]
        if not written:
            raise EnvironmentFailed(
                f"environment.name: {self._config.environment.name}: no session of prompt "
                f"{prompt.prompt_id} asked the policy for anything, the last ended as "
                f"{sessions[-1].outcome} ({self._said or 'nothing was said'}); correct the agent"
            )
        return written

    async def _session(self, prompt: Prompt, number: int, generate: Generate) -> Session:
        """An attempt, begun again where it was lost."""
        for attempt in range(1, _ATTEMPTS + 1):
            session = await self._attempt(prompt, number, generate)
            if session.failure is not None:
                raise session.failure
            if not session.was_lost:
                return session
            logger.warning(
                "a session of prompt %d was lost (%d of %d times)",
                prompt.prompt_id,
                attempt,
                _ATTEMPTS,
            )
        raise EnvironmentFailed(
            f"environment.name: {self._config.environment.name}: a session of prompt "
            f"{prompt.prompt_id} was lost {_ATTEMPTS} times, {self._loss}"
        )

    def samples(self, session: Session, rewarded: bool) -> list[Sample]:
        """Those of an ended session. rewarded: whether the agents give this group's rewards."""
        reward = session.reward or 0.0 if rewarded else None
        ended = session.outcome == "done"
        return session.tree.samples(
            self._transcript(session), ended=ended, reward=reward, session=session.number
        )

    def _transcript(self, session: Session) -> str:
        """Returns as text all that follows the first request of the session's last branch."""
        path = session.last_leaf.path
        tokens = session.tree.tokens(path[-1])[len(path[0].context) :]
        return str(self._chat.tokenizer.decode(tokens.tolist(), skip_special_tokens=True))


class AgentEnvironment(SessionEnvironment):
    """sessions: of its gateway; where nobody has given it one, it serves one of its own for as long
    as it is open.
    """

    trains_all_turns = True  # of sessions that are not discarded

    def __init__(self, context: EnvironmentContext) -> None:
        context.refuse_options("agents")
        super().__init__(context)
        self._room = asyncio.Semaphore(self._settings.concurrent)
        self._stack = AsyncExitStack()
        self._staying: list[asyncio.Task[None]] = []
        self._programs: Programs | None = None
        self.sessions: Sessions | None = None

    async def open(self) -> None:
        if self.sessions is None:
            self.sessions = Sessions(secrets.token_hex(32))
            own = Gateway(self.sessions, self._config.rollout.temperature)
            await self._stack.enter_async_context(own.serving(LOOPBACK, 0, None))
        if self._settings.command is not None:
            self._programs = Programs(self._settings, self.sessions)
            self._staying = [
                asyncio.create_task(self._programs.stay(number), name=f"agent program {number}")
                for number in range(self._settings.programs or 0)
            ]

    async def close(self) -> None:
        await cancel(self._staying)
        await self._stack.aclose()

    @property
    def _said(self) -> str:
        return self._programs.last_words if self._programs is not None else ""

    async def _attempt(self, prompt: Prompt, number: int, generate: Generate) -> Session:
        assert self.sessions is not None
        async with self._room:
            session = Session(
                self.sessions.new_id(), number, task_of(prompt), generate, self._chat, self._limits
            )
            self.sessions.add(session)
            working = asyncio.ensure_future(self._work(session))
            try:
                done, _ = await asyncio.wait(
                    [working, *self._staying], return_when=asyncio.FIRST_COMPLETED
                )
                for ended in done:
                    ended.result()
            finally:
                await self.sessions.remove(session)
                await cancel([working])
            return session

    async def _work(self, session: Session) -> None:
        """Until the session has ended; its time runs from when an agent has it."""
        assert self.sessions is not None
        limit_s = self._config.deadlines.environment_timeout_s
        programs = None if self._staying else self._programs
        if programs is None:
            try:
                await self.sessions.offer(session, limit_s + _COME_S)
            except asyncio.TimeoutError:
                raise EnvironmentFailed(
                    "environment.name: agents: no agent has taken a task for "
                    f"{limit_s + _COME_S:g} s (environment.timeout_s and {_COME_S:g} s) while some "
                    f"waited; look at the agents, which ask for them at {self.sessions.url}/tasks"
                ) from None
        working = asyncio.ensure_future(
            programs.run(session) if programs is not None else session.ended()
        )
        try:
            if not (await asyncio.wait([working], timeout=limit_s))[0]:
                session.end("time")
            await working  # a program has a grace period of its own
        finally:
            await cancel([working])
        if programs is None and not session.was_lost and session.failure is None:
            await session.finished(_GRACE_S)


class EvaluatedSessions:
    """The same for evaluations: one sample of every session, its last branch, whatever its outcome."""

    waits_are_bounded = True

    def __init__(self, agents: SessionEnvironment) -> None:
        self._agents = agents

    async def rollout(self, prompt: Prompt, num_samples: int, generate: Generate) -> list[Sample]:
        sessions = await self._agents.sessions_of(prompt, num_samples, generate)
        rewarded = self._agents.are_rewarded(prompt, sessions)
        samples = []
        for session in sessions:
            place = list(session.tree.leaves()).index(session.last_leaf)
            samples.append(self._agents.samples(session, rewarded)[place])
        return samples


def evaluated(environment: Environment) -> Environment:
    """The environment as evaluations use it."""
    return (
        EvaluatedSessions(environment)
        if isinstance(environment, SessionEnvironment)
        else environment
    )


def task_of(prompt: Prompt) -> dict[str, object]:
    """Returns the task that an agent is given."""
    return {
        "prompt_id": prompt.prompt_id,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "row": prompt.row,
    }

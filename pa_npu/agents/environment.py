"""Makes samples of agents' sessions: one session per attempt at a prompt, one sample per leaf.

    rollout ──num_samples sessions──> a program each, or agents that ask for tasks ──requests──> gateway ──> policy
                   └── ended, with outcome and reward ──> one sample per leaf

A session whose program was killed, or whose engine died, begins again with the same seeds. Its
outcome is how it ended (session.py); agent.discards names the outcomes that are not trained.

If an agent has rewarded any session of a group, the group's rewards are the agents', and a session
without one gets 0. Otherwise the run's reward functions read each session's transcript: everything
behind the first request of its last branch (Session.last_leaf).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from pa_npu.agents.chat import Chat
from pa_npu.agents.gateway import Gateway
from pa_npu.agents.open_sessions import Sessions
from pa_npu.agents.openai_format import SamplingRules
from pa_npu.agents.programs import COMMAND_KEY, Programs
from pa_npu.agents.session import Session, SessionLimits
from pa_npu.agents.tree import num_unique
from pa_npu.config.schema import Config
from pa_npu.config.sections.operation import LOOPBACK
from pa_npu.config.sections.rollout import AgentConfig
from pa_npu.control.tasks import cancel, gather
from pa_npu.data.prompts import Prompt
from pa_npu.environments.protocol import (
    Environment,
    EnvironmentContext,
    EnvironmentFailed,
    Generate,
)
from pa_npu.samples.types import Sample
from pa_npu.vision.images import ShownImage, data_url

logger = logging.getLogger(__name__)

_ATTEMPTS = 4  # how often a session is begun that is lost each time
_GRACE_S = 10.0  # an agent may still give a reward after its session has reached a limit
_TASK_REQUEST_S = 60.0  # an agent that starts, or ends a session, asks for a task within this


class SessionEnvironment(ABC):
    """Makes samples of sessions. A subclass decides who works at them."""

    waits_are_bounded = True  # everything that a session waits for has a limit
    shows_own_images = True  # those of its requests
    _loss_reason = (
        "its program killed by a signal; look for what kills it, such as a lack of memory"
    )

    def __init__(self, context: EnvironmentContext) -> None:
        config = context.config
        assert config is not None, "make_environment passes it"
        self._config: Config = config
        self._settings = config.agent
        self._chat = Chat(config, context.tokenizer)
        self._limits = SessionLimits(
            turns=context.max_turns,
            prompt=config.data.max_prompt_tokens,
            response=context.max_response_tokens,
        )
        self._rules = SamplingRules(
            temperature=config.rollout.temperature,
            as_sampled=frozenset(config.agent.serve_as_sampled),
            template_options=config.data.template_options,
        )

    def _new_session(self, number: int, generate: Generate) -> Session:
        """Returns a session that the environment itself plays, not a program at the gateway."""
        return Session(
            id=secrets.token_hex(8),
            number=number,
            task={},
            generate=generate,
            chat=self._chat,
            limits=self._limits,
            rules=self._rules,
        )

    @abstractmethod
    async def _attempt(self, prompt: Prompt, number: int, generate: Generate) -> Session:
        """Returns a session that has ended, or was lost."""

    @property
    def _agent_output(self) -> str:
        """The last output of the agents, for error messages; empty if it is not known."""
        return ""

    async def rollout(self, prompt: Prompt, num_samples: int, generate: Generate) -> list[Sample]:
        written = await self.sessions_of(prompt, num_samples, generate)
        rewarded = self.are_rewarded(prompt, written)
        trained = [session for session in written if session.outcome not in self._settings.discards]
        used = trained or written
        samples: list[Sample] = []
        for session in used:
            samples += await self.samples(session, rewarded)

        generate.num_trained = sum(session.tree.num_written for session in used)
        generate.counted.update(
            tokens=sum(len(sample.tokens) for sample in samples), tokens_unique=num_unique(samples)
        )
        if not trained:
            # nothing may be trained, and equal rewards give a group no advantages
            return [replace(sample, reward=0.0) for sample in samples]
        return samples

    def are_rewarded(self, prompt: Prompt, sessions: Sequence[Session]) -> bool:
        """Returns whether the agents have rewarded the group.

        Raises EnvironmentFailed if they have not and no reward function can.
        """
        rewarded = any(session.is_rewarded for session in sessions)
        if not rewarded and not prompt.answer and self._config.reward.reads_answers:
            raise EnvironmentFailed(
                f"environment.name: {self._config.environment.name}: no session of prompt "
                f"{prompt.prompt_id} was given a reward, and its row has no answer that "
                "reward.functions could compare with; give rewards, or answers"
            )
        return rewarded

    async def sessions_of(
        self, prompt: Prompt, num_sessions: int, generate: Generate
    ) -> list[Session]:
        """Returns the ended sessions in which the policy wrote something.

        Raises EnvironmentFailed if there is none.
        """
        sessions = await gather(
            [self._session(prompt, number, generate) for number in range(num_sessions)]
        )
        for session in sessions:
            generate.counted[f"sessions_{session.outcome}"] += 1
            generate.counted.update(f"sessions_as_sampled_{name}" for name in session.as_sampled)
        written = [session for session in sessions if len(session.tree.nodes) > 1]
        if not written:
            raise EnvironmentFailed(
                f"environment.name: {self._config.environment.name}: no session of prompt "
                f"{prompt.prompt_id} asked the policy for anything, the last ended as "
                f"{sessions[-1].outcome} ({self._agent_output or 'it wrote nothing'}); correct the "
                "agent"
            )
        return written

    async def _session(self, prompt: Prompt, number: int, generate: Generate) -> Session:
        """Returns an ended session, which is begun again if it was lost."""
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
            f"{prompt.prompt_id} was lost {_ATTEMPTS} times, {self._loss_reason}"
        )

    async def samples(self, session: Session, rewarded: bool) -> list[Sample]:
        """Returns an ended session's samples. rewarded: the agents reward this group."""
        reward = None
        if rewarded:
            reward = session.reward or 0.0
        make = partial(
            session.tree.samples,
            self._transcript(session),
            ended=session.outcome == "done",
            reward=reward,
            session=session.number,
        )
        has_images = any(node.images for node in session.tree.nodes)
        return await asyncio.to_thread(make) if has_images else make()

    def _transcript(self, session: Session) -> str:
        """Returns the text behind the first request of the session's last branch."""
        path = session.last_leaf.path
        tokens = session.tree.tokens(path[-1])[len(path[0].context) :]
        return str(self._chat.tokenizer.decode(tokens.tolist(), skip_special_tokens=True))


class AgentEnvironment(SessionEnvironment):
    """environment.name=agents: programs, or agents that ask for tasks, work through a gateway.

    sessions: those of the run's gateway. If the run serves none, the environment serves a gateway
    of its own from `open` until it closes.
    """

    trains_all_turns = True  # all turns of sessions that are not discarded
    trains_in_context = True  # as requests showed it
    _command_key = COMMAND_KEY  # which decides what programs do, for messages

    def __init__(self, context: EnvironmentContext) -> None:
        context.refuse_options("agents")
        super().__init__(context)
        self._room = asyncio.Semaphore(self._settings.concurrent)
        self._stack = AsyncExitStack()
        self._staying: list[asyncio.Task[None]] = []
        self._programs: Programs | None = None
        self.sessions: Sessions | None = context.sessions

    async def open(self) -> None:
        if self.sessions is None:
            self.sessions = Sessions(secrets.token_hex(32))
            gateway = Gateway(self.sessions)
            await self._stack.enter_async_context(gateway.serving(LOOPBACK, 0, None))
        settings = self._program_settings()
        if settings.command is not None:
            self._programs = Programs(settings, self.sessions, self._command_key)
            self._staying = [
                asyncio.create_task(self._programs.stay(number), name=f"agent program {number}")
                for number in range(settings.programs or 0)
            ]

    def _program_settings(self) -> AgentConfig:
        """Returns the keys by which programs are started. Called once, when the environment opens."""
        return self._settings

    async def close(self) -> None:
        await cancel(self._staying)
        await self._stack.aclose()

    @property
    def _agent_output(self) -> str:
        return "" if self._programs is None else self._programs.last_output

    async def _attempt(self, prompt: Prompt, number: int, generate: Generate) -> Session:
        assert self.sessions is not None
        async with self._room:
            session = Session(
                id=self.sessions.new_id(),
                number=number,
                task=await task_of(prompt),
                generate=generate,
                chat=self._chat,
                limits=self._limits,
                rules=self._rules,
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
        """Returns once the session has ended. Its time limit starts when an agent has its task."""
        assert self.sessions is not None
        limit_s = self._config.deadlines.environment_timeout_s
        programs = None if self._staying else self._programs
        if programs is None:
            try:
                await self.sessions.offer(session, limit_s + _TASK_REQUEST_S)
            except asyncio.TimeoutError:
                raise EnvironmentFailed(
                    f"environment.name: {self._config.environment.name}: no agent has taken a task for "
                    f"{limit_s + _TASK_REQUEST_S:g} s (environment.timeout_s and {_TASK_REQUEST_S:g} s) while some "
                    f"waited; look at the agents, which ask for them at {self.sessions.url}/tasks"
                ) from None
        work = session.ended() if programs is None else programs.run(session)
        working = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait([working], timeout=limit_s)
            if not done:
                session.end("time")
            await working  # a program has a grace period of its own
        finally:
            await cancel([working])
        if programs is None and not session.was_lost and session.failure is None:
            await session.finished(_GRACE_S)


class EvaluatedSessions:
    """Sessions as evaluations use them: the last branch of each, whatever its outcome."""

    waits_are_bounded = True
    shows_own_images = True

    def __init__(self, agents: SessionEnvironment) -> None:
        self._agents = agents

    async def rollout(self, prompt: Prompt, num_samples: int, generate: Generate) -> list[Sample]:
        sessions = await self._agents.sessions_of(prompt, num_samples, generate)
        rewarded = self._agents.are_rewarded(prompt, sessions)
        samples = []
        for session in sessions:
            leaves = list(session.tree.leaves())
            index = leaves.index(session.last_leaf)
            samples.append((await self._agents.samples(session, rewarded))[index])
        return samples


def evaluated(environment: Environment) -> Environment:
    """Returns the environment in the form that evaluations use: one sample per attempt."""
    if isinstance(environment, SessionEnvironment):
        return EvaluatedSessions(environment)
    return environment


async def task_of(prompt: Prompt) -> dict[str, object]:
    """Returns the task that an agent gets for a prompt, as a JSON object.

    It has the prompt's images, if there are any, as data URLs.
    """
    task: dict[str, object] = {
        "prompt_id": prompt.prompt_id,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "row": prompt.row,
    }
    if prompt.images:
        task["images"] = await asyncio.to_thread(_image_urls, prompt.images)
    return task


def _image_urls(images: Sequence[ShownImage]) -> list[str]:
    return [data_url(image.reader.content(image.file)) for image in images]

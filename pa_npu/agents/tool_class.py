"""Runs episodes of a class whose methods are tools (environment.name=tool_class), TRL's environment_factory.

    reset(**row) ──text──> last message of the user ──> policy ──calls──> methods ──results──> policy ... answer
                                                                                   get_reward() ──> the reward

The policy calls tools in its own format (agent.tool_parser). An episode ends with an answer that
calls none, or at a limit of the run. `get_reward`, if the class has it, gives the episode's reward;
otherwise reward.functions read its transcript. Instances live in processes of their own; a call
that takes longer than environment.timeout_s ends its process, its episode counts as failed, and the
other episodes of that process begin again with the same seeds.

environment.options:
    factory     module:Class, or module:function that makes an instance; or several by name, of
                which the row's column `environment` chooses
    processes   how many processes hold instances; calls of one process run one after another
                (default 4)
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from pa_npu.agents.environment import SessionEnvironment
from pa_npu.agents.openai_format import AgentRequest, AgentRequestRefused
from pa_npu.agents.session import Session
from pa_npu.control.tasks import gather
from pa_npu.control.worker_process import WorkerProcess, json_line
from pa_npu.data.messages import is_image_part, with_image_parts
from pa_npu.data.prompts import Prompt
from pa_npu.environments.protocol import EnvironmentContext, EnvironmentFailed, Generate
from pa_npu.errors import ConfigError, DeadlineExceeded
from pa_npu.rewards.values import NotAReward, as_reward
from pa_npu.vision.images import ShownImage

_MODULE = "pa_npu.agents.tool_class_worker"
_STARTUP_TIMEOUT_S = 60.0  # importing a user's module on a busy machine
_DEFAULT_PROCESSES = 4
_MAX_PROCESSES = 256
_ONLY = ""  # name of a factory that is the only one

logger = logging.getLogger(__name__)


class ToolClassEnvironment(SessionEnvironment):
    """Plays each session as an episode of the class that environment.options.factory names."""

    trains_all_turns = True
    trains_in_context = True
    _loss_reason = "its process ended each time; look at what the class's methods do"

    def __init__(self, context: EnvironmentContext) -> None:
        context.refuse_options("tool_class", ("factory", "processes"))
        super().__init__(context)
        self._factories = _factories(context.options.get("factory"))
        count = context.options.get("processes", _DEFAULT_PROCESSES)
        if type(count) is not int or not 1 <= count <= _MAX_PROCESSES:
            raise ConfigError(
                f"environment.options: processes must be 1 to {_MAX_PROCESSES}, not {count!r:.60}"
            )
        self._timeout_s = context.timeout_s
        self._places = [_Place(self._factories, context.timeout_s) for _ in range(count)]

    async def open(self) -> None:
        first, *others = self._places
        await first.start()
        for place in others:
            place.tools = first.tools
        await gather([place.start() for place in others])
        for name, tools in first.tools.items():
            question = [{"role": "user", "content": "?"}]
            if self._chat.render(question, tools) == self._chat.render(question, ()):
                logger.warning(
                    "environment.options: factory %s: the chat template shows the policy no tools; "
                    "name one that does with data.chat_template, or describe them in the prompt",
                    self._factories[name],
                )

    async def close(self) -> None:
        await gather([place.close() for place in self._places])

    async def trial(self, prompt: Prompt) -> None:
        """Begins one episode before a run. Raises ConfigError if `reset` fails."""
        place = self._places[0]
        episode = secrets.token_hex(8)
        try:
            await place.ask(self._reset(episode, prompt))
            await place.ask({"id": episode, "close": True})
        except (_ProcessGone, EnvironmentFailed) as error:
            raise ConfigError(f"environment.options: factory: {error}; correct the class") from None

    async def _attempt(self, prompt: Prompt, number: int, generate: Generate) -> Session:
        session = self._new_session(number, generate)
        place = min(self._places, key=lambda place: place.num_episodes)
        place.num_episodes += 1
        try:
            await self._play(session, place, prompt)
        except _ProcessGone as gone:
            if gone.is_own:
                logger.warning("environment.name: tool_class: %s; its episode has failed", gone)
                session.reward = 0.0
                session.end("failed")
            else:
                session.lose()
        finally:
            place.num_episodes -= 1
            await session.close()
        return session

    async def _play(self, session: Session, place: _Place, prompt: Prompt) -> None:
        """Plays an episode from its reset to its reward. Raises _ProcessGone if its process ended."""
        reset = self._reset(session.id, prompt)
        generation = place.generation  # an episode ends with the process that it began in
        observation = (await place.ask(reset))["observation"]
        name = reset["factory"]
        messages = _with_observation(prompt, observation)
        tools = place.tools[name]
        while True:
            request = AgentRequest({"messages": messages, "tools": tools})
            try:
                turn = await session.chat_turn(request)
            except AgentRequestRefused as refused:
                if session.failure is not None:
                    return
                if refused.code is None:  # not because of a limit of the run
                    raise EnvironmentFailed(
                        f"environment.name: tool_class: prompt {prompt.prompt_id}: messages that "
                        f"the policy cannot be shown: {refused}"
                    ) from None
                break
            answer = turn.answer.message
            calls = answer.get("tool_calls")
            if not calls:
                break
            messages = [*messages, answer]
            for call in calls:
                result = await self._call(place, generation, session.id, call["function"])
                messages.append(
                    {
                        "role": "tool",
                        "name": call["function"]["name"],
                        "tool_call_id": call["id"],
                        "content": result,
                    }
                )
        if name in place.rewarding:
            answer = await place.ask({"id": session.id, "reward": True}, generation)
            session.reward = _reward(self._factories[name], answer["reward"])
        session.end("done")
        await place.ask({"id": session.id, "close": True}, generation)

    async def _call(
        self, place: _Place, generation: int, episode: str, function: Mapping[str, Any]
    ) -> str:
        """Returns a tool's answer to one call of the policy."""
        arguments = function["arguments"]
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                arguments = None
        if not isinstance(arguments, dict):
            return str({"error": "the arguments are no JSON object"})
        request = {"id": episode, "call": function["name"], "arguments": arguments}
        return str((await place.ask(request, generation))["result"])

    def _reset(self, episode: str, prompt: Prompt) -> dict[str, Any]:
        """Returns the request that begins an episode. Raises EnvironmentFailed."""
        row = dict(prompt.row)
        name = _ONLY
        if _ONLY not in self._factories:
            name = str(row.pop("environment", None))
            if name not in self._factories:
                raise EnvironmentFailed(
                    f"environment.options: factory: prompt {prompt.prompt_id} has `environment` = "
                    f"{name!r:.80}, not one of {', '.join(self._factories)}; correct the row"
                )
        return {"id": episode, "factory": name, "reset": row}


class _ProcessGone(Exception):
    """A process with instances ended. is_own: the call that asks was running in it."""

    def __init__(self, reason: str, is_own: bool) -> None:
        super().__init__(reason)
        self.is_own = is_own


class _Place:
    """One process with instances, which is replaced when it ends.

    generation: number of the process, which grows with each replacement.
    tools: descriptions of the tools, by factory.
    rewarding: factories whose instances give rewards.
    num_episodes: how many episodes use it.
    """

    def __init__(self, factories: Mapping[str, str], timeout_s: float) -> None:
        self.generation = 0
        self.tools: dict[str, list[dict[str, Any]]] = {}
        self.rewarding: frozenset[str] = frozenset()
        self.num_episodes = 0
        self._factories = factories
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._worker: WorkerProcess | None = None

    async def start(self) -> None:
        """Starts the process. Raises ConfigError if the classes cannot be used."""
        named = f"environment.options: factory: {', '.join(self._factories.values())}"
        first = {"factories": self._factories, "with_tools": not self.tools}
        try:
            worker = await WorkerProcess.start([_MODULE], first, _STARTUP_TIMEOUT_S)
        except DeadlineExceeded as late:
            raise ConfigError(f"{named}: {late}; correct the class") from None
        problem = "its process ended while importing it, see the log"
        if worker.ready:
            problem = worker.ready.get("unusable", "")
        if problem:
            await worker.reap()
            raise ConfigError(f"{named}: {problem.removeprefix('environment.options.factory: ')}")
        self.tools = self.tools or worker.ready["tools"]
        self.rewarding = frozenset(worker.ready["rewards"])
        self._worker = worker

    async def ask(
        self, request: Mapping[str, Any], generation: int | None = None
    ) -> dict[str, Any]:
        """Returns the answer to a request; requests of a process run one after another.

        generation: of the process in which the episode began; None begins one.
        Raises _ProcessGone if that process has ended, EnvironmentFailed if the class fails.
        """
        async with self._turn:
            if generation is not None and generation != self.generation:
                raise _ProcessGone("its process was replaced", is_own=False)
            if self._worker is None:
                await self.start()
            assert self._worker is not None
            self._worker.write(json_line(request))
            try:
                answer = await asyncio.wait_for(self._worker.read(), self._timeout_s)
                reason = "its process ended, or wrote what cannot be read"
            except asyncio.TimeoutError:
                answer = None
                reason = f"no answer within environment.timeout_s = {self._timeout_s:g} s"
            if answer is None:
                await self._replace()
                raise _ProcessGone(f"{_named(request)}: {reason}", is_own=True)
        if "failure" in answer:
            raise EnvironmentFailed(
                f"environment.options: factory: {_named(request)} failed ({answer['failure']})"
            )
        return answer

    async def _replace(self) -> None:
        await self.close()
        self.generation += 1

    async def close(self) -> None:
        """Ends the process; a later request starts another."""
        worker = self._worker
        self._worker = None
        if worker is not None:
            await worker.reap()


def _named(request: Mapping[str, Any]) -> str:
    if "call" in request:
        return f"the tool {str(request['call'])[:80]}"
    return "get_reward" if "reward" in request else "reset"


def _factories(option: Any) -> dict[str, str]:
    """Returns the places of the classes by name. Raises ConfigError."""
    factories = option if isinstance(option, Mapping) else {_ONLY: option}
    for place in factories.values():
        if not isinstance(place, str) or ":" not in place:
            raise ConfigError(
                "environment.options: factory must be module:Class, or several by name, not "
                f"{option!r:.80}"
            )
    if not factories:
        raise ConfigError("environment.options: factory names no class; write module:Class")
    return {str(name): place for name, place in factories.items()}


def _with_observation(prompt: Prompt, observation: str | None) -> list[dict[str, Any]]:
    """Returns the prompt's messages, with what `reset` returned behind the last one."""
    messages = [dict(message) for message in prompt.messages]
    if not messages:
        messages = [{"role": "user", "content": prompt.text}]
    if observation:
        messages[-1]["content"] += observation
    return with_images(messages, prompt.images)


def with_images(
    messages: Sequence[dict[str, Any]], images: Sequence[ShownImage]
) -> list[dict[str, Any]]:
    """Returns a prompt's messages with its images as parts, in place of their marks."""
    if not images:
        return list(messages)
    left = iter(images)
    shown = []
    for message in messages:
        message = with_image_parts(message)
        if not isinstance(message["content"], str):
            parts = [
                {**part, "image": next(left)} if is_image_part(part) else part
                for part in message["content"]
            ]
            message = {**message, "content": parts}
        shown.append(message)
    return shown


def _reward(factory: str, value: Any) -> float | None:
    """Returns an episode's reward; None if the class gives none. Raises EnvironmentFailed."""
    if value is None:
        return None
    try:
        if isinstance(value, bool):
            return float(value)
        return as_reward(value)
    except NotAReward as error:
        raise EnvironmentFailed(
            f"environment.options: factory: get_reward of {factory} gave no finite number: {error}"
        ) from None

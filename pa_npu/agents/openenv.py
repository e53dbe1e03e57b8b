"""Runs episodes of an OpenEnv server (environment.name=remote, environment.options.protocol=openenv).

An episode is one WebSocket of the server, URL/ws, as OpenEnv's own client uses it (0.10):

    {"type": "reset", "data": {"seed", "episode_id", and the row's columns}}
    {"type": "step", "data": the action}
    {"type": "close"}
    answers  {"type": "observation", "data": {"observation": {...}, "reward", "done"}}
             {"type": "error", "data": {"message", "code"}}

The server passes on to `reset` what its parameters name. An action is an object: the policy's text
in the field that `action` names, or the JSON object that the policy writes. What the policy is
shown is the text of the field that `observation` names, as a user's message. An action that the
server refuses is answered to the policy as `error: ...`, so that it can do better.

environment.options:
    url                 the server's, http or https
    api_key_variable    as for Gymnasium's protocol
    action              field of the action that gets the policy's text; without it the policy must
                        write the action as a JSON object
    observation         field of the observation that the policy is shown; without it the only text
                        among the fields, or all of them as JSON
    concurrent          episodes at once (default 8); a server has a limit of its own
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from pa_npu.agents.environment import SessionEnvironment
from pa_npu.agents.openai_format import AgentRequest, AgentRequestRefused
from pa_npu.agents.remote import read_address
from pa_npu.agents.session import Session
from pa_npu.data.prompts import Prompt
from pa_npu.environments.protocol import EnvironmentContext, EnvironmentFailed, Generate
from pa_npu.errors import ConfigError
from pa_npu.rewards.values import NotAReward, as_reward

_OPTIONS = ("url", "api_key_variable", "action", "observation", "concurrent")
_MAX_BYTES = 1 << 20  # of one message
_MAX_CONCURRENT = 4096
_SHOWN_CHARACTERS = 200
_PAUSE_S = 2.0  # before the next attempt, while the server may be restarting
_FULL = "CAPACITY_REACHED"


@dataclass(frozen=True)
class _Observed:
    """What the server answered to reset or step. is_error: it refused the action."""

    text: str
    reward: float
    done: bool
    is_error: bool = False


class OpenEnvEnvironment(SessionEnvironment):
    """Plays each session as an episode of an OpenEnv server."""

    trains_all_turns = True
    trains_in_context = True

    def __init__(self, context: EnvironmentContext) -> None:
        context.refuse_options("remote with protocol=openenv", _OPTIONS)
        super().__init__(context)
        self._timeout_s = context.timeout_s
        self._url, self._headers = read_address(context.options)
        self._action = _field(context.options, "action")
        self._observation = _field(context.options, "observation")
        concurrent = context.options.get("concurrent", 8)
        if type(concurrent) is not int or not 1 <= concurrent <= _MAX_CONCURRENT:
            raise ConfigError(
                f"environment.options: concurrent must be 1 to {_MAX_CONCURRENT}, not "
                f"{concurrent!r:.60}"
            )
        self._room = asyncio.Semaphore(concurrent)
        self._http: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._http = aiohttp.ClientSession(trust_env=False, connector=aiohttp.TCPConnector(limit=0))

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def trial(self, prompt: Prompt) -> None:
        """Resets one episode before a run. Raises ConfigError if the server cannot be used."""
        try:
            async with self._connected() as socket:
                await self._reset(socket, secrets.token_hex(8), prompt)
        except OSError as error:
            raise ConfigError(
                f"environment.options: url: {error}; start the environment's server, or correct "
                "the address"
            ) from None
        except EnvironmentFailed as failed:
            raise ConfigError(str(failed)) from None

    async def _attempt(self, prompt: Prompt, number: int, generate: Generate) -> Session:
        session = self._new_session(number, generate)
        session.reward = 0.0
        try:
            async with self._room, self._connected() as socket:
                await self._play(session, socket, prompt)
        except OSError as error:
            self._loss_reason = f"the last time since {error}; look at the server"
            session.lose()
            await asyncio.sleep(_PAUSE_S)
        finally:
            await session.close()
        return session

    async def _play(
        self, session: Session, socket: aiohttp.ClientWebSocketResponse, prompt: Prompt
    ) -> None:
        """Plays an episode from its reset to its end. Raises OSError if the server is gone."""
        observed = await self._reset(socket, session.id, prompt)
        messages = [{"role": "user", "content": observed.text}]
        while True:
            try:
                turn = await session.chat_turn(AgentRequest({"messages": messages}))
            except AgentRequestRefused as refused:
                if session.failure is not None:
                    return
                if refused.code is None:  # not because of a limit of the run
                    raise self._bad_answer(
                        f"an observation that the policy cannot be shown: {refused}"
                    ) from None
                session.end("done")
                return
            observed = await self._step(socket, turn.answer.text)
            turn.node.reward = observed.reward
            if observed.done:
                session.end("done")
                return
            messages = [*messages, turn.answer.message, {"role": "user", "content": observed.text}]

    async def _reset(
        self, socket: aiohttp.ClientWebSocketResponse, episode_id: str, prompt: Prompt
    ) -> _Observed:
        data = {**prompt.row, "seed": prompt.prompt_id, "episode_id": episode_id}
        observed = await self._ask(socket, "reset", data)
        if observed.is_error:
            raise self._bad_answer(f"the error {observed.text!r} for a reset")
        return observed

    async def _step(self, socket: aiohttp.ClientWebSocketResponse, text: str) -> _Observed:
        """Returns what the server answers to the policy's text."""
        action: Any = {self._action: text}
        if self._action is None:
            try:
                action = json.loads(text)
            except (ValueError, RecursionError):
                action = None
            if not isinstance(action, dict):
                return _Observed("error: write the action as a JSON object", 0.0, False, True)
        return await self._ask(socket, "step", action)

    async def _ask(
        self, socket: aiohttp.ClientWebSocketResponse, kind: str, data: Mapping[str, Any]
    ) -> _Observed:
        """Returns the answer to one message.

        Raises OSError if the server is gone, EnvironmentFailed if it answers anything else.
        """
        try:
            await socket.send_str(json.dumps({"type": kind, "data": data}, default=str))
            reply = await socket.receive(self._timeout_s)
        except asyncio.TimeoutError:
            raise OSError(
                f"{self._url}/ws gave no answer to a {kind} in {self._timeout_s:g} s"
            ) from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise OSError(f"{self._url}/ws: {error}") from None
        if reply.type is not aiohttp.WSMsgType.TEXT:
            raise OSError(f"{self._url}/ws closed its connection during a {kind}")
        try:
            answer = json.loads(reply.data)
        except (ValueError, RecursionError):
            answer = None
        content = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(content, dict):
            raise self._bad_answer(f"{reply.data[:_SHOWN_CHARACTERS]!r}")
        if answer["type"] == "error":
            return self._refusal(content)
        observation = content.get("observation")
        done = content.get("done")
        if answer["type"] != "observation" or not isinstance(observation, dict):
            raise self._bad_answer(f"{reply.data[:_SHOWN_CHARACTERS]!r}, no observation")
        if not isinstance(done, bool):
            raise self._bad_answer("no true or false as `done`")
        return _Observed(self._text(observation), self._reward(content.get("reward")), done)

    def _refusal(self, content: Mapping[str, Any]) -> _Observed:
        """Returns the server's refusal of an action as the policy reads it."""
        if content.get("code") == _FULL:
            raise EnvironmentFailed(
                f"environment.options: concurrent: {self._url} takes "
                f"{content.get('max_sessions', 'fewer')} episodes at once; set concurrent to that, "
                "or start the server with more"
            )
        text = str(content.get("message"))
        errors = content.get("errors")
        if isinstance(errors, list) and errors and isinstance(errors[0], dict):  # of pydantic
            place = ".".join(str(part) for part in errors[0].get("loc", ()))
            text = f"{text}: {place}: {errors[0].get('msg')}"
        text = " ".join(text.split())[:_SHOWN_CHARACTERS]
        return _Observed(f"error: {text}", 0.0, False, True)

    def _text(self, observation: Mapping[str, Any]) -> str:
        """Returns what the policy is shown of an observation."""
        if self._observation is not None:
            if self._observation not in observation:
                raise EnvironmentFailed(
                    f"environment.options: observation: {self._url} has no field "
                    f"{self._observation!r:.80} (fields: {', '.join(observation)}); name one of these"
                )
            value = observation[self._observation]
            return value if isinstance(value, str) else json.dumps(value)
        fields = {name: value for name, value in observation.items() if name != "metadata"}
        texts = [value for value in fields.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(fields)

    def _reward(self, value: Any) -> float:
        """Returns a step's reward; 0 where the server gives none."""
        if value is None or isinstance(value, bool):
            return float(bool(value))
        try:
            return as_reward(value)
        except NotAReward as error:
            raise self._bad_answer(f"no finite number `reward`: {error}") from None

    @contextlib.asynccontextmanager
    async def _connected(self) -> Any:
        """Yields an episode's connection. Raises OSError if there is none."""
        assert self._http is not None
        url = self._url.replace("http", "ws", 1) + "/ws"
        try:
            socket = await asyncio.wait_for(
                self._http.ws_connect(url, headers=self._headers, max_msg_size=_MAX_BYTES),
                self._timeout_s,
            )
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            reason = " ".join(str(error).split()) or f"no answer within {self._timeout_s:g} s"
            raise OSError(f"{self._url}/ws cannot be connected to ({reason})") from None
        try:
            yield socket
        finally:
            with contextlib.suppress(Exception):  # the server may be gone
                await socket.send_str(json.dumps({"type": "close"}))
                await asyncio.wait_for(socket.close(), self._timeout_s)

    def _bad_answer(self, answer: str) -> EnvironmentFailed:
        return EnvironmentFailed(
            f"environment.options: url: {self._url}/ws gave {answer}; correct the server, or set "
            "protocol to the one that it speaks (docs/agents.md)"
        )


def _field(options: Mapping[str, Any], name: str) -> str | None:
    """Returns an option that names a field. Raises ConfigError."""
    value = options.get(name)
    if value is None or (isinstance(value, str) and value):
        return value
    raise ConfigError(f"environment.options: {name} must name a field, not {value!r:.60}")

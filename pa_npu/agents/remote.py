"""RemoteEnvironment: a server with Gymnasium's reset and step makes the observations (environment.name=remote).

    POST URL/reset  {"id", "seed", "options": {"prompt_id", "prompt", "answer", "row"}}     {"observation"}
    POST URL/step   {"id", "action"}                         {"observation", "reward", "terminated", "truncated"}
    POST URL/close  {"id"}     an episode that a limit of the run ended; the answer does not matter

An observation is a text, which becomes a user's message, or a list of messages. The action is what
the policy wrote to it, as a text. A step's reward is its turn's; an episode's reward is their sum.
The seed is the prompt's, so that all attempts at it begin alike. Every answer has
environment.timeout_s; an episode whose server is gone begins again, with the same seeds.

environment.options:
    url                 of the server, http or https
    api_key_variable    the environment variable that holds its key, sent as
                        `Authorization: Bearer`; none sends no key
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from pa_npu.agents.environment import SessionEnvironment, task_of
from pa_npu.agents.openai_format import Asked, Refused
from pa_npu.agents.session import Session
from pa_npu.control.bounded_http import bounded_request
from pa_npu.data.prompts import Prompt
from pa_npu.environments.protocol import EnvironmentContext, EnvironmentFailed, Generate
from pa_npu.errors import ConfigError
from pa_npu.rewards.values import NotAReward, as_reward

_SHOWN_CHARACTERS = 120
_PAUSE_S = 2.0  # for a server that is started again
_FORGOTTEN = (404, 410)  # what a server says that was started again


class RemoteEnvironment(SessionEnvironment):
    """See the module's docstring."""

    trains_all_turns = True

    def __init__(self, context: EnvironmentContext) -> None:
        context.refuse_options("remote", ("url", "api_key_variable"))
        super().__init__(context)
        self._timeout_s = context.timeout_s
        self._headers = {"Content-Type": "application/json"}
        url, variable = (context.options.get(name) for name in ("url", "api_key_variable"))
        parts = urlsplit(url if isinstance(url, str) else "")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                "environment.options: url must be that of the environment's server, such as "
                f"http://HOST:PORT, not {url!r:.80}"
            )
        self._url = parts.geturl().rstrip("/")
        if variable is not None:
            if not (key := os.environ.get(str(variable))):
                raise ConfigError(
                    f"environment.options: api_key_variable names {variable!r:.80}, which is not "
                    "set; set it, or leave it out"
                )
            self._headers["Authorization"] = f"Bearer {key}"
        self._http: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._http = aiohttp.ClientSession(
            auto_decompress=False, trust_env=False, connector=aiohttp.TCPConnector(limit=0)
        )

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def trial(self, prompt: Prompt) -> None:
        """Resets one episode before a run. Raises ConfigError where the server is not there."""
        name = secrets.token_hex(8)
        try:
            answer = await self._ask(
                "reset", {"id": name, "seed": prompt.prompt_id, "options": task_of(prompt)}
            )
        except OSError as error:
            raise ConfigError(
                f"environment.options: url: {error}; start the environment's server, or correct "
                "the address"
            ) from None
        self._messages("reset", answer)
        await self._close_episode(name)

    async def _attempt(self, prompt: Prompt, number: int, generate: Generate) -> Session:
        session = Session(secrets.token_hex(8), number, {}, generate, self._chat, self._limits)
        session.reward = 0.0
        try:
            await self._play(session, prompt)
        except OSError as error:
            self._loss = f"the last time since {error}; look at the server"
            session.lose()
            await asyncio.sleep(_PAUSE_S)
        finally:
            await session.close()
        return session

    async def _play(self, session: Session, prompt: Prompt) -> None:
        """An episode, from its reset to its end. Raises OSError where the server is gone."""
        begin = {"id": session.id, "seed": prompt.prompt_id, "options": task_of(prompt)}
        messages = self._messages("reset", await self._ask("reset", begin))
        while True:
            try:
                turn = await session.chat_turn(
                    Asked({"messages": messages}, None, (), False, False, False)
                )
            except Refused as refused:
                if session.failure is not None:
                    return
                if refused.code is None:  # no limit of the run's
                    raise self._wrong(
                        "reset or step", f"messages that the policy cannot be shown: {refused}"
                    ) from None
                session.end("done")
                await self._close_episode(session.id)
                return
            answer = await self._ask("step", {"id": session.id, "action": turn.answer.text})
            reward, terminated, truncated = (
                answer.get(name) for name in ("reward", "terminated", "truncated")
            )
            if {type(terminated), type(truncated)} != {bool}:
                raise self._wrong("step", "no true or false as `terminated` and `truncated`")
            turn.node.reward = self._step_reward(reward)
            if terminated or truncated:
                session.end("done" if terminated else "turns")
                return
            messages = [*messages, turn.answer.message, *self._messages("step", answer)]

    async def _close_episode(self, name: str) -> None:
        with contextlib.suppress(OSError, EnvironmentFailed):  # it may have no such path
            await self._ask("close", {"id": name})

    def _step_reward(self, reward: Any) -> float:
        """Returns a step's reward. Raises EnvironmentFailed where it is none."""
        try:
            if isinstance(reward, bool):
                raise NotAReward(f"{reward} is a bool, not a number")
            return as_reward(reward)
        except NotAReward as error:
            raise self._wrong("step", f"no finite number `reward`: {error}") from None

    async def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The server's answer, an object.

        Raises OSError where it is gone, EnvironmentFailed where it says something else.
        """
        assert self._http is not None
        data = json.dumps(body, default=str).encode()
        url = f"{self._url}/{path}"
        try:
            status, said = await bounded_request(
                self._http, "POST", url, self._headers, self._timeout_s, data
            )
        except OSError as error:
            raise OSError(f"{url} gave no answer ({error})") from None
        except ValueError as error:
            raise self._wrong(path, str(error)) from None
        text = " ".join(said[: 4 * _SHOWN_CHARACTERS].decode("utf-8", "replace").split())[
            :_SHOWN_CHARACTERS
        ]
        if status >= 500 or status in _FORGOTTEN:
            raise OSError(f"{url} answered {status} {text}")
        try:
            answer = json.loads(said)
        except (ValueError, RecursionError):
            answer = None
        if status != 200 or not isinstance(answer, dict):
            raise self._wrong(path, f"{status} {text}")
        return answer

    def _messages(self, path: str, answer: dict[str, Any]) -> list[dict[str, Any]]:
        observation = answer.get("observation")
        if isinstance(observation, str):
            return [{"role": "user", "content": observation}]
        if not isinstance(observation, list) or not all(
            isinstance(message, dict) for message in observation
        ):
            raise self._wrong(
                path, "an `observation` that is neither a text nor a list of messages"
            )
        return observation

    def _wrong(self, path: str, what: str) -> EnvironmentFailed:
        return EnvironmentFailed(
            f"environment.options: url: {self._url}/{path} gave {what}; correct the server "
            "(docs/agents.md)"
        )

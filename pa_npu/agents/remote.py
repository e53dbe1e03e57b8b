"""Runs episodes of a remote environment with Gymnasium's reset and step (environment.name=remote).

    POST URL/reset  {"id", "seed", "options": {"prompt_id", "prompt", "answer", "row"}}     {"observation"}
    POST URL/step   {"id", "action"}                         {"observation", "reward", "terminated", "truncated"}
    POST URL/close  {"id"}     an episode that a limit of the run ended; the answer does not matter

An observation is a text, which becomes a user's message, or a list of messages. The action is the
policy's answer as a text. A step's reward belongs to its turn; an episode's reward is their sum.
All attempts at a prompt get the same seed. The server has environment.timeout_s for every answer.
An episode whose server is gone begins again, with the same seeds.

environment.options:
    protocol            gymnasium (default), which is this one, or openenv (openenv.py)
    url                 the server's, http or https
    api_key_variable    environment variable with the server's key, which is sent as
                        `Authorization: Bearer`; without this option no key is sent
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from pa_npu.agents.environment import SessionEnvironment, task_of
from pa_npu.agents.openai_format import AgentRequest, AgentRequestRefused
from pa_npu.agents.session import Session
from pa_npu.control.bounded_http import bounded_request
from pa_npu.data.prompts import Prompt
from pa_npu.environments.protocol import EnvironmentContext, EnvironmentFailed, Generate
from pa_npu.errors import ConfigError
from pa_npu.rewards.values import NotAReward, as_reward

_SHOWN_CHARACTERS = 120
_PAUSE_S = 2.0  # before the next attempt, while the server may be restarting
_FORGOTTEN = (404, 410)  # statuses of a server that has restarted and does not know the episode


class RemoteEnvironment(SessionEnvironment):
    """Plays each session as an episode of the server that environment.options.url names."""

    trains_all_turns = True
    trains_in_context = True

    def __init__(self, context: EnvironmentContext) -> None:
        context.refuse_options("remote", ("url", "api_key_variable"))
        super().__init__(context)
        self._timeout_s = context.timeout_s
        self._url, headers = read_address(context.options)
        self._headers = {"Content-Type": "application/json", **headers}
        self._http: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._http = aiohttp.ClientSession(
            auto_decompress=False, trust_env=False, connector=aiohttp.TCPConnector(limit=0)
        )

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def trial(self, prompt: Prompt) -> None:
        """Resets one episode before a run. Raises ConfigError if the server cannot be reached."""
        episode_id = secrets.token_hex(8)
        try:
            answer = await self._request("reset", await _reset_body(episode_id, prompt))
        except OSError as error:
            raise ConfigError(
                f"environment.options: url: {error}; start the environment's server, or correct "
                "the address"
            ) from None
        self._messages("reset", answer)
        await self._close_episode(episode_id)

    async def _attempt(self, prompt: Prompt, number: int, generate: Generate) -> Session:
        session = self._new_session(number, generate)
        session.reward = 0.0
        try:
            await self._play(session, prompt)
        except OSError as error:
            self._loss_reason = f"the last time since {error}; look at the server"
            session.lose()
            await asyncio.sleep(_PAUSE_S)
        finally:
            await session.close()
        return session

    async def _play(self, session: Session, prompt: Prompt) -> None:
        """Plays an episode from its reset to its end. Raises OSError if the server is gone."""
        answer = await self._request("reset", await _reset_body(session.id, prompt))
        messages = self._messages("reset", answer)
        while True:
            try:
                turn = await session.chat_turn(AgentRequest({"messages": messages}))
            except AgentRequestRefused as refused:
                if session.failure is not None:
                    return
                if refused.code is None:  # not because of a limit of the run
                    raise self._bad_answer(
                        "reset or step", f"messages that the policy cannot be shown: {refused}"
                    ) from None
                session.end("done")
                await self._close_episode(session.id)
                return

            answer = await self._request("step", {"id": session.id, "action": turn.answer.text})
            terminated = answer.get("terminated")
            truncated = answer.get("truncated")
            if {type(terminated), type(truncated)} != {bool}:
                raise self._bad_answer("step", "no true or false as `terminated` and `truncated`")
            turn.node.reward = self._step_reward(answer.get("reward"))
            if terminated or truncated:
                session.end("done" if terminated else "turns")
                return
            messages = [*messages, turn.answer.message, *self._messages("step", answer)]

    async def _close_episode(self, episode_id: str) -> None:
        with contextlib.suppress(OSError, EnvironmentFailed):  # the server may have no such path
            await self._request("close", {"id": episode_id})

    def _step_reward(self, reward: Any) -> float:
        """Returns a step's reward. Raises EnvironmentFailed if it is not a finite number."""
        try:
            if isinstance(reward, bool):
                raise NotAReward(f"{reward} is a bool, not a number")
            return as_reward(reward)
        except NotAReward as error:
            raise self._bad_answer("step", f"no finite number `reward`: {error}") from None

    async def _request(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the server's answer, a JSON object.

        Raises OSError if the server is gone, EnvironmentFailed if it answers anything else.
        """
        assert self._http is not None
        data = json.dumps(body, default=str).encode()
        url = f"{self._url}/{path}"
        try:
            status, content = await bounded_request(
                self._http, "POST", url, self._headers, self._timeout_s, data
            )
        except OSError as error:
            raise OSError(f"{url} gave no answer ({error})") from None
        except ValueError as error:
            raise self._bad_answer(path, str(error)) from None
        beginning = content[: 4 * _SHOWN_CHARACTERS].decode("utf-8", "replace")
        text = " ".join(beginning.split())[:_SHOWN_CHARACTERS]
        if status >= 500 or status in _FORGOTTEN:
            raise OSError(f"{url} answered {status} {text}")
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = None
        if status != 200 or not isinstance(answer, dict):
            raise self._bad_answer(path, f"{status} {text}")
        return answer

    def _messages(self, path: str, answer: dict[str, Any]) -> list[dict[str, Any]]:
        observation = answer.get("observation")
        if isinstance(observation, str):
            return [{"role": "user", "content": observation}]
        if not isinstance(observation, list) or not all(
            isinstance(message, dict) for message in observation
        ):
            raise self._bad_answer(
                path, "an `observation` that is neither a text nor a list of messages"
            )
        return observation

    def _bad_answer(self, path: str, answer: str) -> EnvironmentFailed:
        return EnvironmentFailed(
            f"environment.options: url: {self._url}/{path} gave {answer}; correct the server "
            "(docs/agents.md)"
        )


def read_address(options: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Returns the server's URL and the headers with its key. Raises ConfigError."""
    url = options.get("url")
    variable = options.get("api_key_variable")
    parts = urlsplit(url if isinstance(url, str) else "")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            "environment.options: url must be that of the environment's server, such as "
            f"http://HOST:PORT, not {url!r:.80}"
        )
    if variable is None:
        return parts.geturl().rstrip("/"), {}
    key = os.environ.get(str(variable))
    if not key:
        raise ConfigError(
            f"environment.options: api_key_variable names {variable!r:.80}, which is not set; set "
            "it, or leave it out"
        )
    return parts.geturl().rstrip("/"), {"Authorization": f"Bearer {key}"}


async def _reset_body(episode_id: str, prompt: Prompt) -> dict[str, Any]:
    return {"id": episode_id, "seed": prompt.prompt_id, "options": await task_of(prompt)}

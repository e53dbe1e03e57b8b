"""The reward `judge`: a model behind an OpenAI-compatible URL scores each response.

    response ──template──> messages ──stored score?──> POST URL/chat/completions
        ──pattern or JSON key──> score in [lowest, highest]

Without an answer, after a 429 or 5xx, or without a score in the answer, the judge is asked again,
later each time. A response without a score gets None, never zero.

The reward is the score's place between lowest and highest: 0 to 1. With api=pooling a reward model
gets the question and the response as a conversation, and returns the score itself, which may lie
beyond these.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import math
import os
import random
import re
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pa_npu.config.sections.reward import (
    JUDGE_ATTEMPTS,
    JUDGE_KEY_VARIABLE,
    LONGEST_JUDGE_PAUSE_S,
    JudgeConfig,
)
from pa_npu.control.bounded_http import read_at_most
from pa_npu.control.tasks import GroupSemaphore
from pa_npu.errors import DataError
from pa_npu.rewards.answers import final_text
from pa_npu.rewards.functions import RewardInput
from pa_npu.rewards.values import NotAReward, as_reward

_FIELD = re.compile(r"\{(prompt|answer|response|lowest|highest|row\.[\w-]+)\}")
# the address or the key is wrong: asking again changes nothing
_NOBODY_MAY = frozenset({401, 403, 404, 405})
_LATER = frozenset({408, 409, 425, 429})
_FIRST_PAUSE_S = 0.5
_LONGEST_ANSWER_BYTES = 4 << 20
_SHOWN_CHARACTERS = 120
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_BUSY_S = 5.0  # of the database

log = logging.getLogger(__name__)


class _NoScore(Exception):
    """One attempt failed.

    again: whether another may succeed. after_s: seconds that the server asked to wait.
    """

    def __init__(self, reason: str, again: bool = True, after_s: float = 0.0) -> None:
        super().__init__(" ".join(reason.split()))
        self.again = again
        self.after_s = after_s


class JudgeReward:
    """Rewards a group: called with a RewardInput, returns a reward per response, None without a score.

    For use in one event loop; its owner closes it. `problem` says why the last response without a
    score has none. A call raises DataError if the judge can never answer (address, key).
    """

    def __init__(self, config: JudgeConfig, cache: Path | None) -> None:
        self._config = config
        self._lowest, self._highest = config.scores
        self._cache = JudgeCache(cache)
        self._turns = GroupSemaphore(config.concurrency)
        self._groups = itertools.count()
        self._asked: dict[str, asyncio.Task[float]] = {}
        self._session: Any = None
        self._pattern = re.compile(config.score_pattern)
        self._key = judge_key()
        self.problem: str | None = None

    async def __call__(self, group: RewardInput) -> list[float | None]:
        number = next(self._groups)
        tasks = [
            self._ask_once(number, self._messages(group, response)) for response in group.responses
        ]
        scores = await asyncio.gather(*tasks, return_exceptions=True)
        rewards: list[float | None] = []
        for score in scores:
            if isinstance(score, _NoScore):
                self.problem = str(score)
                rewards.append(None)
            elif isinstance(score, BaseException):
                raise score
            else:
                rewards.append(self._reward(score))
        return rewards

    def _reward(self, score: float) -> float | None:
        """Returns the score's place between lowest and highest.

        Returns None for a score so far beyond these that it cannot be a reward.
        """
        try:
            return as_reward((score - self._lowest) / (self._highest - self._lowest))
        except NotAReward as error:
            self.problem = f"its score {score:g} gives no reward: {error}"
            return None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        self._cache.close()

    def _messages(self, group: RewardInput, response: str) -> list[dict[str, str]]:
        fields: dict[str, object] = {
            "prompt": group.prompt,
            "answer": group.answer,
            "response": response,
            "lowest": f"{self._lowest:g}",
            "highest": f"{self._highest:g}",
        }
        fields |= {f"row.{name}": value for name, value in group.row.items()}
        if self._config.api == "pooling":
            return [*_question(group), {"role": "assistant", "content": _clean(response)}]
        text = _FIELD.sub(lambda name: str(fields.get(name[1], "")), self._config.template)
        return [{"role": "user", "content": _clean(text)}]

    async def _ask_once(self, group: int, messages: list[dict[str, str]]) -> float:
        """Returns the stored score, else the judge's.

        Equal contents that are asked for at the same time are sent once.
        """
        body: dict[str, Any] = {"model": self._config.model, "messages": messages}
        if self._config.api == "chat":
            body |= self._config.request
        content = [self._config.url, body, self._config.score_pattern]
        cached = self._cache.get(content)
        if cached is not None and self._within(cached):
            return cached
        name = json.dumps(content)
        task = self._asked.get(name)
        if task is None:
            task = asyncio.create_task(self._ask(group, content, body), name="judge")
            self._asked[name] = task
            task.add_done_callback(lambda _: self._asked.pop(name, None))
        return await asyncio.shield(task)

    async def _ask(self, group: int, content: list[Any], body: Mapping[str, Any]) -> float:
        for attempt in range(1, JUDGE_ATTEMPTS + 1):
            try:
                async with self._turns.request(group):
                    answer = await self._post(body)
                score = self._score(answer)
                self._cache.put(content, score, answer)
                return score
            except _NoScore as failed:
                if not failed.again or attempt == JUDGE_ATTEMPTS:
                    raise
                pause_s = min(LONGEST_JUDGE_PAUSE_S, _FIRST_PAUSE_S * 2 ** (attempt - 1))
                pause_s *= random.uniform(0.5, 1.0)
                await asyncio.sleep(max(pause_s, min(failed.after_s, LONGEST_JUDGE_PAUSE_S)))
        raise AssertionError("attempts is at least 1")

    async def _post(self, body: Mapping[str, Any]) -> str:
        """Asks the judge and returns its text."""
        import aiohttp

        session = self._session = self._session or self._open()
        base = str(self._config.url).rstrip("/")
        url = f"{base}/chat/completions"
        if self._pools:
            url = f"{base.removesuffix('/v1')}/pooling"
        try:
            async with session.post(url, json=body, allow_redirects=False) as reply:
                data = await read_at_most(reply, _LONGEST_ANSWER_BYTES)
                status = reply.status
                after = reply.headers.get("Retry-After", "")
        except asyncio.TimeoutError:
            raise _NoScore(
                f"no answer within reward.judge.timeout_s = {self._config.timeout_s:g} s"
            ) from None
        except aiohttp.ClientError as error:
            raise _NoScore(f"{type(error).__name__}: {error}") from None
        except ValueError as error:
            raise _NoScore(str(error), again=False) from None
        if status in _NOBODY_MAY:
            raise DataError(
                f"reward.judge.url: {self._config.url} answers with status {status}: "
                f"{_shown(data, self._key)}; correct the address, reward.judge.model, or the key "
                f"in {JUDGE_KEY_VARIABLE}"
            )
        if status != 200:
            raise _NoScore(
                f"status {status}: {_shown(data, self._key)}",
                again=status in _LATER or status >= 500,
                after_s=float(after) if after.isdecimal() else 0.0,
            )
        try:
            content = json.loads(data)
            if self._pools:
                text = json.dumps(content["data"][0]["data"])
            else:
                text = content["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError):
            kind = "pooled score" if self._pools else "chat completion"
            raise _NoScore(f"its answer is no {kind}: {_shown(data, self._key)}") from None
        if not isinstance(text, str):
            raise _NoScore("its answer holds no text")
        return text

    @property
    def _pools(self) -> bool:
        """Returns whether the judge is a reward model behind vLLM's pooling API."""
        return self._config.api == "pooling"

    def _open(self) -> Any:
        import aiohttp

        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        timeout = aiohttp.ClientTimeout(total=self._config.timeout_s)
        here = urlsplit(str(self._config.url)).hostname in _LOOPBACK
        connector = aiohttp.TCPConnector(limit=self._config.concurrency)
        return aiohttp.ClientSession(
            timeout=timeout, headers=headers, connector=connector, trust_env=not here
        )

    def _within(self, score: float) -> bool:
        """Returns whether a score is one that was asked for; a reward model's may be any."""
        return self._pools or self._lowest <= score <= self._highest

    def _score(self, answer: str) -> float:
        """Returns the number in the judge's answer, behind its thought."""
        try:
            if self._pools:
                score = _last_number(json.loads(answer))
            else:
                answer = final_text(answer)
                score = float(self._pattern.findall(answer)[-1])
        except (ValueError, LookupError, TypeError):
            raise _NoScore(
                f"no score (reward.judge.score_pattern = {self._config.score_pattern!r}) in its "
                f"answer {_shown(answer.encode('utf-8', 'replace'), self._key)}"
            ) from None
        if not math.isfinite(score) or not self._within(score):
            raise _NoScore(
                f"its score {score:g} is not within {self._lowest:g} and {self._highest:g}"
            )
        return score


def judge_key() -> str:
    """Returns the key of the judge's server; empty if there is none.

    Raises DataError for a key that no request can hold.
    """
    key = os.environ.get(JUDGE_KEY_VARIABLE, "")
    if key.isascii() and key.isprintable() and key.strip() == key:
        return key
    if key.strip().isascii() and key.strip().isprintable():
        problem = "begins or ends with a space or a line end"
    else:
        problem = "holds a line end or another character that no header of a request can hold"
    raise DataError(
        f"{JUDGE_KEY_VARIABLE}: the environment variable {problem}; set it to the key alone"
    )


def _question(group: RewardInput) -> list[dict[str, str]]:
    """Returns the question without the policy's template.

    It is the row's messages or question, else the rendered prompt.
    """
    messages = group.row.get("messages")
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        asked = messages
        if messages and messages[-1].get("role") == "assistant":
            asked = messages[:-1]  # the last message is the reference answer
        if asked:
            return asked
    for column in ("question", "prompt", "problem"):
        if isinstance(text := group.row.get(column), str):
            return [{"role": "user", "content": _clean(text)}]
    return [{"role": "user", "content": _clean(group.prompt)}]


def _clean(text: str) -> str:
    """Returns the text without half surrogates, which no request can hold."""
    return text.encode("utf-8", "replace").decode()


def _last_number(value: Any) -> float:
    """Returns the last number of nested lists.

    A model that gives a score per token gives the score of the response last.
    """
    while isinstance(value, list):
        value = value[-1]
    return float(value)


def _shown(data: bytes, secret: str) -> str:
    """Returns the beginning of a server's answer, for a message, without the key `secret`."""
    text = " ".join(data.decode("utf-8", "replace").split())
    if secret:
        text = text.replace(secret, "...")
    if len(text) > _SHOWN_CHARACTERS:
        text = f"{text[:_SHOWN_CHARACTERS]}..."
    return repr(text)


class JudgeCache:
    """Stores a judge's scores on disk, by the contents of the request.

    So a resumed run gets the same scores (I6), and asks only once.

    path: a database that several processes may use; None stores nothing. If the disk fails, nothing
    more is stored, and one warning says so.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._database: sqlite3.Connection | None = None

    def get(self, content: Any) -> float | None:
        """Returns the stored score of a request with this content (JSON), or None."""
        row = self._do("select score from scores where content = ?", _key(content))
        return float(row[0]) if row else None

    def put(self, content: Any, score: float, answer: str) -> None:
        """Stores a score. `answer`: the judge's text, for readers of the file."""
        clean = answer.encode("utf-8", "replace").decode()
        self._do("insert or replace into scores values (?, ?, ?)", _key(content), score, clean)

    def close(self) -> None:
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):
                self._database.close()

    def _do(self, statement: str, *values: Any) -> Any:
        """Returns the first row of a statement's result, or None if there is none."""
        if self._path is None:
            return None
        try:
            if self._database is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._database = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)
                self._database.execute(
                    "create table if not exists scores (content text primary key, score real, "
                    "answer text)"
                )
            return self._database.execute(statement, values).fetchone()
        except (sqlite3.Error, OSError) as error:
            log.warning(
                "reward.judge: scores: %s cannot be used (%s); the judge is asked every time",
                self._path,
                error,
            )
            self.close()
            self._path = None
            return None


def _key(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

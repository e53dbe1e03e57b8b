"""Episodes of one request: `env.taskset` has the id and options of a taskset, `env.roles` agents by name."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

SERVED: list[int] = []
"""How many sessions each serving had that has ended."""


@dataclass(frozen=True)
class EvalClientConfig:
    base_url: str
    api_key_var: str
    headers: dict[str, str]


@dataclass(frozen=True)
class ModelContext:
    model: str
    client: EvalClientConfig


@dataclass
class Task:
    data: Any
    key: str


class Taskset:
    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._limit = None
        self.bounded = "count" in options

    def select(self, config: Any) -> Taskset:
        self._limit = config.limit
        return self

    def __iter__(self) -> Any:
        number = 0
        count = self._options.get("count")
        while number != count and number != self._limit:
            data = SimpleNamespace(
                system_prompt=self._options.get("system"),
                prompt_text=f"What is 6*{number}?",
                description=None,
                name=None,
            )
            if not self._options.get("silent"):
                data.answer = 6 * number
            yield Task(data, f"{self._options.get('salt', '')}{number}")
            number += 1


class Env:
    def __init__(self, config: dict[str, Any]) -> None:
        if config["taskset"]["id"] != "sums-v1":
            raise ModuleNotFoundError(f"taskset {config['taskset']['id']!r} not found")
        self.taskset = Taskset(config["taskset"])
        self.config = config
        self._num_played = 0

    @contextlib.asynccontextmanager
    async def serving(self) -> Any:
        try:
            yield
        finally:
            SERVED.append(self._num_played)

    def slots(self, task: Task, n: int = 1) -> list[Task]:
        return [task] * n

    async def run_slot(self, task: Task, context: ModelContext) -> Any:
        self._num_played += 1
        try:
            answer = await asyncio.to_thread(_ask, context, task.data.prompt_text)
        except urllib.error.HTTPError as error:
            return Episode(ok=False, errors=[SimpleNamespace(type="ProviderError", message=error)])
        if answer == "sleep":
            await asyncio.sleep(3600)
        if answer == "crash":
            raise RuntimeError("the environment is broken")
        agent = SimpleNamespace(trainable=True)
        reward = float(answer == f"#### {task.data.answer}")
        trace = SimpleNamespace(agent=agent, reward=reward, errors=[])
        return Episode(ok=True, traces=[trace] * len(answer.split("+")))


@dataclass
class Episode:
    ok: bool
    errors: list[Any] = field(default_factory=list)
    traces: list[Any] = field(default_factory=list)


def _ask(context: ModelContext, text: str) -> str:
    body = {"model": context.model, "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        context.client.base_url + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **context.client.headers},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])

"""The process that holds instances of a user's tool class: requests in, answers out, one JSON object per line.

    first line in    {"factories": {name: "module:Class"}, "with_tools": bool}
    first line out   {"ready": true, "tools": {name: [schema, ...]}, "rewards": [name, ...]}
                     or {"unusable": reason}; tools are described on request, which imports torch
    in  {"id", "reset": {column: value}, "factory": name}    out {"observation": text or null}
    in  {"id", "call": name, "arguments": {...}}             out {"result": text, "failed": bool}
    in  {"id", "reward": true}                               out {"reward": any JSON value}
    in  {"id", "close": true}                                out {}

A failure of `reset` or `get_reward` is {"failure": reason}. What the class prints goes to standard
error. An instance is used for one episode after another, as in TRL.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from pa_npu.config.user_code import describe, import_function
from pa_npu.control.worker_process import private_pipes, send
from pa_npu.errors import ConfigError

_NO_TOOLS = frozenset({"reset", "get_reward"})


def main() -> int:
    requests, answers = private_pipes()
    first = json.loads(requests.readline())
    try:
        episodes = Episodes(first["factories"], with_tools=first["with_tools"])
    except ConfigError as error:
        send(answers, {"unusable": str(error)})
        return 1
    send(answers, {"ready": True, "tools": episodes.schemas, "rewards": episodes.rewarding})
    for line in requests:
        try:
            answer = episodes.answer(json.loads(line))
            text = json.dumps(answer, default=str)
            text.encode()  # raises UnicodeEncodeError for half of a surrogate pair
        except BaseException as error:  # users' code may raise anything, SystemExit too
            answer = {"failure": describe(error)}
        send(answers, answer)
    return 0


class Episodes:
    """The instances of the classes, each in one episode or free."""

    def __init__(self, factories: Mapping[str, str], with_tools: bool = True) -> None:
        self.schemas: dict[str, list[dict[str, Any]]] = {}
        self.rewarding: list[str] = []
        self._factories: dict[str, Callable[[], Any]] = {}
        self._free: dict[str, list[Any]] = {}
        self._running: dict[str, tuple[str, Any]] = {}
        for name, place in factories.items():
            factory = import_function("environment.options.factory", place)
            try:
                instance = factory()
            except BaseException as error:
                raise ConfigError(f"{place} cannot be made ({describe(error)})") from None
            self._factories[name] = factory
            self._free[name] = [instance]
            if with_tools:
                self.schemas[name] = _schemas(place, instance)
            if callable(getattr(instance, "get_reward", None)):
                self.rewarding.append(name)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer to one request. What the class raises in a tool is an answer too."""
        episode = request["id"]
        if "reset" in request:
            return {"observation": self._reset(episode, request["factory"], request["reset"])}
        if "close" in request:
            name, instance = self._running.pop(episode)
            self._free[name].append(instance)
            return {}
        _, instance = self._running[episode]
        if "reward" in request:
            return {"reward": _finished(instance.get_reward())}
        return _call(instance, request["call"], request["arguments"])

    def _reset(self, episode: str, name: str, row: Mapping[str, Any]) -> str | None:
        free = self._free[name]
        instance = free.pop() if free else self._factories[name]()
        observation = _finished(instance.reset(**_taken(instance.reset, row)))
        self._running[episode] = (name, instance)
        if observation is not None and not isinstance(observation, str):
            raise TypeError(f"reset returned {type(observation).__name__}, not a text or None")
        return observation


def _schemas(place: str, instance: Any) -> list[dict[str, Any]]:
    """Returns the descriptions of an instance's tools, from their docstrings. Raises ConfigError."""
    from transformers.utils import get_json_schema

    methods = inspect.getmembers(type(instance), predicate=inspect.isfunction)
    tools = [name for name, _ in methods if not name.startswith("_") and name not in _NO_TOOLS]
    if not callable(getattr(instance, "reset", None)):
        raise ConfigError(f"{place} has no method reset; add it")
    if not tools:
        raise ConfigError(f"{place} has no public method that could be a tool; add one")
    schemas = []
    for name in tools:
        try:
            schemas.append(get_json_schema(getattr(instance, name)))
        except Exception as error:
            raise ConfigError(
                f"{place}: the tool {name} has no description ({describe(error)}); give it type "
                "hints and a docstring with Args"
            ) from None
    return schemas


def _taken(method: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns of a row that a method has parameters for."""
    parameters = inspect.signature(method).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(row)
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in row.items() if name in names}


def _call(instance: Any, name: str, arguments: Any) -> dict[str, Any]:
    """Returns a tool's answer as a text; that of a failed tool is what TRL shows to a policy."""
    try:
        methods = dict(inspect.getmembers(type(instance), predicate=inspect.isfunction))
        if name.startswith("_") or name in _NO_TOOLS or name not in methods:
            raise ValueError(f"Tool {name} not found.")
        return {
            "result": _as_text(_finished(getattr(instance, name)(**arguments))),
            "failed": False,
        }
    except BaseException as error:  # a tool that calls sys.exit has failed, and nothing else
        return {"result": str({"error": str(error)}), "failed": True}


def _as_text(result: Any) -> str:
    """Returns a tool's result as the policy reads it: text parts joined, anything else as str."""
    if isinstance(result, list) and result and all(isinstance(part, Mapping) for part in result):
        if any(part.get("type") != "text" for part in result):
            raise ValueError("a tool's answer is text here, and has no images")
        result = "".join(str(part["text"]) for part in result)
    text = str(result)
    text.encode()
    return text


def _finished(value: Any) -> Any:
    """Returns what an `async def` returned, or the value itself."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value


if __name__ == "__main__":
    sys.exit(main())

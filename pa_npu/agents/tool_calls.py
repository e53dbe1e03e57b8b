"""Tool calls in what a model writes: found by a parser of the model's own format, and returned as OpenAI's tool_calls.

hermes      <tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>, also Qwen's; a call that is no such JSON stays text
template    what the tokenizer's files say (`parse_response` of transformers), where they say it
any other   a tool parser of vLLM, by its name there (llama3_json, mistral, ...), where vLLM is installed
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pa_npu.engines.registry import engine_kind
from pa_npu.errors import ConfigError

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Call:
    """name: of a function. arguments: JSON, an object."""

    name: str
    arguments: str

    @property
    def canonical(self) -> tuple[str, str]:
        """Equal for calls that differ in the form of their JSON only."""
        try:
            return self.name, json.dumps(json.loads(self.arguments), sort_keys=True)
        except ValueError:
            return self.name, self.arguments


@dataclass(frozen=True)
class Parsed:
    """A model's answer: its text without calls, and its calls."""

    content: str
    calls: tuple[Call, ...] = ()

    def says_the_same(self, other: Parsed) -> bool:
        """Whether both differ in form only: in the spaces around their text, and in how their calls' JSON is written."""
        own, others = ([call.canonical for call in one.calls] for one in (self, other))
        return self.content.strip() == other.content.strip() and own == others


Parser = Callable[[str, Sequence[dict[str, Any]], str], Parsed]
"""From an answer's text, special tokens included but for the last, the request's tools, and its text."""


def hermes(text: str, tools: Sequence[dict[str, Any]] = (), prompt: str = "") -> Parsed:
    """Calls between <tool_call> and </tool_call>, each a JSON object with `name` and `arguments`."""
    calls = []
    for found in _HERMES.finditer(text):
        try:
            call = json.loads(found[1])
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return Parsed(text)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return Parsed(text)
        calls.append(Call(name, json.dumps(arguments, ensure_ascii=False)))
    return Parsed(text[: text.index("<tool_call>")], tuple(calls)) if calls else Parsed(text)


def make_parser(name: str, tokenizer: Any) -> Parser:
    """The parser of agent.tool_parser. Raises ConfigError where there is none of this name."""
    if name == "auto":
        name = "template" if _response_template(tokenizer) else "hermes"
    if name == "hermes":
        return hermes
    if name == "template":
        if not _response_template(tokenizer):
            raise ConfigError(
                "agent.tool_parser: template, but the model's tokenizer does not say how its answers are read; set hermes, or the "
                "name of a tool parser of vLLM"
            )
        return _by_template(tokenizer)
    make = engine_kind("vllm").tool_parser
    assert make is not None
    extract = make(name, tokenizer)

    def parse(text: str, tools: Sequence[dict[str, Any]], prompt: str) -> Parsed:
        content, calls = extract(text, tools)
        return Parsed(content or "", tuple(Call(*call) for call in calls))

    return parse


def _response_template(tokenizer: Any) -> Any:
    return getattr(tokenizer, "response_template", None) or getattr(tokenizer, "response_schema", None)


def _by_template(tokenizer: Any) -> Parser:
    known = inspect.signature(tokenizer.parse_response).parameters  # later versions want more

    def parse(text: str, tools: Sequence[dict[str, Any]], prompt: str) -> Parsed:
        more = {name: value for name, value in (("prefix", prompt), ("tools", list(tools))) if name in known}
        try:
            message = tokenizer.parse_response(text, **more)
            calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
            found = [Call(str(call["name"]), _json(call.get("arguments", {}))) for call in calls]
        except Exception:  # the template is the model's, and what a policy writes is anything
            return Parsed(text)
        return Parsed(str(message.get("content") or ""), tuple(found)) if found else Parsed(text)

    return parse


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

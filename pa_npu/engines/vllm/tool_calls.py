"""vLLM's tool parsers, where vLLM is installed beside the coordinator: a text of the policy's to the calls that are in it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from pa_npu.errors import ConfigError

# Newest first; the second is where vLLM had them before 0.13.
_MODULES = ("vllm.tool_parsers", "vllm.entrypoints.openai.tool_parsers")
_REQUESTS = ("vllm.entrypoints.openai.chat_completion.protocol", "vllm.entrypoints.openai.protocol")

Extract = Callable[[str, Sequence[dict[str, Any]]], tuple[str | None, list[tuple[str, str]]]]


def tool_parser(name: str, tokenizer: Any) -> Extract:
    """From a text and the request's tools to what is not a call, and (function, arguments) of each. Raises ConfigError."""
    try:
        manager = _found(_MODULES, "ToolParserManager")
        parser = manager.get_tool_parser(name)(tokenizer)
        request_type = _found(_REQUESTS, "ChatCompletionRequest")
    except ImportError as error:
        raise ConfigError(
            f"agent.tool_parser: {name} is a parser of vLLM, which cannot be imported here ({error}); set hermes or template"
        ) from None
    except Exception as error:  # a parser may want tokens that the tokenizer has not
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"agent.tool_parser: vLLM has no parser {name} for this model ({reason}); set another, such as hermes"
        ) from None

    def extract(text: str, tools: Sequence[dict[str, Any]]) -> tuple[str | None, list[tuple[str, str]]]:
        request = request_type(model="policy", messages=[], tools=list(tools) or None)
        found = parser.extract_tool_calls(text, request)
        calls = found.tool_calls if found.tools_called else []
        return (found.content if calls else text), [(call.function.name, call.function.arguments) for call in calls]

    return extract


def _found(modules: Sequence[str], name: str) -> Any:
    for module in modules[:-1]:
        try:
            return getattr(importlib.import_module(module), name)
        except ModuleNotFoundError:
            continue
    return getattr(importlib.import_module(modules[-1]), name)

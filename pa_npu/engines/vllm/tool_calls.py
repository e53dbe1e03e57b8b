"""vLLM's tool parsers, where vLLM is installed beside the coordinator: a text of the policy's to the calls that are in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pa_npu.errors import ConfigError

Extract = Callable[[str, Sequence[dict[str, Any]]], tuple[str | None, list[tuple[str, str]]]]


def tool_parser(name: str, tokenizer: Any) -> Extract:
    """From a text and the request's tools to what is not a call, and (function, arguments) of each. Raises ConfigError."""
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        parser = ToolParserManager.get_tool_parser(name)(tokenizer)
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
        request = ChatCompletionRequest(model="policy", messages=[], tools=list(tools) or None)
        found = parser.extract_tool_calls(text, request)
        calls = found.tool_calls if found.tools_called else []
        return (found.content if calls else text), [(call.function.name, call.function.arguments) for call in calls]

    return extract

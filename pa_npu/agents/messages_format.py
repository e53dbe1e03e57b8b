"""Reads and writes Anthropic's Messages API (`/v1/messages`), over the chat of a session.

A request is translated into a chat request, and the turn that answers it into content blocks: a
text, and one tool_use for each tool call. A message of the assistant stays one message, so that a
conversation that is sent back extends its branch. A user's message with tool results becomes a
message of the role `tool` for each of them, and one of the user for its texts.

Images stay where they stand among the texts of a message or of a tool result. Errors have this
API's form. Documents and tools of Anthropic's own servers are refused.

Source: Anthropic's API reference, "Messages", as the package anthropic 2.11 describes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from pa_npu.agents.openai_format import MODEL, AgentRequest, AgentRequestRefused
from pa_npu.agents.other_formats import list_of_objects, named_event, shared_fields

if TYPE_CHECKING:
    from pa_npu.agents.session import AnsweredTurn

Message = dict[str, Any]

_AS_IN_CHAT = ("temperature", "top_p", "top_k", "stream", "metadata", "service_tier", "model")
_READ = (
    "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "thinking",
    "output_config", "context_management",
)  # fmt: skip
# The values that fields without effect may have.
_FIXED: dict[str, tuple[Any, ...]] = {
    "container": (None,),
    "mcp_servers": (None, []),
    "inference_geo": (None,),
    "cache_control": (None, {"type": "ephemeral"}),
    "betas": (None, []),
}
_TOOL_CHOICES = {"auto": "auto", "none": "none", "any": "required"}
_FREE_THINKING = ("disabled", "adaptive")
# The edit of the context that leaves it as it is, which some clients always ask for.
_KEEPS_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}
_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
}


def error_response(refused: AgentRequestRefused) -> web.Response:
    """Returns a refusal in the form that Anthropic's clients expect."""
    kind = "api_error"
    headers = {}
    if refused.status < 500:
        kind = _ERROR_TYPES.get(refused.status, "invalid_request_error")
        headers["x-should-retry"] = "false"
    message = str(refused)
    if refused.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # by which clients know it
    body = {"type": "error", "error": {"type": kind, "message": message}}
    return web.json_response(body, status=refused.status, headers=headers)


def chat_body(body: Any) -> dict[str, Any]:
    """Returns the chat request that a request of the Messages API stands for.

    Raises RequestRefused for what is not of this API or is not served here.
    """
    chat = shared_fields(body, as_in_chat=_AS_IN_CHAT, read=_READ, fixed=_FIXED)
    _refuse_edits(body)
    chat["messages"] = chat_messages(body.get("system"), body.get("messages"))
    chat["tools"] = _chat_tools(body.get("tools"))
    chat["tool_choice"] = _chat_tool_choice(body.get("tool_choice"))
    chat["max_tokens"] = body.get("max_tokens")
    chat["stop"] = body.get("stop_sequences") or None
    chat["reasoning_effort"] = _reasoning_effort(body)
    chat["response_format"] = _object(body, "output_config").get("format")
    return {name: value for name, value in chat.items() if value is not None}


def _refuse_edits(body: Mapping[str, Any]) -> None:
    """Raises RequestRefused if the server is asked to change the messages that it is sent."""
    management = _object(body, "context_management")
    edits = management.get("edits") or []
    if set(management) - {"edits"} or any(
        edit != _KEEPS_THINKING for edit in list_of_objects(edits, "context_management")
    ):
        raise AgentRequestRefused(
            f"context_management: {management!r:.80} is not served here; edit the messages in the "
            "agent, or leave it out",
            code="unsupported_parameter",
            param="context_management",
        )


def chat_messages(system: Any, messages: Any) -> list[Message]:
    """Returns the chat messages of a system prompt and of this API's messages.

    Raises RequestRefused for a block that no chat message stands for.
    """
    if not isinstance(messages, list) or not messages:
        raise AgentRequestRefused("messages: give a list of messages", param="messages")
    chat: list[Message] = []
    if system is not None:
        chat.append({"role": "system", "content": _text_of(system, "system")})
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        if role == "assistant":
            chat.append(_assistant_message(message.get("content")))
        elif role == "user":
            chat += _user_messages(message.get("content"))
        elif role == "system":
            chat.append({"role": "system", "content": _text_of(message.get("content"), "messages")})
        else:
            raise AgentRequestRefused(
                f"messages: {message!r:.60} has no role that is user or assistant", param="messages"
            )
    return chat


def _user_messages(content: Any) -> list[Message]:
    """Returns a `tool` message for each tool result, and the user's message behind them."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results: list[Message] = []
    shown: list[Mapping[str, Any]] = []
    for block in _blocks(content):
        if block.get("type") == "tool_result":
            results.append(
                {
                    "role": "tool",
                    "tool_call_id": block.get("tool_use_id"),
                    "content": _content_of(block.get("content") or ""),
                }
            )
        else:
            shown.append(block)
    if shown:
        results.append({"role": "user", "content": _content_of(shown)})
    return results


def _content_of(content: Any) -> Any:
    """Returns a chat's content: a text, whose blocks are lines, or parts if there are images."""
    if isinstance(content, str) or not any(map(_is_image, _blocks(content))):
        return _text_of(content, "messages")
    parts: list[dict[str, Any]] = []
    for block in content:
        if _is_image(block):
            parts.append(_image_part(block.get("source")))
            continue
        text = _block_text(block, "messages")
        if parts and parts[-1]["type"] == "text":
            text = f"\n{text}"
        parts.append({"type": "text", "text": text})
    return parts


def _is_image(block: Mapping[str, Any]) -> bool:
    return block.get("type") == "image"


def _image_part(source: Any) -> dict[str, Any]:
    kind = source.get("type") if isinstance(source, Mapping) else None
    if kind == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    elif kind == "url":
        url = source.get("url")
    else:
        raise AgentRequestRefused(
            f"messages: an image of source {kind!r:.40} is not served; send it as base64",
            param="messages",
        )
    return {"type": "image_url", "image_url": {"url": url}}


def _assistant_message(content: Any) -> Message:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in _blocks(content):
        kind = block.get("type")
        if kind == "tool_use":
            arguments = json.dumps(block.get("input"), ensure_ascii=False)
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            texts.append(_block_text(block, "messages"))
    message: Message = {"role": "assistant", "content": "".join(texts) or None}
    if calls:
        message["tool_calls"] = calls
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    return message


def _blocks(content: Any) -> Sequence[Mapping[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise AgentRequestRefused(
            "messages: a content is a text or a list of content blocks", param="messages"
        )
    return content


def _text_of(content: Any, param: str) -> str:
    """Returns a text, or the texts of a list of blocks, line by line."""
    if isinstance(content, str):
        return content
    return "\n".join(_block_text(block, param) for block in _blocks(content))


def _block_text(block: Mapping[str, Any], param: str) -> str:
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise AgentRequestRefused(
            f"{param}: a block of type {block.get('type')!r:.40} is not served; texts, images of "
            "the user and of tools, tool uses and tool results are",
            param=param,
        )
    return str(block["text"])


def _chat_tools(value: Any) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    tools = []
    for tool in list_of_objects(value, "tools"):
        if tool.get("type", "custom") not in ("custom", None):
            raise AgentRequestRefused(
                f"tools: {tool['type']!r:.40} is a tool of Anthropic's servers; give tools with an "
                "input_schema",
                code="unsupported_parameter",
                param="tools",
            )
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        if tool.get("description"):
            function["description"] = tool["description"]
        tools.append({"type": "function", "function": function})
    return tools


def _chat_tool_choice(value: Any) -> Any:
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "tool":
        return {"type": "function", "function": {"name": value.get("name")}}
    if not isinstance(kind, str) or kind not in _TOOL_CHOICES:
        raise AgentRequestRefused(
            f"tool_choice: {value!r:.60} is none of auto, any, tool and none", param="tool_choice"
        )
    return _TOOL_CHOICES[kind]


def _reasoning_effort(body: Mapping[str, Any]) -> Any:
    """Returns how much thought a request asks for, in the chat's words; None leaves it free."""
    effort = _object(body, "output_config").get("effort")
    if effort is not None:
        return effort
    kind = _object(body, "thinking").get("type")
    return None if kind is None or kind in _FREE_THINKING else kind


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise AgentRequestRefused(f"{name}: must be an object", param=name)
    return value


def message(turn: AnsweredTurn, message_id: str, request: AgentRequest) -> dict[str, Any]:
    """Makes a Message of an answered turn. request: the chat request that was answered."""
    answer = turn.answer.message
    content: list[dict[str, Any]] = []
    if answer["content"]:
        content.append({"type": "text", "text": answer["content"], "citations": None})
    reason = "end_turn" if turn.written.finished else "max_tokens"
    raw = turn.answer.shown[0]
    stopped_by = next((text for text in request.stop if text in raw), None)
    if stopped_by is not None:
        reason = "stop_sequence"
    for call in answer.get("tool_calls") or ():
        content.append(_tool_use(call))
        reason = "tool_use"
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": stopped_by if reason == "stop_sequence" else None,
        "usage": {
            "input_tokens": len(turn.prompt),
            "output_tokens": len(turn.written.tokens),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
        "weight_version": turn.written.version or 0,
    }


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a call as a block; a text if its arguments are no object, as a parser may have
    answered them."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        text = f"{function['name']}({function['arguments']})"
        return {"type": "text", "text": text, "citations": None}
    return {
        "type": "tool_use",
        "id": call["id"],
        "name": function["name"],
        "input": arguments,
    }


def message_events(answer: Mapping[str, Any]) -> Iterator[bytes]:
    """Yields a whole Message as the events of a stream."""
    usage = answer["usage"]
    begun = {
        **answer,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": 0},
    }
    yield named_event({"type": "message_start", "message": begun})
    for index, block in enumerate(answer["content"]):
        if block["type"] == "text":
            empty = {**block, "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            written = json.dumps(block["input"], ensure_ascii=False)
            delta = {"type": "input_json_delta", "partial_json": written}
        yield named_event({"type": "content_block_start", "index": index, "content_block": empty})
        yield named_event({"type": "content_block_delta", "index": index, "delta": delta})
        yield named_event({"type": "content_block_stop", "index": index})
    ending = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
    yield named_event({"type": "message_delta", "delta": ending, "usage": usage})
    yield named_event({"type": "message_stop"})

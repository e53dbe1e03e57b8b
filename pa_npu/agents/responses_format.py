"""Reads and writes OpenAI's Responses API (`/v1/responses`), over the chat of a session.

A request is translated into a chat request, and the turn that answers it into output items: a
message, and one function_call for each tool call. Items of the input become chat messages; an
assistant's text and the function calls that follow it are one message, as the policy wrote them.
So a conversation that is sent back extends its branch.

A session keeps what previous_response_id names (Session.conversations), unless `store` is false.
As in OpenAI's service, the instructions of a previous response are not kept.

A chat has no namespaces of tools: its function is called NAMESPACE.NAME. Tools other than functions,
and references to stored items, are refused: the servers that execute them are not here.

Source: OpenAI's API reference, "Responses", as the package openai 3.52 describes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pa_npu.agents.openai_format import MODEL, AgentRequest, AgentRequestRefused
from pa_npu.agents.other_formats import list_of_objects, named_event, shared_fields

if TYPE_CHECKING:
    from pa_npu.agents.session import AnsweredTurn

Message = dict[str, Any]

# Fields that mean the same in a chat request.
_AS_IN_CHAT = (
    "temperature", "top_p", "stream", "user", "metadata", "store", "service_tier", "safety_identifier",
    "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls", "model",
    "client_metadata",
)  # fmt: skip
# Fields that this module reads.
_READ = (
    "input", "instructions", "tools", "tool_choice", "max_output_tokens", "previous_response_id",
    "reasoning", "text", "include", "top_logprobs",
)  # fmt: skip
# The values that fields without effect may have.
_FIXED: dict[str, tuple[Any, ...]] = {
    "truncation": ("disabled", None),
    "background": (False, None),
    "max_tool_calls": (None,),
    "conversation": (None,),
    "prompt": (None,),
    "context_management": (None, []),
    "stream_options": (None, {}, {"include_obfuscation": False}, {"include_obfuscation": True}),
}
# What a request may ask to be included; there is nothing of the first.
_INCLUDED = ("reasoning.encrypted_content", "message.output_text.logprobs")
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def chat_body(body: Any, conversations: Mapping[str, Sequence[Message]]) -> dict[str, Any]:
    """Returns the chat request that a request of the Responses API stands for.

    conversations: the messages before each response that this one may continue, by its id.
    Raises RequestRefused for what is not of this API or is not served here.
    """
    chat = shared_fields(body, as_in_chat=_AS_IN_CHAT, read=_READ, fixed=_FIXED)
    chat["messages"] = [
        *_instructions(body.get("instructions")),
        *_earlier_messages(body.get("previous_response_id"), conversations),
        *input_messages(body.get("input")),
    ]
    chat["tools"] = _chat_tools(body.get("tools"))
    chat["tool_choice"] = _chat_tool_choice(body.get("tool_choice"))
    chat["max_completion_tokens"] = body.get("max_output_tokens")
    chat["reasoning_effort"] = _object_field(body, "reasoning", "effort")
    chat["response_format"] = _response_format(_object_field(body, "text", "format"))
    chat["logprobs"] = _wants_logprobs(body.get("include"))
    if chat["logprobs"]:
        chat["top_logprobs"] = body.get("top_logprobs")
    return {name: value for name, value in chat.items() if value is not None}


def _instructions(value: Any) -> list[Message]:
    if value is None:
        return []
    if not isinstance(value, str):
        raise AgentRequestRefused("instructions: must be a text", param="instructions")
    return [{"role": "system", "content": value}]


def _earlier_messages(
    response_id: Any, conversations: Mapping[str, Sequence[Message]]
) -> Sequence[Message]:
    if response_id is None:
        return []
    if not isinstance(response_id, str) or response_id not in conversations:
        raise AgentRequestRefused(
            f"previous_response_id: {response_id!r:.60} is no stored response of this session; send "
            "the whole input",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    return conversations[response_id]


def input_messages(value: Any) -> list[Message]:
    """Returns the chat messages of a request's input: a text, or a list of items.

    Raises RequestRefused for an item that no chat message stands for.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise AgentRequestRefused("input: give a text or a list of items", param="input")
    messages: list[Message] = []
    reasoning = ""
    for item in value:
        kind = item.get("type", "message")
        if kind == "reasoning":
            reasoning += _reasoning_text(item)
            continue
        if kind == "function_call":
            _append_call(messages, item, reasoning)
        elif kind == "function_call_output":
            output = _content_of(item.get("output"), "function_call_output")
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
            )
        elif kind == "message":
            message = {
                "role": item.get("role"),
                "content": _content_of(item.get("content"), "message"),
            }
            if message["role"] == "assistant" and reasoning:
                message["reasoning_content"] = reasoning
            messages.append(message)
        else:
            raise AgentRequestRefused(
                f"input: an item of type {kind!r:.40} is not served", param="input"
            )
        reasoning = ""
    return messages


def _append_call(messages: list[Message], item: Mapping[str, Any], reasoning: str) -> None:
    """Appends a call to the assistant's message that it follows, or to a new one."""
    name = item.get("name")
    if item.get("namespace") is not None:
        name = _full_name(item["namespace"], name)
    function = {"name": name, "arguments": item.get("arguments")}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
        if reasoning:
            messages[-1]["reasoning_content"] = reasoning
    messages[-1].setdefault("tool_calls", []).append(call)


def _reasoning_text(item: Mapping[str, Any]) -> str:
    """Returns the text of a reasoning item: its content, otherwise its summary."""
    return _text_of(item.get("content") or item.get("summary") or "", "reasoning")


def _content_of(content: Any, kind: str) -> Any:
    """Returns the content of an item for a chat: its text, or parts if there are images."""
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return _text_of(content, kind)
    parts: list[dict[str, Any]] = []
    for part in content:
        if not _is_image(part):
            parts.append({"type": "text", "text": _text_of([part], kind)})
        elif part.get("file_id") is not None:
            raise AgentRequestRefused(
                "input: an image by its file_id is not served; send it as image_url, a data URL",
                param="input",
            )
        else:
            parts.append({"type": "image_url", "image_url": {"url": part.get("image_url")}})
    return parts


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "input_image"


def _text_of(content: Any, kind: str) -> str:
    """Returns the text of an item's content: a text, or a list of parts that are texts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = []
        for part in content:
            is_text = isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS
            if not is_text or not isinstance(part.get("text"), str):
                raise AgentRequestRefused(
                    f"input: {part!r:.60} in an item of type {kind} is no text; texts and images are served",
                    param="input",
                )
            texts.append(part["text"])
        return "".join(texts)
    raise AgentRequestRefused(f"input: an item of type {kind} has no text", param="input")


def _chat_tools(value: Any) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    return [
        {"type": "function", "function": _chat_function(tool, namespace)}
        for namespace, tool in _tools_with_namespaces(value)
    ]


def _tools_with_namespaces(value: Any) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Returns each tool behind the namespace that it is in; an empty one for the others."""
    tools: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
    for tool in list_of_objects(value, "tools"):
        if tool.get("type") == "namespace":
            tools += [(tool, inner) for inner in list_of_objects(tool.get("tools"), "tools")]
        else:
            tools.append(({}, tool))
    return tools


def _chat_function(tool: Mapping[str, Any], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a function in the chat's form, which has no namespaces: the name begins with that of
    its namespace, and the description with its description."""
    if tool.get("type") != "function":
        raise AgentRequestRefused(
            f"tools: {tool.get('type')!r:.40} is executed by OpenAI's servers, or is no function; "
            "give functions",
            code="unsupported_parameter",
            param="tools",
        )
    function = {
        name: tool[name]
        for name in ("name", "description", "parameters")
        if tool.get(name) is not None
    }
    if namespace:
        function["name"] = _full_name(namespace.get("name"), tool.get("name"))
        texts = [namespace.get("description"), tool.get("description")]
        function["description"] = "\n".join(str(text) for text in texts if text)
    return function


def _full_name(namespace: Any, name: Any) -> str:
    return f"{namespace}.{name}"


def _chat_tool_choice(value: Any) -> Any:
    if isinstance(value, Mapping) and value.get("type") == "function" and "name" in value:
        return {"type": "function", "function": {"name": value["name"]}}
    return value


def _object_field(body: Mapping[str, Any], name: str, field: str) -> Any:
    """Returns a field of an object in the body; None if either is missing."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise AgentRequestRefused(f"{name}: must be an object", param=name)
    return value.get(field)


def _response_format(value: Any) -> Any:
    """Returns the format in the chat's form, in which a schema is nested one level deeper."""
    if isinstance(value, Mapping) and value.get("type") == "json_schema":
        schema = {name: item for name, item in value.items() if name != "type"}
        return {"type": "json_schema", "json_schema": schema}
    return value


def _wants_logprobs(include: Any) -> bool:
    if include is None:
        return False
    if not isinstance(include, list) or not all(name in _INCLUDED for name in include):
        raise AgentRequestRefused(
            f"include: {include!r:.80} is not served; there are {', '.join(_INCLUDED)}",
            code="unsupported_parameter",
            param="include",
        )
    return _INCLUDED[1] in include


def response(
    turn: AnsweredTurn,
    response_id: str,
    request: AgentRequest,
    body: Mapping[str, Any],
    logprobs: Sequence[Mapping[str, Any]],
    temperature: float,
) -> dict[str, Any]:
    """Makes a Response of an answered turn.

    body: the request of this API. request: the chat request that it stands for.
    logprobs: of the written tokens, in the chat's form; empty if the request did not ask.
    temperature: the run's.
    """
    is_complete = turn.written.finished
    status = "completed" if is_complete else "incomplete"
    return {
        "id": response_id,
        "object": "response",
        "created_at": 0,
        "completed_at": 0,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None if is_complete else {"reason": "max_output_tokens"},
        "instructions": body.get("instructions"),
        "max_output_tokens": request.max_tokens,
        "metadata": body.get("metadata") or {},
        "model": MODEL,
        "output": _output_items(turn, response_id, status, logprobs, _names(body.get("tools"))),
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": body.get("store") is not False,
        "temperature": temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "none" if body.get("tool_choice") == "none" else "auto",
        "tools": body.get("tools") or [],
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": _usage(turn),
        "weight_version": turn.written.version or 0,
    }


def _names(tools: Any) -> dict[str, dict[str, Any]]:
    """Returns the name and the namespace of each tool in a namespace, by its name in a chat."""
    names = {}
    for namespace, tool in _tools_with_namespaces(tools or []):
        if namespace:
            full_name = _full_name(namespace.get("name"), tool.get("name"))
            names[full_name] = {"name": tool.get("name"), "namespace": namespace.get("name")}
    return names


def _output_items(
    turn: AnsweredTurn,
    response_id: str,
    status: str,
    logprobs: Sequence[Mapping[str, Any]],
    names: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Returns a message, and a function_call for each of the answer's calls.

    There is no message beside calls if the answer has no text. names: of tools in namespaces.
    """
    message = turn.answer.message
    calls = message.get("tool_calls") or ()
    items: list[dict[str, Any]] = []
    if message["content"] or not calls:
        part = {
            "type": "output_text",
            "text": message["content"],
            "annotations": [],
            "logprobs": list(logprobs),
        }
        items.append(
            {
                "type": "message",
                "id": f"msg-{response_id}",
                "status": status,
                "role": "assistant",
                "content": [part],
            }
        )
    for call in calls:
        name = call["function"]["name"]
        items.append(
            {
                "type": "function_call",
                "id": f"fc-{call['id']}",
                "call_id": call["id"],
                **names.get(name, {"name": name}),
                "arguments": call["function"]["arguments"],
                "status": "completed",
            }
        )
    return items


def _usage(turn: AnsweredTurn) -> dict[str, Any]:
    num_shown = len(turn.prompt)
    num_written = len(turn.written.tokens)
    return {
        "input_tokens": num_shown,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": num_written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_shown + num_written,
    }


def response_events(answer: Mapping[str, Any]) -> Iterator[bytes]:
    """Yields a whole Response as the events of a stream, with their sequence numbers."""
    for number, event in enumerate(_events(answer)):
        yield named_event({**event, "sequence_number": number})


def _events(answer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {**answer, "status": "in_progress", "output": [], "usage": None, "completed_at": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(answer["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            yield from _message_events(item, place)
        else:
            yield from _call_events(item, place)
    yield {"type": f"response.{answer['status']}", "response": answer}


def _message_events(item: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    (part,) = item["content"]
    begun = {**item, "status": "in_progress", "content": []}
    index = place["output_index"]
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    inside = {**place, "content_index": 0}
    empty = {**part, "text": "", "logprobs": []}
    yield {"type": "response.content_part.added", **inside, "part": empty}
    text, logprobs = part["text"], part["logprobs"]
    yield {"type": "response.output_text.delta", **inside, "delta": text, "logprobs": logprobs}
    yield {"type": "response.output_text.done", **inside, "text": text, "logprobs": logprobs}
    yield {"type": "response.content_part.done", **inside, "part": part}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _call_events(item: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {**item, "status": "in_progress", "arguments": ""}
    index, arguments = place["output_index"], item["arguments"]
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    yield {"type": "response.function_call_arguments.delta", **place, "delta": arguments}
    yield {
        "type": "response.function_call_arguments.done",
        **place,
        "name": item["name"],
        "arguments": arguments,
    }
    yield {"type": "response.output_item.done", "output_index": index, "item": item}

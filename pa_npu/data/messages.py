"""Chat messages of a dataset's row or of a client's request, in the one form that chat templates read.

    content       a text; a list of text parts becomes one, and null is the empty text; for a row
                  with images, parts of images become <image>
    tool_calls    objects of {"type": "function", "function": {"name", "arguments"}}; arguments that
                  are the JSON of an object become that object, other arguments stay the text they
                  are
    tools         a list of objects, or the JSON of one, as columns of a table hold it
    from, value   role and content of ShareGPT's messages; `function_call` is an assistant's message
                  whose value is the JSON of one call or of several

All other fields (name, tool_call_id, reasoning_content, ...) reach the template unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pa_npu.config.words import as_json
from pa_npu.data.rows import is_text

Message = dict[str, Any]
IMAGE_MARK = "<image>"
"""Where an image stands in the text of a row that has images."""

_KNOWN_ROLES = frozenset({"system", "user", "assistant", "tool"})
# ShareGPT's names, those of its descendants (LLaMA-Factory, Hermes), and the field's own.
_ROLES_OF_SHAREGPT = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(
        ("gpt", "chatgpt", "bing", "bard", "model", "assistant", "function_call"), "assistant"
    ),
    **dict.fromkeys(("tool", "observation", "function_response", "function-response"), "tool"),
    "system": "system",
}
_CALL_OF_SHAREGPT = "function_call"
_IMAGE_PARTS = ("image", "image_url")


class BadMessage(Exception):
    """A message that no template can be given; says why, without the place of the message."""


def template_message(
    message: Any, images: list[Any] | None = None, *, marks_images: bool = True
) -> Message:
    """Returns the message as templates read it. Raises BadMessage.

    images: gets what the message's parts hold of images, None for a part that only says where one
    is; None refuses such parts. marks_images: writes <image> where an image stands; False leaves
    the content of a message with images a list of parts.
    """
    if not isinstance(message, Mapping):
        raise BadMessage(f"{as_json(message)} is not an object")
    fields = {name: value for name, value in message.items() if value is not None}
    if is_of_sharegpt(message):
        fields = _named_as_here(fields)
    if not isinstance(fields.get("role"), str):
        raise BadMessage(f"{as_json(message)} has no role that is a text")
    parts = _content_parts(fields.get("content", ""), images)
    if marks_images or None not in parts:
        fields["content"] = "".join(IMAGE_MARK if part is None else part for part in parts)
    else:
        fields["content"] = [_as_part(part) for part in parts if part != ""]
    if calls := fields.pop("tool_calls", None):
        fields["tool_calls"] = [_template_call(call) for call in _list_of(calls, "tool_calls")]
    return fields


def is_of_sharegpt(message: Any) -> bool:
    """Returns whether a message says role and content as `from` and `value`."""
    return (
        isinstance(message, Mapping)
        and message.get("from") is not None
        and message.get("role") is None
    )


def _named_as_here(message: Mapping[str, Any]) -> Message:
    """Returns a message of ShareGPT with role and content.

    Raises BadMessage where nobody is known by the name in `from`.
    """
    sender = message["from"]
    role = _ROLES_OF_SHAREGPT.get(sender.strip().lower()) if isinstance(sender, str) else None
    if role is None:
        known = ", ".join(_ROLES_OF_SHAREGPT)
        raise BadMessage(f"{as_json(message)} is from {as_json(sender)}, who is none of {known}")
    rest = {name: value for name, value in message.items() if name not in ("from", "value")}
    if sender.strip().lower() == _CALL_OF_SHAREGPT:
        return {**rest, "role": role, "content": "", "tool_calls": _calls_of_sharegpt(message)}
    if "value" in message:
        rest["content"] = message["value"]
    return {**rest, "role": role}


def _calls_of_sharegpt(message: Mapping[str, Any]) -> list[Any]:
    """Returns the calls that the value of a `function_call` is, or is the JSON of. Raises
    BadMessage.
    """
    calls = message.get("value")
    if isinstance(calls, str):
        try:
            calls = json.loads(calls)
        except (ValueError, RecursionError):
            raise BadMessage(
                f"{as_json(message)} is a function_call whose value is not the JSON of one"
            ) from None
    return list(calls) if isinstance(calls, (list, tuple)) else [calls]


def without_nulls(value: Any) -> Any:
    """Returns the value without null fields: a table's structs have every field that any of its
    rows has.
    """
    if isinstance(value, Mapping):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [without_nulls(item) for item in value]
    return value


def read_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Returns the functions of a row's column `tools`. Empty where these are not described, as by
    names.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return ()
    if not isinstance(value, (list, tuple)) or not all(_function_name(tool) for tool in value):
        return ()
    return tuple(dict(tool) for tool in value)


def left_out(
    render: Callable[[Sequence[Message], Sequence[dict[str, Any]]], str],
    text: str,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
) -> str | None:
    """Returns the part of messages and tools that is missing in `text`, which `render` made of
    them; None if nothing is.

    Looks for what a template that does not know it passes over: messages of an unusual role, by
    their content, and calls and tools. Their functions get other names in a second rendering, since
    a name such as `add` may stand in the text for another reason.
    """
    for message in messages:
        if message["role"] not in _KNOWN_ROLES and content_text(message).strip() not in text:
            return f"the message of role {message['role']}"
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    names = sorted({_function_name(entry) for entry in (*calls, *tools)})
    probes = {name: f"probe_{number}_of_a_function" for number, name in enumerate(names)}
    if calls:
        probed = render([_with_renamed(message, probes) for message in messages], tools)
        for call in calls:
            if probes[_function_name(call)] not in probed:
                return f"the call of {_function_name(call)} (tool_calls)"
    if tools:
        probed = render(messages, [_renamed(tool, probes) for tool in tools])
        for tool in tools:
            if probes[_function_name(tool)] not in probed:
                return f"the tool {_function_name(tool)} (tools)"
    return None


def _with_renamed(message: Message, names: Mapping[str, str]) -> Message:
    if "tool_calls" not in message:
        return message
    return {**message, "tool_calls": [_renamed(call, names) for call in message["tool_calls"]]}


def _renamed(entry: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Returns an entry of tools or tool_calls whose function has the other name."""
    name = names[_function_name(entry)]
    if "function" in entry:
        return {**entry, "function": {**entry["function"], "name": name}}
    return {**entry, "name": name}


def is_image_part(part: Any) -> bool:
    """Returns whether a part of a content is an image."""
    return isinstance(part, Mapping) and part.get("type") in _IMAGE_PARTS


def _as_part(part: str | None) -> dict[str, str]:
    return {"type": "image"} if part is None else {"type": "text", "text": part}


def content_text(message: Message) -> str:
    """Returns the text of a message's content, without its images."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def _content_parts(content: Any, images: list[Any] | None) -> list[str | None]:
    """Returns the texts of a content, and None for each image between them."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, (list, tuple)):
        raise BadMessage(f"content is {as_json(content)}, not a text or a list of text parts")
    texts: list[str | None] = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        kind = part.get("type") or "text" if isinstance(part, Mapping) else "text"
        if images is not None and kind in _IMAGE_PARTS:
            images.append(_image_of(part))
            texts.append(None)
            continue
        if not isinstance(text, str) or not str(kind).endswith("text"):
            raise BadMessage(
                f"content has the part {as_json(part)}; only parts of type text can be read"
                f"{'' if images is None else ', and of type image'}"
            )
        texts.append(text)
    return texts


def _image_of(part: Mapping[str, Any]) -> Any:
    """Returns the image that a part holds or names; None where it only says that one is there."""
    value = part.get("image_url") if part.get("type") == "image_url" else None
    if value is None:
        value = part.get("image") or part.get("url") or part.get("path")
    if isinstance(value, Mapping) and "url" in value:
        value = value["url"]
    return value


def with_image_parts(message: Message) -> Message:
    """Returns the message as templates of models with images read it: texts and images are parts."""
    pieces = message["content"].split(IMAGE_MARK)
    if len(pieces) == 1:
        return message
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(pieces):
        if number:
            parts.append(_as_part(None))
        if piece:
            parts.append(_as_part(piece))
    return {**message, "content": parts}


def _template_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadMessage(f"tool_calls has {as_json(call)}, which names no function")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    rest = (
        {name: value for name, value in call.items() if value is not None}
        if "function" in call
        else {}
    )
    return {"type": "function", **rest, "function": {**function, "arguments": arguments}}


def _parsed(arguments: str) -> Any:
    """Returns the value of a JSON text; the text itself if it is no JSON, since a model may have
    written it.
    """
    try:
        value = json.loads(arguments)
    except RecursionError:
        raise BadMessage("tool_calls has arguments that are nested too deeply") from None
    except ValueError:
        return arguments
    return value if is_text(value) else arguments


def _list_of(value: Any, name: str) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise BadMessage(f"{name} is {as_json(value)}, not a list")
    return value


def _function_name(tool: Any) -> str:
    """Returns the name of the function that an entry of tools describes; empty where it describes
    none.
    """
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""

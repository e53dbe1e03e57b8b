"""Fields of requests and named events that the Responses and the Messages API have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pa_npu.agents.openai_format import AgentRequestRefused


def shared_fields(
    body: Any,
    *,
    as_in_chat: Sequence[str],
    read: Sequence[str],
    fixed: Mapping[str, Sequence[Any]],
) -> dict[str, Any]:
    """Returns the fields of a request that a chat request has too.

    Args:
        as_in_chat: names of fields that mean the same in a chat request.
        read: names of fields that the caller translates.
        fixed: the values that fields without effect may have.

    Raises RequestRefused for a field that is in none of these, or has another value.
    """
    if not isinstance(body, Mapping):
        raise AgentRequestRefused("the body must be a JSON object")
    shared = {}
    for name, value in body.items():
        if name in as_in_chat:
            shared[name] = value
        elif name not in read and value is not None and value not in fixed.get(name, ()):
            raise AgentRequestRefused(
                f"{name}: {value!r:.60} is not served here; leave it out",
                code="unsupported_parameter",
                param=name,
            )
    return shared


def list_of_objects(value: Any, name: str) -> list[Mapping[str, Any]]:
    """Returns the value of a field. Raises RequestRefused unless it is a list of objects."""
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise AgentRequestRefused(f"{name}: must be a list of objects", param=name)
    return value


def named_event(data: Mapping[str, Any]) -> bytes:
    """Returns one server-sent event, whose name is its `type`."""
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()

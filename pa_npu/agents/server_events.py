"""Server-sent events with a name, as the Responses and the Messages API stream them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def named_event(data: Mapping[str, Any]) -> bytes:
    """Returns one event, whose name is its `type`."""
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()

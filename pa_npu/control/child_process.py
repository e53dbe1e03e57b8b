"""Start of a helper process that runs users' code: it keeps its pipes from that code."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any


def private_pipes() -> tuple[Any, Any]:
    """(input, output): takes stdin and stdout away from everything that runs in this process later, children included."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies


def send(replies: Any, message: Mapping[str, Any]) -> None:
    """One reply, a line of JSON."""
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()

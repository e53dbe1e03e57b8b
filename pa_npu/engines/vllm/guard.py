"""The lock on an engine's HTTP door: every path but /health wants the API key. Standard library only.

It runs inside vLLM's API server (`--middleware pa_npu.engines.vllm.guard.EngineGuard`), in the engine's own interpreter.
vLLM's own key covers /v1 and a few more prefixes and lets OPTIONS pass; /collective_rpc, which calls any method of the
workers, is not among them.

The key is the environment's VLLM_API_KEY and travels as `Authorization: Bearer KEY`. Without one the guard refuses everything.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

KEY_VARIABLE = "VLLM_API_KEY"
OPEN_PATH = "/health"
REFUSAL = (
    json.dumps({"error": {"message": f"send this engine's API key: Authorization: Bearer ${KEY_VARIABLE}"}}) + "\n"
)

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_POLICY_VIOLATION = 1008


def authorised(authorization: Iterable[bytes], key: str) -> bool:
    """Whether the one Authorization header of a request carries the key; takes the same time for every wrong key."""
    values = list(authorization)
    if len(values) != 1 or not key:
        return False
    scheme, _, sent = values[0].partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(sent, key.encode())


class EngineGuard:
    """ASGI middleware: answers 401 to requests without the key and passes on all others, and what is not a request."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._key = os.environ.get(KEY_VARIABLE, "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            body = REFUSAL.encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"www-authenticate", b"Bearer"),
                # the request's body is not read, so the connection cannot serve another one
                (b"connection", b"close"),
            ]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _may_pass(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["path"] == OPEN_PATH:
            return True
        return authorised((value for name, value in scope["headers"] if name.lower() == b"authorization"), self._key)

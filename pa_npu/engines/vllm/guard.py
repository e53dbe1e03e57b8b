"""The API key and the identity of a vLLM server (`--middleware pa_npu.engines.vllm.guard.EngineGuard`). Standard library only.

It runs inside vLLM's API server, in the engine's own interpreter. vLLM's own key covers /v1 and a
few more prefixes and lets OPTIONS pass; /collective_rpc, which calls any method of the workers, is
not among them.

A load of weights (pa_receive, pa_swap) resets the prefix cache before it is answered: no request of
its own, and no way to forget it. An engine that is put to sleep has no version any more: its
weights' memory is gone.

The weight version is what the workers answered to the last load. vLLM's own (set_weight_version) is
not used: releases before 0.32 do not have it, and it is in the answers of /inference/v1/generate
only.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from pa_npu.engines.http_server import KEY_VARIABLE, OPEN_PATH, REFUSAL, Identity, authorised

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_POLICY_VIOLATION = 1008
_WORKERS_PATH = "/collective_rpc"
_LOADS = ("pa_receive", "pa_swap")
_RESET_PATH = "/reset_prefix_cache"
_SLEEP_PATH = "/sleep"
# The engine holds blocks of requests that have just ended for a step; what is in use for longer is
# a request in flight.
_RESET_WITHIN_S, _RESET_PAUSE_S = 10.0, 0.005


class EngineGuard:
    """ASGI middleware: answers 401 to requests without the key and passes on all others, and what
    is not a request.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        self._key = os.environ.get(KEY_VARIABLE, "")
        self._identity = Identity()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
        elif self._may_pass(scope):
            await self._pass(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            # the request's body is not read, so the connection cannot serve another one
            await _answer(
                send, 401, REFUSAL, (b"www-authenticate", b"Bearer"), (b"connection", b"close")
            )

    def _may_pass(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["path"] == OPEN_PATH:
            return True
        return authorised(
            (value for name, value in scope["headers"] if name.lower() == b"authorization"),
            self._key,
        )

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        before = self._identity.version

        async def send_signed(message: Message) -> None:
            if message["type"] == "http.response.start":
                signature = [
                    (name.encode(), value.encode())
                    for name, value in self._identity.headers(before).items()
                ]
                message = {**message, "headers": [*message.get("headers", ()), *signature]}
            await send(message)

        if scope["type"] == "http" and scope["path"] == _SLEEP_PATH:
            self._identity.version = None
        if scope["type"] == "http" and scope["path"] == _WORKERS_PATH:
            await self._call_workers(scope, receive, send)
        else:
            await self._app(scope, receive, send_signed)

    async def _call_workers(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A call of the workers; where it loads weights, the answer is held back until the version
        in it is known.
        """
        asked, start, answered = b"", None, b""
        loads = False

        async def receive_and_look() -> Message:
            nonlocal asked, loads
            message = await receive()
            if message["type"] == "http.request":
                asked += message.get("body", b"")
                if not message.get("more_body") and (_object(asked) or {}).get("method") in _LOADS:
                    loads, self._identity.version = True, None
            return message

        async def hold_back(message: Message) -> None:
            nonlocal start, answered
            if message["type"] == "http.response.start":
                start = message
                return
            if message["type"] != "http.response.body":
                await send(message)
                return
            answered += message.get("body", b"")
            if message.get("more_body"):
                return
            assert start is not None, "ASGI: an answer starts before its body"
            if loads and start["status"] == 200:
                if not await self._reset_prefix_cache(scope):
                    reason = (
                        f"the prefix cache is still in use {_RESET_WITHIN_S:g} s after the load"
                    )
                    await _answer(send, 500, json.dumps({"error": {"message": reason}}))
                    return
                self._identity.version = _loaded_version(answered)
            signature = self._identity.headers(self._identity.version).items()
            headers = [
                *start.get("headers", ()),
                *((name.encode(), value.encode()) for name, value in signature),
            ]
            await send({**start, "headers": headers})
            await send({"type": "http.response.body", "body": answered})

        await self._app(scope, receive_and_look, hold_back)

    async def _reset_prefix_cache(self, scope: Scope) -> bool:
        """The same as a request for it from outside; false where requests use the cache for longer
        than they may.
        """
        headers = [
            (name, value)
            for name, value in scope["headers"]
            if not name.lower().startswith(b"content-")
        ]
        path = {"path": _RESET_PATH, "raw_path": _RESET_PATH.encode(), "query_string": b""}
        end = time.monotonic() + _RESET_WITHIN_S
        while True:
            status, answer = await _ask(
                self._app, {**scope, **path, "method": "POST", "headers": headers}
            )
            if status == 200 and _success(answer):
                return True
            if status != 200 or time.monotonic() > end:
                return False
            await asyncio.sleep(_RESET_PAUSE_S)


async def _ask(app: Application, scope: Scope) -> tuple[int, bytes]:
    """Status and body of the application's answer to a request without a body."""
    status, body = 0, b""

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def keep(message: Message) -> None:
        nonlocal status, body
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            body += message.get("body", b"")

    await app(scope, receive, keep)
    return status, body


async def _answer(send: Send, status: int, text: str, *more: tuple[bytes, bytes]) -> None:
    body = text.encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *more,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _object(data: bytes) -> dict[str, Any] | None:
    """The JSON object in it, if it is one."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _success(answer: bytes) -> bool:
    """vLLM before 0.31 answers with an empty body."""
    found = _object(answer or b"{}")
    return found is not None and bool(found.get("success", True))


def _loaded_version(answer: bytes) -> int | None:
    """The version that all workers say they hold."""
    try:
        versions = {result["version"] for result in (_object(answer) or {})["results"]}
    except (KeyError, TypeError):
        return None
    (version,) = versions if len(versions) == 1 else (None,)
    return version if type(version) is int else None

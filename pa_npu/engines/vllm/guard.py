"""The API key and the identity of a vLLM server, and its compact answers.

Used by `--middleware pa_npu.engines.vllm.guard.EngineGuard`, inside vLLM's API server, in the
engine's own interpreter. vLLM's own key covers /v1 and a few more prefixes and lets OPTIONS pass.
It does not cover /collective_rpc, which calls any method of the workers.

A load of weights (pa_receive, pa_swap) resets the prefix cache before it is answered, and for a
model that reads images the cache of what its tower computed, which would go on with the old
weights. So it needs no request of its own, and cannot be forgotten. An engine that is put to sleep loses its version:
its weights' memory is gone.

The weight version is the workers' answer to the last load. vLLM's own (set_weight_version) is not
used: releases before 0.32 do not have it, and only answers of /inference/v1/generate contain it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from pa_npu.engines.http_server import (
    COMPACT_TYPE,
    KEY_VARIABLE,
    OPEN_PATH,
    REFUSAL,
    EngineIdentity,
    accepts_compact,
    authorised,
)

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_POLICY_VIOLATION = 1008
_WORKERS_PATH = "/collective_rpc"
_LOADS = ("pa_receive", "pa_swap")
_RESET_PATH = "/reset_prefix_cache"
_RESET_IMAGES_PATH = "/reset_encoder_cache"
RESETS_IMAGES = "PA_NPU_RESETS_IMAGES"
"""Variable of engines whose model reads images."""
_SLEEP_PATH = "/sleep"
_RESPONSES_PATH = "/v1/completions"
# The engine holds blocks of requests that have just ended for a step. Blocks in use for longer
# belong to a request in flight.
_RESET_WITHIN_S = 10.0
_RESET_PAUSE_S = 0.005


class EngineGuard:
    """ASGI middleware that answers 401 to requests without the key, and passes on all others.

    Messages that are no requests pass too.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        self._key = os.environ.get(KEY_VARIABLE, "")
        self._identity = EngineIdentity()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
        elif self._may_pass(scope):
            await self._pass(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            # The request's body is not read, so the connection cannot serve another one.
            await _answer(
                send, 401, REFUSAL, (b"www-authenticate", b"Bearer"), (b"connection", b"close")
            )

    def _may_pass(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["path"] == OPEN_PATH:
            return True
        headers = scope["headers"]
        sent = [value for name, value in headers if name.lower() == b"authorization"]
        return authorised(sent, self._key)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        before = self._identity.version

        async def send_signed(message: Message) -> None:
            if message["type"] == "http.response.start":
                signature = _signature(self._identity, before)
                message = {**message, "headers": [*message.get("headers", ()), *signature]}
            await send(message)

        if scope["type"] == "http" and scope["path"] == _SLEEP_PATH:
            self._identity.version = None
        if scope["type"] == "http" and scope["path"] == _WORKERS_PATH:
            await self._call_workers(scope, receive, send)
        elif _wants_compact_answer(scope):
            await self._respond(scope, receive, send_signed)
        else:
            await self._app(scope, receive, send_signed)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request for responses with arrays; with an error in words where it fails."""
        from pa_npu.engines.vllm import responses

        body = await _read_body(receive)
        if body is None:
            return
        answer = asyncio.ensure_future(responses.respond(scope["app"], body))
        try:
            encoded = await responses.unless_disconnected(receive, answer)
        except responses.VllmRequestRefused as error:
            await _answer(send, 400, json.dumps({"error": {"message": str(error)}}))
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            logger.exception("a request for responses failed")
            await _answer(send, 500, json.dumps({"error": {"message": message}}))
        else:
            if encoded is not None:
                await _answer(send, 200, encoded, content_type=COMPACT_TYPE)

    async def _call_workers(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a call of the workers on.

        If it loads weights, the answer is held back until the version in it is known.
        """
        request_body = b""
        answer_body = b""
        start: Message | None = None
        loads = False

        async def receive_and_look() -> Message:
            nonlocal request_body, loads
            message = await receive()
            if message["type"] == "http.request":
                request_body += message.get("body", b"")
                is_complete = not message.get("more_body")
                if is_complete and (_object(request_body) or {}).get("method") in _LOADS:
                    loads = True
                    self._identity.version = None
            return message

        async def hold_back(message: Message) -> None:
            nonlocal start, answer_body
            if message["type"] == "http.response.start":
                start = message
                return
            if message["type"] != "http.response.body":
                await send(message)
                return
            answer_body += message.get("body", b"")
            if message.get("more_body"):
                return
            assert start is not None, "ASGI: an answer starts before its body"
            if loads and start["status"] == 200:
                if os.environ.get(RESETS_IMAGES) and not await self._reset_images(scope):
                    reason = "this release has no reset of its cache of images after a load"
                    await _answer(send, 500, json.dumps({"error": {"message": reason}}))
                    return
                if not await self._reset_prefix_cache(scope):
                    reason = (
                        f"the prefix cache is still in use {_RESET_WITHIN_S:g} s after the load"
                    )
                    await _answer(send, 500, json.dumps({"error": {"message": reason}}))
                    return
                self._identity.version = _loaded_version(answer_body)
            signature = _signature(self._identity, self._identity.version)
            await send({**start, "headers": [*start.get("headers", ()), *signature]})
            await send({"type": "http.response.body", "body": answer_body})

        await self._app(scope, receive_and_look, hold_back)

    async def _reset_images(self, scope: Scope) -> bool:
        """Empties the cache of images; returns False if the server cannot."""
        status, _ = await _ask(self._app, _posted(scope, _RESET_IMAGES_PATH))
        return status == 200

    async def _reset_prefix_cache(self, scope: Scope) -> bool:
        """Resets the prefix cache, as a request from outside would.

        Returns False if requests use the cache for longer than they may.
        """
        end = time.monotonic() + _RESET_WITHIN_S
        while True:
            status, answer = await _ask(self._app, _posted(scope, _RESET_PATH))
            if status == 200 and _success(answer):
                return True
            if status != 200 or time.monotonic() > end:
                return False
            await asyncio.sleep(_RESET_PAUSE_S)


def _posted(scope: Scope, path: str) -> Scope:
    """Returns the scope of a POST without a body to another path, with the same key."""
    headers = [
        (name, value)
        for name, value in scope["headers"]
        if not name.lower().startswith(b"content-")
    ]
    place = {"path": path, "raw_path": path.encode(), "query_string": b""}
    return {**scope, **place, "method": "POST", "headers": headers}


async def _ask(app: Application, scope: Scope) -> tuple[int, bytes]:
    """Returns status and body of the application's answer to a request without a body."""
    status = 0
    body = b""

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


def _signature(identity: EngineIdentity, version_before: int | None) -> list[tuple[bytes, bytes]]:
    """Returns the headers of the identity, as ASGI has them."""
    headers = identity.headers(version_before)
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def _wants_compact_answer(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] != _RESPONSES_PATH:
        return False
    values = [value for name, value in scope["headers"] if name.lower() == b"accept"]
    return accepts_compact(values)


async def _read_body(receive: Receive) -> bytes | None:
    """Returns the body of a request; None if its client went away."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _answer(
    send: Send,
    status: int,
    content: str | bytes,
    *more: tuple[bytes, bytes],
    content_type: str = "application/json",
) -> None:
    body = content.encode() if isinstance(content, str) else content
    headers = [
        (b"content-type", content_type.encode()),
        (b"content-length", str(len(body)).encode()),
        *more,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _object(data: bytes) -> dict[str, Any] | None:
    """Returns the JSON object in `data`, or None if it is none."""
    try:
        decoded = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return decoded if isinstance(decoded, dict) else None


def _success(answer: bytes) -> bool:
    """Returns whether a reset succeeded; vLLM before 0.31 answers with an empty body."""
    decoded = _object(answer or b"{}")
    return decoded is not None and bool(decoded.get("success", True))


def _loaded_version(answer: bytes) -> int | None:
    """Returns the version that all workers hold, by their answer; None if they differ."""
    try:
        versions = {result["version"] for result in (_object(answer) or {})["results"]}
    except (KeyError, TypeError):
        return None
    if len(versions) != 1:
        return None
    version = versions.pop()
    return version if type(version) is int else None

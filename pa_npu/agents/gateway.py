"""The gateway: an HTTP server beside the coordinator's loop, which OpenAI's clients use by base URL and key.

    GET  /health                                open to all
    POST /sessions/ID/v1/chat/completions       a session's key, or the run's; answered at once, or
                                                as a stream of events
    POST /sessions/ID/v1/completions            the same for a text or token ids
    GET  /sessions/ID/v1/models, /v1/models/policy
    POST /sessions/ID/reward                    {"reward": number, "turn": id of a completion, or
                                                none}
    POST /sessions/ID/end                       the agent has done its task; until then, and for a
                                                while, rewards are taken after a limit was reached
    GET  /tasks?wait_s=30                       a program's key, or the run's: the next task, or {"task": null}
    what agent.port adds for the run's key is in coordinator/served_run.py

Errors have OpenAI's form. A body has a largest size and a time to arrive; a connection that asks
nothing for a while is closed, and more than a set number are not accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from pa_npu.agents.openai_format import (
    Asked,
    Refused,
    events,
    models,
    named_model,
    read_request,
    whole_answer,
)
from pa_npu.agents.session import Session, Sessions, Turn
from pa_npu.control.tasks import cancel
from pa_npu.data.rows import is_text
from pa_npu.engines.http_server import OPEN_PATH, authorised
from pa_npu.errors import ConfigError, PaNpuError

logger = logging.getLogger(__name__)

GATEWAY_FILE = "gateway.json"
LARGEST_REQUEST_BYTES = 2**25
MOST_CONNECTIONS = 4096
_READ_S = 30.0  # of a body that drips, and of an event that is not read
_IDLE_S = 60.0  # of a connection without a request
_LONGEST_WAIT_S = 60.0
_SHORT_BYTES = 2**16  # of a body with a reward
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
CHAT_FIELDS = ("messages", "tools")
TEXT_FIELDS = ("prompt",)


class Gateway:
    """temperature: the run's. routes: further ones, for the run's key."""

    def __init__(
        self,
        sessions: Sessions,
        temperature: float,
        routes: Callable[[web.Application, Gateway], None] | None = None,
    ) -> None:
        self.sessions = sessions
        self._temperature = temperature
        self._routes = routes
        self._busy: set[Any] = set()  # connections with a request
        self._seen: dict[Any, float] = {}  # when a connection was busy last, or seen first

    def app(self) -> web.Application:
        app = web.Application(client_max_size=LARGEST_REQUEST_BYTES, middlewares=[self._explain])
        add = app.router
        add.add_get(OPEN_PATH, self._health)
        add.add_post("/sessions/{id}/v1/chat/completions", self._chat)
        add.add_post("/sessions/{id}/v1/completions", self._completion)
        add.add_get("/sessions/{id}/v1/models", self._models)
        add.add_get("/sessions/{id}/v1/models/{model}", self._model)
        add.add_post("/sessions/{id}/reward", self._reward)
        add.add_post("/sessions/{id}/end", self._end)
        add.add_get("/tasks", self._tasks)
        if self._routes is not None:
            self._routes(app, self)
        return app

    @web.middleware
    async def _explain(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = request.protocol
        self._busy.add(connection)
        try:
            return await handler(request)
        except Refused as refused:
            return refused.response()
        except PaNpuError as error:
            return Refused(str(error)).response()
        except web.HTTPRequestEntityTooLarge:
            return Refused(
                f"the body is longer than {LARGEST_REQUEST_BYTES} bytes", status=413
            ).response()
        except web.HTTPException as error:
            line = f"{request.method} {request.path}: {error.reason}; see docs/agents.md"
            return Refused(line, status=error.status).response()
        except asyncio.TimeoutError:
            return Refused(f"the body did not arrive within {_READ_S:g} s", status=408).response()
        except ConnectionError:  # nobody is there to read an answer
            return Refused("the connection was lost").response()
        except (
            Exception
        ) as error:  # a request's content is anything, and clients read errors in this form alone
            logger.exception("%s %s", request.method, request.path)
            return Refused(
                f"{type(error).__name__} while answering; see the log", status=500
            ).response()
        finally:
            self._busy.discard(connection)
            self._seen[connection] = time.monotonic()

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        return web.json_response(models(None))

    async def _model(self, request: web.Request) -> web.Response:
        self._session(request)
        return web.json_response(named_model(request.match_info["model"], None))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        body = await read_json(request, session.check_body)
        asked = read_request(body, temperature=self._temperature, endpoint_fields=CHAT_FIELDS)
        return await self._answer(
            request, session, await session.chat_turn(asked), asked, "chatcmpl"
        )

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        body = await read_json(request, session.check_body)
        asked = read_request(body, temperature=self._temperature, endpoint_fields=TEXT_FIELDS)
        return await self._answer(
            request, session, await session.completion_turn(asked), asked, "cmpl"
        )

    async def _answer(
        self, request: web.Request, session: Session, turn: Turn, asked: Asked, kind: str
    ) -> web.StreamResponse:
        name = f"{kind}-{session.id}-{turn.node.number}"
        written = [(turn.answer, turn.written)]
        return await send(
            request, whole_answer(session.chat, name, written, turn.prompt_tokens, asked), asked
        )

    async def _reward(self, request: web.Request) -> web.Response:
        session = self._session(request)
        body = await read_json(request, _check_short)
        if (
            not isinstance(body, dict)
            or set(body) - {"reward", "turn"}
            or not isinstance(body.get("turn"), (str, type(None)))
        ):
            raise Refused(
                'the body must be {"reward": a number, "turn": the id of a completion, or none}'
            )
        session.give_reward(body.get("reward"), body.get("turn"))
        return web.json_response({})

    async def _end(self, request: web.Request) -> web.Response:
        self._session(request).finish()
        return web.json_response({})

    async def _tasks(self, request: web.Request) -> web.Response:
        taker = request.headers.get("x-program", "")
        self.authorise(request, f"program:{taker}")
        try:
            wait_s = min(max(0.0, float(request.query.get("wait_s", "0"))), _LONGEST_WAIT_S)
        except ValueError:
            raise Refused("wait_s: must be a number of seconds", param="wait_s") from None
        session = await self.sessions.take(taker, wait_s)
        if session is None:
            return web.json_response({"task": None})
        return web.json_response(
            {
                "task": session.task,
                "session": session.id,
                "base_url": self.sessions.base_url(session),
                "api_key": self.sessions.key_of(f"session:{session.id}"),
            }
        )

    def _session(self, request: web.Request) -> Session:
        """The open session of a path, for a client with its key. Raises Refused."""
        session_id = request.match_info["id"]
        self.authorise(request, f"session:{session_id}")
        session = self.sessions.find(session_id)
        if session is None:
            raise Refused("this session has ended, or never was", status=404, code="session_ended")
        return session

    def authorise(self, request: web.Request, what: str | None = None) -> None:
        """Raises Refused unless the request has the run's key, or the one that belongs to `what`."""
        sent = [
            value.encode("utf-8", "surrogateescape")
            for value in request.headers.getall("Authorization", [])
        ]
        keys = [self.sessions.key, *([self.sessions.key_of(what)] if what is not None else [])]
        if not any([authorised(sent, key) for key in keys]):
            raise Refused(
                "this key may not do that; send the one that you were given",
                status=401,
                code="invalid_api_key",
            )

    @asynccontextmanager
    async def serving(self, host: str, port: int, run_dir: Path | None) -> AsyncIterator[None]:
        """Serves in the running event loop; port 0 takes a free one.

        RUN/gateway.json names it meanwhile. Raises ConfigError.
        """
        runner = web.AppRunner(
            self.app(),
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=0.1,
            keepalive_timeout=_IDLE_S,
        )
        await runner.setup()
        file = run_dir / GATEWAY_FILE if run_dir is not None else None
        sweeper: asyncio.Task[None] | None = None
        server: asyncio.Server | None = None
        try:
            try:
                server = await asyncio.get_running_loop().create_server(
                    lambda: self._protocol(runner), host, port
                )
            except OSError as error:
                raise ConfigError(
                    f"agent.port: cannot listen at {host}:{port} ({error.strerror or error}); "
                    "choose another"
                ) from None
            address = f"[{host}]" if ":" in host else host
            self.sessions.url = f"http://{address}:{server.sockets[0].getsockname()[1]}"
            if file is not None:
                _write_address(file, self.sessions.url)
            sweeper = asyncio.create_task(
                self._sweep(runner), name="idle connections of the gateway"
            )
            logger.info("gateway at %s", self.sessions.url)
            yield
        finally:
            if file is not None:
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)
            if sweeper is not None:
                await cancel([sweeper])
            if server is not None:
                server.close()
            await runner.cleanup()

    def _protocol(self, runner: web.AppRunner) -> asyncio.BaseProtocol:
        assert runner.server is not None
        if len(_alive(runner)) >= MOST_CONNECTIONS:
            return _NotAccepted()
        return runner.server()

    async def _sweep(self, runner: web.AppRunner) -> None:
        """aiohttp waits for the rest of a request's head, and for a client that does not read its
        answer, for ever.
        """
        while True:
            await asyncio.sleep(_IDLE_S / 4)
            now_s, connections = time.monotonic(), _alive(runner)
            self._seen = {one: self._seen.get(one, now_s) for one in connections}
            for connection in connections:
                if connection in self._busy or now_s - self._seen[connection] < _IDLE_S:
                    continue
                connection.transport.abort()


def _write_address(file: Path, url: str) -> None:
    try:
        file.write_text(json.dumps({"url": url}) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"run.dir: {file} cannot be written ({error.strerror or error}), which tells agents "
            "the gateway's address; move what is there away, or choose another run.dir"
        ) from None


def _alive(runner: web.AppRunner) -> list[Any]:
    """Connections without those that aiohttp keeps though they have been lost, as one is whose
    client did not read.
    """
    assert runner.server is not None
    return [one for one in runner.server.connections if one.transport is not None]


class _NotAccepted(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


async def read_json(request: web.Request, check_size: Callable[[int], None] | None = None) -> Any:
    """The body. check_size: raises Refused for a number of bytes that is too large to be parsed.

    Raises Refused where it is no JSON, or holds what is no text.
    """
    if check_size is not None and (request.content_length or 0) <= LARGEST_REQUEST_BYTES:
        check_size(request.content_length or 0)
    data = await asyncio.wait_for(request.read(), _READ_S)
    if check_size is not None:  # of a body in chunks
        check_size(len(data))
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise Refused("the body is no JSON") from None
    if _SURROGATE.search(data) and not is_text(body):
        raise Refused(
            "the body has half of a surrogate pair (\\uD800 to \\uDFFF), which is no text"
        )
    return body


def _check_short(num_bytes: int) -> None:
    if num_bytes > _SHORT_BYTES:
        raise Refused(f"the body has {num_bytes} bytes, more than {_SHORT_BYTES}", status=413)


async def send(request: web.Request, answer: dict[str, Any], asked: Asked) -> web.StreamResponse:
    """An answer as the request wants it.

    A client that hangs up, or reads nothing, ends its stream.
    """
    if not asked.stream:
        return web.json_response(answer)
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    try:
        await response.prepare(request)
        for event in events(answer, asked.usage):
            await asyncio.wait_for(response.write(event), _READ_S)
        await response.write_eof()
    except (ConnectionError, asyncio.TimeoutError):
        if request.transport is not None:
            request.transport.abort()
    return response

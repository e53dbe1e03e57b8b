"""The gateway: an HTTP server in the coordinator's process that OpenAI's and Anthropic's clients can use.

    GET  /health                             needs no key
    POST /sessions/ID/v1/chat/completions    the session's key or the run's; answers whole or as
                                             a stream of events
    POST /sessions/ID/v1/completions         the same for a text or token ids
    POST /sessions/ID/v1/responses           the same in the form of OpenAI's Responses API
    POST /sessions/ID/v1/messages            the same in the form of Anthropic's Messages API
    POST /sessions/ID/v1/messages/count_tokens
    GET  /sessions/ID/v1/models, /v1/models/policy
    POST /sessions/ID/reward                 {"reward": number, "turn": id of a completion or null}
    POST /sessions/ID/end                    the agent has done its task, or {"failed": true}; rewards
                                             are accepted until then, and for a while after a limit
                                             was reached
    GET  /tasks?wait_s=30                    a program's key or the run's; returns the next task, or
                                             {"task": null}

With agent.port, coordinator/served_run.py adds routes for the run's key.

Errors have OpenAI's form, those of /v1/messages Anthropic's. A body has a maximum size and a
deadline. A connection without a request is closed after a while, and the number of connections is
limited.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from pa_npu.agents import messages_format, responses_format
from pa_npu.agents.open_sessions import Sessions
from pa_npu.agents.openai_format import (
    AgentRequest,
    AgentRequestRefused,
    chat_logprobs,
    events,
    models,
    named_model,
    read_request,
    whole_answer,
)
from pa_npu.agents.session import AnsweredTurn, Session
from pa_npu.control.tasks import cancel
from pa_npu.data.rows import is_text
from pa_npu.engines.http_server import OPEN_PATH, authorised
from pa_npu.errors import ConfigError, PaNpuError

logger = logging.getLogger(__name__)

GATEWAY_FILE = "gateway.json"
LARGEST_REQUEST_BYTES = 2**25
MAX_CONNECTIONS = 4096
_READ_S = 30.0  # until a body has arrived, and until a client has read an event
_IDLE_S = 60.0  # after which a connection without a request is closed
_MAX_WAIT_S = 60.0
_MAX_REWARD_BYTES = 2**16  # size of a body with a reward
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
CHAT_FIELDS = ("messages", "tools")
_SESSION_MESSAGES = "/sessions/{id}/v1/messages"
TEXT_FIELDS = ("prompt",)


class Gateway:
    """Serves the open sessions over HTTP.

    routes: adds further routes to the application; they are for the run's key.
    """

    def __init__(
        self,
        sessions: Sessions,
        routes: Callable[[web.Application, Gateway], None] | None = None,
    ) -> None:
        self.sessions = sessions
        self._routes = routes
        self._busy: set[Any] = set()  # connections that have a request
        self._last_busy: dict[Any, float] = {}  # when each was busy last, or was first seen

    def app(self) -> web.Application:
        app = web.Application(
            client_max_size=LARGEST_REQUEST_BYTES, middlewares=[self._answer_errors]
        )
        add = app.router
        add.add_get(OPEN_PATH, self._health)
        add.add_post("/sessions/{id}/v1/chat/completions", self._chat)
        add.add_post("/sessions/{id}/v1/completions", self._completion)
        add.add_post("/sessions/{id}/v1/responses", self._response)
        add.add_post(_SESSION_MESSAGES, self._message)
        add.add_post(f"{_SESSION_MESSAGES}/count_tokens", self._count_tokens)
        add.add_get("/sessions/{id}/v1/models", self._models)
        add.add_get("/sessions/{id}/v1/models/{model}", self._model)
        add.add_post("/sessions/{id}/reward", self._reward)
        add.add_post("/sessions/{id}/end", self._end)
        add.add_get("/tasks", self._tasks)
        if self._routes is not None:
            self._routes(app, self)
        return app

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answers every error in the form that the path's clients understand."""
        connection = request.protocol
        self._busy.add(connection)
        try:
            return await handler(request)
        except AgentRequestRefused as error:
            refused = error
        except PaNpuError as error:
            refused = AgentRequestRefused(str(error))
        except web.HTTPRequestEntityTooLarge:
            line = f"the body is longer than {LARGEST_REQUEST_BYTES} bytes"
            refused = AgentRequestRefused(line, status=413)
        except web.HTTPException as error:
            line = f"{request.method} {request.path}: {error.reason}; see docs/agents.md"
            refused = AgentRequestRefused(line, status=error.status)
        except asyncio.TimeoutError:
            line = f"the body did not arrive within {_READ_S:g} s"
            refused = AgentRequestRefused(line, status=408)
        except ConnectionError:  # nobody is left to read an answer
            refused = AgentRequestRefused("the connection was lost")
        except Exception as error:  # a request may contain anything
            logger.exception("%s %s", request.method, request.path)
            line = f"{type(error).__name__} while answering; see the log"
            refused = AgentRequestRefused(line, status=500)
        finally:
            self._busy.discard(connection)
            self._last_busy[connection] = time.monotonic()
        if "/v1/messages" in request.path:
            return messages_format.error_response(refused)
        return refused.response()

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
        wanted = read_request(body, rules=session.rules, endpoint_fields=CHAT_FIELDS)
        turn = await session.chat_turn(wanted)
        return await self._answer(request, session, turn, wanted, "chatcmpl")

    async def _response(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        body = await read_json(request, session.check_body)
        asked = responses_format.chat_body(body, session.conversations)
        wanted = read_request(asked, rules=session.rules, endpoint_fields=CHAT_FIELDS)
        turn = await session.chat_turn(wanted)
        response_id = completion_id("resp", session, turn)
        logprobs = chat_logprobs(session.chat, turn.written, wanted) if wanted.logprobs else []
        temperature = session.rules.temperature
        answer = responses_format.response(turn, response_id, wanted, body, logprobs, temperature)
        if answer["store"]:
            # the instructions are of this request alone
            number = 1 if body.get("instructions") is not None else 0
            conversation = [*asked["messages"][number:], turn.answer.message]
            session.conversations[response_id] = conversation
        return await send_answer(
            request, answer, responses_format.response_events(answer) if wanted.stream else None
        )

    async def _message(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        body = await read_json(request, session.check_body)
        asked = messages_format.chat_body(body)
        wanted = read_request(asked, rules=session.rules, endpoint_fields=CHAT_FIELDS)
        turn = await session.chat_turn(wanted)
        answer = messages_format.message(turn, completion_id("msg", session, turn), wanted)
        return await send_answer(
            request, answer, messages_format.message_events(answer) if wanted.stream else None
        )

    async def _count_tokens(self, request: web.Request) -> web.Response:
        session = self._session(request)
        asked = messages_format.chat_body(await read_json(request, session.check_body))
        wanted = read_request(asked, rules=session.rules, endpoint_fields=CHAT_FIELDS)
        return web.json_response({"input_tokens": await session.count_tokens(wanted)})

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        body = await read_json(request, session.check_body)
        wanted = read_request(body, rules=session.rules, endpoint_fields=TEXT_FIELDS)
        turn = await session.completion_turn(wanted)
        return await self._answer(request, session, turn, wanted, "cmpl")

    async def _answer(
        self,
        request: web.Request,
        session: Session,
        turn: AnsweredTurn,
        wanted: AgentRequest,
        kind: str,
    ) -> web.StreamResponse:
        choices = [(turn.answer, turn.written)]
        prompt = turn.prompt.tolist()
        named = completion_id(kind, session, turn)
        answer = whole_answer(session.chat, named, choices, prompt, wanted)
        return await send_answer(
            request, answer, events(answer, wanted.usage) if wanted.stream else None
        )

    async def _reward(self, request: web.Request) -> web.Response:
        session = self._session(request)
        body = await read_json(request, _check_reward_size)
        if (
            not isinstance(body, dict)
            or set(body) - {"reward", "turn"}
            or not isinstance(body.get("turn"), (str, type(None)))
        ):
            raise AgentRequestRefused(
                'the body must be {"reward": a number, "turn": the id of a completion, or null}'
            )
        session.give_reward(body.get("reward"), body.get("turn"))
        return web.json_response({})

    async def _end(self, request: web.Request) -> web.Response:
        session = self._session(request)
        body = await read_json(request, _check_reward_size) if request.can_read_body else {}
        if not isinstance(body, dict) or type(body.get("failed", False)) is not bool:
            raise AgentRequestRefused('the body must be {"failed": true or false}, or none')
        session.finish(failed=body.get("failed", False))
        return web.json_response({})

    async def _tasks(self, request: web.Request) -> web.Response:
        program = request.headers.get("x-program", "")
        self.authorise(request, f"program:{program}")
        try:
            wait_s = min(max(0.0, float(request.query.get("wait_s", "0"))), _MAX_WAIT_S)
        except ValueError:
            raise AgentRequestRefused(
                "wait_s: must be a number of seconds", param="wait_s"
            ) from None
        session = await self.sessions.wait_task(program, wait_s)
        if session is None:
            return web.json_response({"task": None})
        if request.transport is None or request.transport.is_closing():
            # asyncio.wait_for of Python 3.10 and 3.11 can swallow the handler's cancellation
            self.sessions.give_back(session)
            raise ConnectionResetError
        return web.json_response(
            {
                "task": session.task,
                "session": session.id,
                "base_url": self.sessions.base_url(session),
                "api_key": self.sessions.derive_key(f"session:{session.id}"),
            }
        )

    def _session(self, request: web.Request) -> Session:
        """Returns the open session that the path names, for a client with its key.

        Raises RequestRefused if there is none, or if the key is wrong.
        """
        session_id = request.match_info["id"]
        self.authorise(request, f"session:{session_id}")
        session = self.sessions.find(session_id)
        if session is None:
            raise AgentRequestRefused(
                "this session has ended, or never was", status=404, code="session_ended"
            )
        return session

    def authorise(self, request: web.Request, subject: str | None = None) -> None:
        """Raises RequestRefused unless the request has the run's key or that of `subject`.

        subject: as Sessions.derive_key takes it; None accepts the run's key only.
        """
        sent = [
            value.encode("utf-8", "surrogateescape")
            for value in request.headers.getall("Authorization", [])
        ]
        # Anthropic's clients send the key alone; some programs send both, one of them a stand-in
        sent_alone = [
            b"Bearer " + value.encode("utf-8", "surrogateescape")
            for value in request.headers.getall("x-api-key", [])
        ]
        keys = [self.sessions.key]
        if subject is not None:
            keys.append(self.sessions.derive_key(subject))
        # every key is compared, so that the time to answer depends on none of them
        matches = [authorised(header, key) for key in keys for header in (sent, sent_alone)]
        if not any(matches):
            raise AgentRequestRefused(
                "this key may not do that; send the one that you were given",
                status=401,
                code="invalid_api_key",
            )

    @asynccontextmanager
    async def serving(self, host: str, port: int, run_dir: Path | None) -> AsyncIterator[None]:
        """Serves in the running event loop; port 0 chooses a free port.

        RUN/gateway.json contains the address meanwhile. Raises ConfigError if the port or the file
        cannot be used.
        """
        runner = web.AppRunner(
            self.app(),
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=0.1,
            keepalive_timeout=_IDLE_S,
        )
        await runner.setup()
        file = None if run_dir is None else run_dir / GATEWAY_FILE
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
                self._close_idle_connections(runner), name="idle connections of the gateway"
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
        if len(_open_connections(runner)) >= MAX_CONNECTIONS:
            return _RejectedConnection()
        return runner.server()

    async def _close_idle_connections(self, runner: web.AppRunner) -> None:
        """Closes connections that have had no request for _IDLE_S.

        aiohttp itself waits for ever for the rest of a request's head, and for a client that does
        not read its answer.
        """
        while True:
            await asyncio.sleep(_IDLE_S / 4)
            now_s = time.monotonic()
            connections = _open_connections(runner)
            self._last_busy = {
                connection: self._last_busy.get(connection, now_s) for connection in connections
            }
            for connection in connections:
                is_idle = now_s - self._last_busy[connection] >= _IDLE_S
                if is_idle and connection not in self._busy:
                    connection.transport.abort()


def _write_address(file: Path, url: str) -> None:
    try:
        file.write_text(json.dumps({"url": url}) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"run.dir: {file} cannot be written ({error.strerror or error}), from which agents "
            "read the gateway's address; move what is there away, or choose another run.dir"
        ) from None


def _open_connections(runner: web.AppRunner) -> list[Any]:
    """Returns the connections that still exist.

    aiohttp also keeps lost ones, such as one whose client did not read its answer.
    """
    assert runner.server is not None
    return [
        connection for connection in runner.server.connections if connection.transport is not None
    ]


class _RejectedConnection(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


async def read_json(request: web.Request, check_size: Callable[[int], None] | None = None) -> Any:
    """Returns the request's body, parsed as JSON.

    check_size: is called with the body's size in bytes, and raises RequestRefused if it is too
    large to be parsed.
    Raises RequestRefused if the body is not JSON, or contains invalid Unicode.
    """
    if check_size is not None and (request.content_length or 0) <= LARGEST_REQUEST_BYTES:
        check_size(request.content_length or 0)
    data = await asyncio.wait_for(request.read(), _READ_S)
    if check_size is not None:  # a body in chunks has no content_length
        check_size(len(data))
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise AgentRequestRefused("the body is not JSON") from None
    if _SURROGATE.search(data) and not is_text(body):
        raise AgentRequestRefused(
            "the body has half of a surrogate pair (\\uD800 to \\uDFFF), which is no text"
        )
    return body


def _check_reward_size(num_bytes: int) -> None:
    if num_bytes > _MAX_REWARD_BYTES:
        raise AgentRequestRefused(
            f"the body has {num_bytes} bytes, more than {_MAX_REWARD_BYTES}", status=413
        )


def completion_id(kind: str, session: Session, turn: AnsweredTurn) -> str:
    """Returns the id by which a client names an answered turn, such as for its reward."""
    return f"{kind}-{session.id}-{turn.node.number}"


async def send_answer(
    request: web.Request, answer: dict[str, Any], stream: Iterable[bytes] | None
) -> web.StreamResponse:
    """Sends an answer whole, or as the events of a stream.

    The stream ends when the client hangs up or stops reading.
    """
    if stream is None:
        return web.json_response(answer)
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    try:
        await response.prepare(request)
        for event in stream:
            await asyncio.wait_for(response.write(event), _READ_S)
        await response.write_eof()
    except (ConnectionError, asyncio.TimeoutError):
        if request.transport is not None:
            request.transport.abort()
    return response

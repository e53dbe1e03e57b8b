"""The coordinator's HTTP API, off unless placement.api_port is set; docs/services.md describes every path.

    GET  /health          open to all              POST   /v1/prompts    prompts in
    GET  /v1/state        what the run does        POST   /v1/groups     groups out, each once per task
    POST /v1/pause        {"for_s"}                POST   /v1/tasks      the run's prompts, for other engines
    POST /v1/resume                                PUT    /v1/tasks/ID   their samples
                                                   DELETE /v1/tasks/ID   gives them back

Paths but /health want the run's key: `Authorization: Bearer KEY`. What goes wrong is {"error": one line}. It listens where the
run's store does (placement.host, loopback by default), and RUN/api.json names it for as long as it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from pa_npu.coordinator.service.messages import PauseFor, PutPrompts, PutSamples, TakeGroups, TakeWork
from pa_npu.coordinator.service.rollouts import RolloutService
from pa_npu.engines.http_server import OPEN_PATH, authorised
from pa_npu.errors import ConfigError, PaNpuError

T = TypeVar("T")

API_FILE = "api.json"
LARGEST_REQUEST_BYTES = 2**25
_REFUSAL = "send the run's key, which RUN/api_key holds: Authorization: Bearer KEY"
# Of a body that drips, waits of the request itself not included.
_READ_S = 30.0


class Api:
    def __init__(self, service: RolloutService, key: str) -> None:
        self._service = service
        self._key = key

    def app(self) -> web.Application:
        app = web.Application(client_max_size=LARGEST_REQUEST_BYTES, middlewares=[self._guard, self._explain])
        app.router.add_get(OPEN_PATH, self._health)
        app.router.add_get("/v1/state", self._state)
        app.router.add_post("/v1/pause", self._pause)
        app.router.add_post("/v1/resume", self._resume)
        app.router.add_post("/v1/prompts", self._put_prompts)
        app.router.add_post("/v1/groups", self._take_groups)
        app.router.add_post("/v1/tasks", self._take_work)
        app.router.add_put(r"/v1/tasks/{number:\d{1,18}}", self._put_samples)
        app.router.add_delete(r"/v1/tasks/{number:\d{1,18}}", self._give_back)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        sent = [value.encode("utf-8", "surrogateescape") for value in request.headers.getall("Authorization", [])]
        if request.path == OPEN_PATH or authorised(sent, self._key):
            return await handler(request)
        return _failed(401, _REFUSAL)

    @web.middleware
    async def _explain(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """4xx is the request's fault, 5xx the coordinator's."""
        try:
            return await handler(request)
        except (PaNpuError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            return _failed(400, str(error))
        except web.HTTPRequestEntityTooLarge:
            return _failed(413, f"the body is longer than {LARGEST_REQUEST_BYTES} bytes; send less at once")
        except web.HTTPException as error:
            return _failed(error.status, f"{request.method} {request.path}: {error.reason}; see docs/services.md")
        except asyncio.TimeoutError:
            return _failed(408, f"the body did not arrive within {_READ_S:g} s")

    async def _health(self, request: web.Request) -> web.Response:
        return _answer({})

    async def _state(self, request: web.Request) -> web.Response:
        return _answer(self._service.state())

    async def _pause(self, request: web.Request) -> web.Response:
        self._service.pause.pause((await _read(request, PauseFor)).for_s)
        return _answer(self._service.state())

    async def _resume(self, request: web.Request) -> web.Response:
        self._service.pause.resume()
        return _answer(self._service.state())

    async def _put_prompts(self, request: web.Request) -> web.Response:
        return _answer({"ids": self._service.put_prompts(await _read(request, PutPrompts))})

    async def _take_groups(self, request: web.Request) -> web.Response:
        groups = await self._service.take_groups(await _read(request, TakeGroups))
        body = await asyncio.to_thread(msgspec.json.encode, {"groups": groups})
        return web.Response(body=body, content_type="application/json")

    async def _take_work(self, request: web.Request) -> web.Response:
        asked = await _read(request, TakeWork)
        return _answer(await self._service.take_work(asked.most, asked.wait_s))

    async def _put_samples(self, request: web.Request) -> web.Response:
        self._service.put_samples(int(request.match_info["number"]), (await _read(request, PutSamples)).samples)
        return _answer({})

    async def _give_back(self, request: web.Request) -> web.Response:
        self._service.give_back(int(request.match_info["number"]))
        return _answer({})


async def _read(request: web.Request, kind: type[T]) -> T:
    return msgspec.json.decode(await asyncio.wait_for(request.read(), _READ_S), type=kind)


def _answer(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _failed(status: int, line: str) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode({"error": line}), content_type="application/json")


@asynccontextmanager
async def serving(service: RolloutService, key: str, host: str, port: int, run_dir: Path) -> AsyncIterator[str]:
    """Serves in the running event loop and yields the URL; port 0 takes a free one. Raises ConfigError."""
    if not key:
        raise ConfigError(
            "placement.api_port: the API wants a key, but attached engines have none; give them one, or remove the key"
        )
    runner = web.AppRunner(Api(service, key).app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    file = run_dir / API_FILE
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise ConfigError(
                f"placement.api_port: cannot listen at {host}:{port} ({error.strerror or error}); choose another"
            ) from None
        url = f"http://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}"
        file.write_text(json.dumps({"url": url}) + "\n", encoding="utf-8")
        yield url
    finally:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
        await runner.cleanup()

"""The gateway lets nobody in without a key, and no connection costs another client anything."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from pa_npu.agents import gateway
from pa_npu.agents.environment import AgentEnvironment
from pa_npu.agents.open_sessions import Sessions
from pa_npu.config.schema import Config
from pa_npu.coordinator.assembly import make_gateway, make_sessions
from pa_npu.engines.protocol import Generation
from pa_npu.environments.registry import make_environment, opened
from pa_npu.errors import ConfigError
from pa_npu.launcher.engine_key import run_key_file
from tests.helpers.agents import (
    TOKENIZER,
    TOOLS,
    VERSION,
    Policy,
    Turn,
    asks_then_answers,
    client_of,
    config,
    user,
)
from tools.make_tiny_model import END_OF_TURN


async def test_sessions_cannot_use_each_other_and_strangers_can_use_none(
    agents: AgentEnvironment,
) -> None:
    assert agents.sessions is not None
    mine, another = [await client_of(agents, Policy(asks_then_answers)) for _ in range(2)]
    for path in ("/v1/chat/completions", "/v1/completions", "/reward", "/end"):
        for key in (another.key, "", "nonsense", agents.sessions.derive_key("program:0")):
            assert (await mine.send(path, {}, key or "-"))[0] == 401
    assert (await mine.send("/reward", {"reward": 1.0}))[0] == 200
    assert (await mine.send("/reward", {"reward": 2.0}, agents.sessions.key))[0] == 200, (
        "the run's key may"
    )
    # a program may send a key of its own beside the session's, in either header
    other = {"Authorization": "Bearer EMPTY", "x-api-key": mine.key}
    for headers in (other, {"Authorization": f"Bearer {mine.key}", "x-api-key": "EMPTY"}):
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{mine.root}/v1/models", headers=headers) as reply,
        ):
            assert reply.status == 200
    for reward in (float("nan"), "1", True, None, 1e39, 1e308, -1e16, 10**400, [1.0], {}):
        assert (await mine.send("/reward", {"reward": reward}))[0] == 400
    await agents.sessions.remove(mine.session)
    assert (await mine.send("/end", {}))[0] == 404
    with pytest.raises(openai.AuthenticationError):
        await openai.AsyncOpenAI(
            base_url=another.root + "/v1", api_key="x", max_retries=0
        ).models.list()


async def test_a_program_whose_name_is_no_text_is_a_stranger(agents: AgentEnvironment) -> None:
    assert agents.sessions is not None
    host, port = agents.sessions.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /tasks HTTP/1.1\r\nHost: x\r\nx-program: \xff\xfe\r\n\r\n")
    assert b" 401 " in await asyncio.wait_for(reader.readline(), 10.0)
    writer.close()


async def test_a_task_that_cannot_reach_whoever_asked_for_it_is_the_next_ones(
    agents: AgentEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = agents.sessions
    assert sessions is not None
    wait_task = sessions.wait_task
    asked, given = asyncio.Event(), asyncio.Event()

    async def wait_in_spite_of_cancellation(program: str, wait_s: float) -> Any:
        """Does what a wait does that ends in the moment in which it is cancelled."""
        asked.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(wait_s)
        given.set()
        return await wait_task(program, wait_s)

    client = await client_of(agents, Policy(asks_then_answers))
    offered = asyncio.create_task(sessions.offer(client.session, 30.0))
    monkeypatch.setattr(sessions, "wait_task", wait_in_spite_of_cancellation)
    host, port = sessions.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    key = f"Authorization: Bearer {sessions.key}"
    writer.write(f"GET /tasks?wait_s=30 HTTP/1.1\r\nHost: x\r\n{key}\r\n\r\n".encode())
    await asyncio.wait_for(asked.wait(), 10.0)
    writer.transport.abort()
    await asyncio.wait_for(given.wait(), 10.0)
    assert await wait_task("", 10.0) is client.session
    await asyncio.wait_for(offered, 10.0)


async def test_a_stream_that_is_hung_up_logs_no_traceback(
    agents: AgentEnvironment, caplog: pytest.LogCaptureFixture
) -> None:
    gc.collect()  # clients of earlier tests say something when they are collected
    await asyncio.sleep(0)
    caplog.clear()
    client = await client_of(agents, Policy(lambda shown: "w" * 150 + END_OF_TURN))
    host, port = client.sessions.url.removeprefix("http://").split(":")
    body = json.dumps({"messages": [user("q")], "stream": True, "logprobs": True}).encode()
    head = (
        f"POST /sessions/{client.session.id}/v1/chat/completions HTTP/1.1\r\nHost: "
        f"x\r\nContent-Length: {len(body)}\r\n"
    )
    for _ in range(3):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{head}Authorization: Bearer {client.key}\r\n\r\n".encode() + body)
        await reader.readline()
        writer.transport.abort()
    fine = await client.chat([user("q")])
    assert fine.choices and "Traceback" not in caplog.text and not caplog.records


def test_a_gateways_file_that_is_a_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / gateway.GATEWAY_FILE).mkdir()

    async def serve() -> None:
        async with gateway.Gateway(Sessions("key")).serving("127.0.0.1", 0, tmp_path):
            pass

    with pytest.raises(ConfigError, match=r"run\.dir: .*gateway\.json cannot be written"):
        asyncio.run(serve())
    assert (tmp_path / gateway.GATEWAY_FILE).is_dir(), "it is not ours to remove"


def test_the_gateways_key_is_in_a_file_also_where_engines_are_attached(tmp_path: Path) -> None:
    def of(**rollout: Any) -> Config:
        return config().model_copy(
            update={
                "run": config().run.model_copy(update={"dir": str(tmp_path)}),
                "rollout": config().rollout.model_copy(update=rollout),
            }
        )

    for chosen, key in (
        (of(attach=("http://x",)), ""),
        (of(attach=("http://x",)), "engines"),
        (of(), "own"),
    ):
        with run_key_file(chosen, tmp_path, key):
            written = (tmp_path / "api_key").read_text().strip()
            sessions = make_sessions(chosen.run.dir, key or None)
            environment = make_environment(chosen, TOKENIZER, sessions)
            assert isinstance(environment, AgentEnvironment)
            assert environment.sessions is sessions, "agents and gateway share them"
            gateway_of_run = make_gateway(environment, sessions, None)
            assert gateway_of_run is not None and gateway_of_run.sessions.key == written
            assert written == key or (not key and len(written) == 64)
        assert not (tmp_path / "api_key").exists()
    alone = of(attach=("http://x",)).model_copy(
        update={"environment": Config.model_fields["environment"].default}
    )
    with run_key_file(alone, tmp_path, "engines"):
        assert not (tmp_path / "api_key").exists(), "nobody needs another's key"


async def test_half_requests_slow_bodies_and_too_many_connections_are_bounded_and_clients_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway, "MAX_CONNECTIONS", 50)
    monkeypatch.setattr(gateway, "_IDLE_S", 0.4)
    monkeypatch.setattr(gateway, "_READ_S", 0.3)
    monkeypatch.setattr(gateway, "LARGEST_REQUEST_BYTES", 2**16)
    async with opened(make_environment(config(), TOKENIZER), 30.0) as agents:
        assert isinstance(agents, AgentEnvironment) and agents.sessions is not None
        client = await client_of(agents, Policy(asks_then_answers))
        host, port = agents.sessions.url.removeprefix("http://").split(":")
        path = f"/sessions/{client.session.id}/v1/chat/completions"
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
            f"{client.key}\r\nContent-Length: 100\r\n\r\n"
        )

        async def half(text: str) -> bytes:
            """Returns the server's words before it closes the connection by itself."""
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(text.encode())
                return await asyncio.wait_for(reader.read(), 30.0)
            except ConnectionError:
                return b""
            finally:
                writer.close()

        assert set(
            await asyncio.gather(*(half("POST /sessions/x HTTP/1.1\r\nHo") for _ in range(1000)))
        ) == {b""}
        assert b" 408 " in await half(head + "{")
        assert b" 401 " in await half(head.replace(client.key, "stranger") + "{" * 100)
        assert (await client.send("/v1/chat/completions", {"messages": "x" * 2**17}))[0] == 413
        answer = await client.chat([user("What is 6*7?")], tools=TOOLS)
        assert answer.choices[0].finish_reason == "tool_calls"


async def within(limit_s: float, holds: Callable[[], object], description: str) -> None:
    end_s = asyncio.get_running_loop().time() + limit_s
    while not holds():
        assert asyncio.get_running_loop().time() < end_s, (
            f"{description} did not come within {limit_s:g} s"
        )
        await asyncio.sleep(0.01)


class Endless(Policy):
    """Writes so much that no socket's buffers hold its log-probs."""

    async def write(self, turn: Turn) -> list[Generation]:
        tokens = np.full(turn.max_tokens or 1, 100, np.int32)
        return [
            Generation(
                tokens, np.full(len(tokens), -0.123456, np.float32), "", "length", version=VERSION
            )
        ]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_does_not_read_its_answer_is_cut_off_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    made: list[gateway.Gateway] = []

    class Kept(gateway.Gateway):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr("pa_npu.agents.environment.Gateway", Kept)
    monkeypatch.setattr(gateway, "_IDLE_S", 0.4)
    monkeypatch.setattr(gateway, "_READ_S", 0.3)
    plain = config()
    rollout_of = plain.rollout.model_copy(update={"max_response_tokens": 30_000})
    async with opened(
        make_environment(plain.model_copy(update={"rollout": rollout_of}), TOKENIZER), 30.0
    ) as agents:
        assert isinstance(agents, AgentEnvironment) and agents.sessions is not None
        slow = await client_of(agents, Endless(asks_then_answers))
        another = await client_of(agents, Policy(lambda shown: f"w{END_OF_TURN}"))
        host, port = agents.sessions.url.removeprefix("http://").split(":")
        body = json.dumps({"messages": [user("q")], "stream": stream, "logprobs": True})
        head = f"POST /sessions/{slow.session.id}/v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
        head += f"Authorization: Bearer {slow.key}\r\nContent-Length: {len(body)}\r\n\r\n"
        loop, answer = asyncio.get_running_loop(), b""
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            await loop.sock_connect(connection, (host, int(port)))
            await loop.sock_sendall(connection, (head + body).encode())
            await within(60.0, lambda: len(slow.session.tree.nodes) == 2, "the answer")
            assert (await another.chat([user("q")])).choices[0].message.content == "w"
            # the client has read nothing until its connection is given up
            await within(
                60.0,
                lambda: not (made[0]._busy or made[0]._last_busy),
                "the end of all connections",
            )
            with contextlib.suppress(ConnectionError):
                while part := await asyncio.wait_for(loop.sock_recv(connection, 2**20), 30.0):
                    answer += part
        begin, _, rest = answer.partition(b"\r\n\r\n")
        size = re.search(rb"Content-Length: ([0-9]+)", begin)
        assert b" 200 " in begin
        assert b"[DONE]" not in rest if stream else size is not None and len(rest) < int(size[1])
        assert (await another.chat([user("again")])).choices[0].message.content == "w"

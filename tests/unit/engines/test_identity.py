"""I1 from the engine's own mouth: which start of it answered, by which weight version, and what a client does about it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import pytest

from pa_npu.engines.client import EngineClient
from pa_npu.engines.group_session import GroupSession
from pa_npu.engines.http_server import CHANGED_VERSION, INSTANCE_HEADER, NO_VERSION, VERSION_HEADER
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import EngineError, EngineGone, RolloutEngine, Sampling
from pa_npu.engines.vllm import guard
from pa_npu.engines.vllm.guard import EngineGuard
from pa_npu.errors import InvariantViolation
from tools.stand_in import Speed, StandInEngine, serving

PROMPT = np.array([5, 6, 7], np.int32)
SAMPLING = Sampling(max_tokens=12, temperature=1.0)
KEY = "0123456789abcdef"


async def generate(client: EngineClient) -> Any:
    return (await client.generate(PROMPT, 1, 0, SAMPLING, deadline_s=5))[0]


@asynccontextmanager
async def loaded(version: int = 7) -> AsyncIterator[tuple[StandInEngine, EngineClient]]:
    engine = StandInEngine(Speed())
    async with serving(engine) as url, EngineClient(url, 1000) as client:
        await client.load_weights(version, deadline_s=5)
        yield engine, client


async def test_a_response_carries_the_version_that_generated_it():
    async with loaded(7) as (_, client):
        assert (await generate(client)).version == 7
        assert await client.check_health(deadline_s=5) == 7


async def test_an_engine_that_was_started_again_after_the_publish_is_gone_at_its_first_response():
    """The same address, the same model: only the engine itself can tell that its weights are those
    of the model directory.
    """
    async with contextlib.AsyncExitStack() as stack:
        async with serving(StandInEngine(Speed())) as url:
            client = await stack.enter_async_context(EngineClient(url, 1000))
            await client.load_weights(7, deadline_s=5)
            await generate(client)
        async with serving(StandInEngine(Speed()), port=int(url.rpartition(":")[2])):
            with pytest.raises(
                EngineGone,
                match=r"it was started again \(it says that it is .*does not hold the weights",
            ):
                await generate(client)


async def test_the_pool_reports_a_restarted_engine_as_lost_and_another_one_answers():
    lost: list[tuple[str, str]] = []

    async with loaded(7) as (_, good), loaded(7) as (restarted, bad):
        pool = EnginePool([bad, good])

        async def on_lost(engine: RolloutEngine, reason: str) -> None:
            lost.append((engine.name, reason))
            pool.suspend(engine)

        pool.subscribe(on_lost=on_lost)
        lease = await pool.admit(1, 1, lambda _: 8, 5.0)
        assert lease.engine is bad
        restarted.identity = type(restarted.identity)()
        with GroupSession(pool, lease, lambda _: 8, deadline_s=5, again_deadline_s=5) as session:
            responses = await session.generate(PROMPT, 1, 0, SAMPLING)
        assert [name for name, _ in lost] == [bad.name] and "started again" in lost[0][1]
        assert session.lease.engine is good and responses[0].version == 7


@pytest.mark.parametrize("held", [6, 8, None])
async def test_another_version_than_this_run_published_breaks_the_invariant(held):
    async with loaded(7) as (engine, client):
        engine.identity.version = held
        with pytest.raises(
            InvariantViolation,
            match=rf"I1 version: .*by weight version {held or NO_VERSION}, but .*gave it 7",
        ):
            await generate(client)


async def test_weights_that_change_while_a_response_is_made_break_the_invariant():
    engine = StandInEngine(Speed(step_s=0.05))
    async with serving(engine) as url, EngineClient(url, 1000) as client:
        await client.load_weights(7, deadline_s=5)
        request = asyncio.create_task(generate(client))
        while not engine.num_in_flight:
            await asyncio.sleep(0.001)
        engine.identity.version = 8
        with pytest.raises(InvariantViolation, match=f"by weight version {CHANGED_VERSION}"):
            await request


async def test_after_a_load_that_failed_nothing_it_generates_is_taken():
    async with loaded(7) as (engine, client):
        engine.receive_s = 60.0
        with pytest.raises(Exception, match=r"not answered within 0.2 s"):
            await client.load_weights(8, deadline_s=0.2)
        engine.identity.version = 8  # whatever it says
        with pytest.raises(InvariantViolation, match="gave it none completely"):
            await generate(client)


async def test_a_server_that_does_not_say_what_it_holds_is_refused_at_the_publish():
    engine = StandInEngine(Speed())
    engine.identity.headers = lambda version_before: {}  # type: ignore[method-assign, assignment]
    async with serving(engine) as url, EngineClient(url, 1000) as client:
        with pytest.raises(
            EngineError, match=r"hold weight versions .7., but its server says nothing"
        ):
            await client.load_weights(7, deadline_s=5)


class Server:
    """A guarded application in memory. answers: status and body by path and method of the workers;
    asked: for which, in order.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, answers: Mapping[str, tuple[int, Any]]
    ) -> None:
        monkeypatch.setenv("VLLM_API_KEY", KEY)
        self._answers = answers
        self.asked: list[str] = []
        self._guard = EngineGuard(self._application)

    async def _application(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        method = json.loads(body)["method"] if body else scope["path"]
        self.asked.append(method)
        status, answer = self._answers.get(method, (200, {"success": True}))
        await send({"type": "http.response.start", "status": status, "headers": [(b"x-own", b"1")]})
        data = json.dumps(answer).encode()
        for part in (data[:5], data[5:]):
            await send(
                {
                    "type": "http.response.body",
                    "body": part,
                    "more_body": part is not data[5:] and part == data[:5],
                }
            )

    async def __call__(
        self, path: str, method: str | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON of an answer."""
        body = json.dumps({"method": method, "args": []}).encode() if method else b""
        parts = [
            {"type": "http.request", "body": body[:3], "more_body": True},
            {"type": "http.request", "body": body[3:]},
        ]
        sent: list[Any] = []

        async def receive() -> Any:
            return parts.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"authorization", b"Bearer " + KEY.encode())]
        await self._guard(
            {"type": "http", "method": "POST", "path": path, "headers": headers}, receive, send
        )
        fields = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return (
            sent[0]["status"],
            fields,
            json.loads(b"".join(message["body"] for message in sent[1:])),
        )


async def test_the_guard_notes_the_version_that_all_workers_loaded(monkeypatch):
    results = [{"version": 3, "bytes": 10}, {"version": 3}]
    server = Server(
        monkeypatch,
        {"/v1/completions": (200, {"choices": []}), "pa_receive": (200, {"results": results})},
    )
    _, before, _ = await server("/v1/completions")
    assert (
        before[VERSION_HEADER] == NO_VERSION and before[INSTANCE_HEADER] and before["x-own"] == "1"
    )
    status, load, answer = await server("/collective_rpc", "pa_receive")
    assert status == 200 and answer == {"results": results} and load[VERSION_HEADER] == "3"
    _, after, answer = await server("/v1/completions")
    assert after == before | {VERSION_HEADER: "3"} and answer == {"choices": []}


@pytest.mark.parametrize(
    "answer",
    [
        (500, {"results": [{"version": 4}]}),
        (200, {"results": [{"version": 4}, {"version": 3}]}),
        (200, {"results": [{"version": None}]}),
        (200, {"results": [{"version": "4"}]}),
        (200, {"results": [{}]}),
        (200, {"results": []}),
        (200, ["results"]),
    ],
)
async def test_the_guard_holds_no_version_after_a_load_that_did_not_succeed_everywhere(
    monkeypatch, answer
):
    answers: dict[str, tuple[int, Any]] = {
        "/x": (200, {}),
        "pa_receive": (200, {"results": [{"version": 3}]}),
    }
    server = Server(monkeypatch, answers)
    await server("/collective_rpc", "pa_receive")
    answers["pa_receive"] = answer
    _, load, _ = await server("/collective_rpc", "pa_receive")
    _, after, _ = await server("/x")
    assert load[VERSION_HEADER] == after[VERSION_HEADER] == NO_VERSION


async def test_a_load_has_forgotten_the_prefixes_of_the_old_weights_before_it_is_answered(
    monkeypatch,
):
    answers: dict[str, tuple[int, Any]] = {"pa_receive": (200, {"results": [{"version": 3}]})}
    server = Server(monkeypatch, answers)
    status, load, _ = await server("/collective_rpc", "pa_receive")
    assert (
        server.asked == ["pa_receive", "/reset_prefix_cache"]
        and status == 200
        and load[VERSION_HEADER] == "3"
    )
    await server("/collective_rpc", "pa_version")
    assert server.asked[2:] == ["pa_version"]

    held = iter([False, False])  # by requests that have just ended
    monkeypatch.setattr(guard, "_success", lambda answer: next(held, True))
    assert (await server("/collective_rpc", "pa_receive"))[0] == 200
    assert server.asked[3:] == ["pa_receive", *["/reset_prefix_cache"] * 3]

    monkeypatch.setattr(guard, "_success", lambda answer: False)
    monkeypatch.setattr(guard, "_RESET_WITHIN_S", 0.02)
    status, _, answer = await server("/collective_rpc", "pa_receive")
    assert status == 500 and "prefix cache is still in use" in answer["error"]["message"]
    assert (await server("/x"))[1][VERSION_HEADER] == NO_VERSION


async def test_other_calls_of_the_workers_change_no_version(monkeypatch):
    answers = {
        "pa_receive": (200, {"results": [{"version": 3}]}),
        "pa_version": (200, {"results": [{"version": 5}]}),
    }
    server = Server(monkeypatch, answers)
    await server("/collective_rpc", "pa_receive")
    assert (await server("/collective_rpc", "pa_version"))[1][VERSION_HEADER] == "3"


async def test_two_starts_of_an_engine_have_different_names(monkeypatch):
    names = {
        (await Server(monkeypatch, {"/x": (200, {})})("/x"))[1][INSTANCE_HEADER] for _ in range(3)
    }
    assert len(names) == 3


async def test_a_health_page_says_it_without_the_key_and_a_refusal_does_not():
    async with (
        serving(StandInEngine(Speed(), api_key=KEY)) as url,
        aiohttp.ClientSession() as session,
    ):
        async with session.get(url + "/health") as response:
            assert response.headers[VERSION_HEADER] == NO_VERSION
        async with session.post(url + "/v1/completions", json={}) as response:
            assert response.status == 401 and VERSION_HEADER not in response.headers

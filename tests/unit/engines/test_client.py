"""The HTTP client against a stand-in engine, and the stand-in against what it promises."""

from __future__ import annotations

import asyncio
import socket
import time

import numpy as np
import pytest
from aiohttp import web

from pa_npu.engines import client as client_module
from pa_npu.engines.client import EngineClient
from pa_npu.engines.http_server import VERSION_HEADER
from pa_npu.engines.protocol import EngineError, EngineGone, Sampling, WeightGroups
from pa_npu.errors import DeadlineExceeded
from tools.stand_in import Speed, StandInEngine, serving

PROMPT = np.array([5, 6, 7], np.int32)
SAMPLING = Sampling(max_tokens=12, temperature=1.0, stop_token_ids=(2,))


async def test_one_request_for_a_group_equals_single_requests_with_the_following_seeds():
    async with serving(StandInEngine(Speed())) as url, EngineClient(url, 1000) as client:
        group = await client.generate(PROMPT, 4, 40, SAMPLING, deadline_s=5)
        singles = [
            (await client.generate(PROMPT, 1, 40 + i, SAMPLING, deadline_s=5))[0] for i in range(4)
        ]
    assert [c.tokens.tolist() for c in group] == [c.tokens.tolist() for c in singles]
    assert [c.logprobs.tolist() for c in group] == [c.logprobs.tolist() for c in singles]
    assert len({tuple(c.tokens.tolist()) for c in group}) == 4
    for completion in group:
        assert completion.finished == (completion.tokens[-1] == 2)


async def test_exactly_max_tokens_where_the_end_is_ignored():
    sampling = Sampling(max_tokens=9, temperature=1.0, ignore_eos=True, logprobs=False)
    async with serving(StandInEngine(Speed())) as url, EngineClient(url, 1000) as client:
        group = await client.generate(PROMPT, 3, 1, sampling, deadline_s=5)
    assert [(len(c.tokens), c.finish_reason, len(c.logprobs)) for c in group] == [
        (9, "length", 0)
    ] * 3


async def test_smaller_vocabulary_than_the_engine_has_is_noticed():
    async with (
        serving(StandInEngine(Speed(), vocab_size=1000)) as url,
        EngineClient(url, 10) as client,
    ):
        with pytest.raises(
            EngineError, match="outside of the vocabulary of 10; does it serve another model"
        ):
            await client.generate(PROMPT, 8, 0, SAMPLING, deadline_s=5)


async def test_it_sleeps_without_its_weights_and_is_woken_by_vllms_own_paths():
    asked: list[str] = []

    async def note(request: web.Request) -> web.Response:
        asked.append(request.path_qs)
        return web.json_response({})

    async with server({"/sleep": note, "/wake_up": note}) as url, EngineClient(url, 10) as client:
        await client.sleep(deadline_s=5)
        await client.wake(deadline_s=5)
    assert asked == ["/sleep?level=2", "/wake_up"]


async def test_worker_calls_reach_the_engine_and_never_carry_a_timeout():
    bodies = []

    async def collective_rpc(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response(
            {"results": [{"version": 3}, {"version": 3}]}, headers={VERSION_HEADER: "3"}
        )

    groups = WeightGroups(
        ("10.0.0.1", 29400), 3, 5, [{"name": "stage", "manifest": "{}"}], "hccl", 60.0
    )
    async with server({"/collective_rpc": collective_rpc}) as url, EngineClient(url, 10) as client:
        await client.join_weight_groups(groups, deadline_s=5)
        assert (await client.load_weights(3, deadline_s=5)).versions == (3, 3)
        assert (await client.loaded_weights(deadline_s=5)).versions == (3, 3)
    place = {"store": ["10.0.0.1", 29400], "first_rank": 3, "world_size": 5}
    joined = {
        **place,
        "stages": [{"name": "stage", "manifest": "{}"}],
        "backend": "hccl",
        "timeout_s": 60.0,
    }
    assert bodies == [
        {"method": "pa_connect", "args": [joined]},
        {"method": "pa_receive", "args": [3]},
        {"method": "pa_version", "args": []},
    ], "vLLM shifts every later reply when its own timeout fires"


@pytest.mark.parametrize("version", ["3", 3.0, True, [3]])
async def test_workers_that_say_no_version_are_an_error_of_the_engine(version):
    async def collective_rpc(request: web.Request) -> web.Response:
        return web.json_response({"results": [{"version": version}]})

    async with server({"/collective_rpc": collective_rpc}) as url, EngineClient(url, 10) as client:
        with pytest.raises(EngineError, match="its workers say that they hold weight versions"):
            await client.loaded_weights(deadline_s=5)


async def test_api_key_from_the_environment_is_sent(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    seen = []

    async def health(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.Response()

    async with server({"/health": health}) as url, EngineClient(url, 10) as client:
        await client.check_health(deadline_s=5)
    assert seen == ["Bearer secret"]


async def test_a_hanging_engine_ends_in_deadline_exceeded_within_the_deadline():
    # 1000 s per step
    async with (
        serving(StandInEngine(Speed(step_s=1000.0))) as url,
        EngineClient(url, 1000) as client,
    ):
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"/v1/completions not answered within 0.2 s"):
            await client.generate(PROMPT, 1, 0, SAMPLING, deadline_s=0.2)
        assert time.monotonic() - start < 60


async def test_refusal_names_engine_request_status_and_reason():
    async def complete(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "prompt too long"}}, status=400)

    async with server({"/v1/completions": complete}) as url, EngineClient(url, 10) as client:
        with pytest.raises(
            EngineError, match=rf"engine {url}: /v1/completions answered 400: .*prompt too long"
        ):
            await client.generate(PROMPT, 1, 0, SAMPLING, deadline_s=5)


async def test_an_endless_or_dripping_answer_costs_bounded_memory_and_time(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("pa_npu.engines.client.ANSWER_BYTES", 2**20)
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 2**16)
            sent += 2**16

    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.02)

    async with server({"/v1/completions": endless}) as url, EngineClient(url, 10) as client:
        with pytest.raises(
            EngineError, match=r"/v1/completions: its answer is longer than \d+ bytes"
        ):
            await client.generate(PROMPT, 1, 0, SAMPLING, deadline_s=30)
    assert sent < 2**26
    async with server({"/v1/completions": drip}) as url, EngineClient(url, 10) as client:
        with pytest.raises(DeadlineExceeded, match=r"/v1/completions not answered within 0.5 s"):
            await client.generate(PROMPT, 1, 0, SAMPLING, deadline_s=0.5)


async def test_engine_that_dies_while_generating_is_an_engine_error():
    async def die(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with server({"/v1/completions": die}) as url, EngineClient(url, 10) as client:
        with pytest.raises(EngineError, match="it has probably died, see its log"):
            await client.generate(PROMPT, 1, 0, SAMPLING, deadline_s=5)


async def test_waiting_for_an_engine_that_never_comes_ends_at_the_deadline():
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        async with EngineClient(f"http://127.0.0.1:{reserved.getsockname()[1]}", 10) as client:
            with pytest.raises(
                DeadlineExceeded, match=r"not ready after 0.3 s .*see the engine's log"
            ):
                await client.wait_ready(deadline_s=0.3)


async def test_an_engine_that_loses_its_workers_while_it_is_greeted_is_not_waited_for_until_it_must_have_started(
    monkeypatch,
):
    """Its server is healthy, and a call of its workers is never answered."""
    monkeypatch.setattr(client_module, "_CAPABILITIES_WITHIN_S", 0.2)

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32"})

    async def silent(request: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    handlers = {"/health": answer, "/version": answer, "/collective_rpc": silent}
    async with server(handlers) as url, EngineClient(url, 10) as client:
        with pytest.raises(
            DeadlineExceeded, match=r"pa_version on its workers not answered within 0.2 s"
        ):
            await client.wait_ready(deadline_s=20)


async def test_stand_in_has_the_throughput_it_was_set_to():
    """16 sequences of 40 tokens at 1 ms + 0.25 ms per sequence and token: 40 * 5 ms, alone 40 *
    1.25 ms.
    """
    engine = StandInEngine(Speed(step_s=0.001, sequence_s=0.00025, stride=4))
    sampling = Sampling(max_tokens=40, temperature=1.0, ignore_eos=True)
    async with serving(engine) as url, EngineClient(url, 1000) as client:
        start = time.monotonic()
        await client.generate(PROMPT, 1, 0, sampling, deadline_s=5)
        alone = time.monotonic() - start
        start = time.monotonic()
        await asyncio.gather(
            *(client.generate(PROMPT, 4, i, sampling, deadline_s=5) for i in range(4))
        )
        together = time.monotonic() - start
    # a machine under load can only be slower
    assert alone >= 0.05 and together >= 0.19, (alone, together)
    assert engine.num_in_flight == 0


def server(handlers):
    """A server with the given handlers for any method, on a free port."""
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def running():
        app = web.Application()
        for path, handler in handlers.items():
            app.router.add_route("*", path, handler)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    return running()


async def test_closing_the_client_ends_a_request_whose_answer_is_on_its_way():
    begun, ended = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"{")
        begun.set()
        await ended.wait()
        return response

    async with server({"/v1/completions": answer}) as url, EngineClient(url, 10) as client:
        request = asyncio.create_task(client.generate(PROMPT, 1, 0, SAMPLING, deadline_s=60))
        await begun.wait()
        while not client._responses:
            await asyncio.sleep(0.001)
        await client.close()
        with pytest.raises(EngineGone):
            await asyncio.wait_for(request, 10)
        ended.set()


async def test_calls_of_the_workers_share_no_connection_and_generation_does():
    """uvicorn ends a connection after an error of the workers; a request on its way then would look
    like the engine's death.
    """
    connections: dict[str, list[object]] = {}

    async def answer(request: web.Request) -> web.Response:
        connections.setdefault(request.path, []).append(request.transport)
        return web.Response(status=400, text="no")

    async with (
        server({"/collective_rpc": answer, "/v1/completions": answer}) as url,
        EngineClient(url, 10) as client,
    ):
        for _ in range(2):
            with pytest.raises(EngineError, match="answered 400: no"):
                await client.loaded_weights(deadline_s=5)
        for _ in range(2):
            with pytest.raises(EngineError, match="answered 400: no"):
                await client.generate(PROMPT, 1, 0, SAMPLING, deadline_s=5)
    workers, generation = connections["/collective_rpc"], connections["/v1/completions"]
    assert workers[0] is not workers[1] and generation[0] is generation[1]

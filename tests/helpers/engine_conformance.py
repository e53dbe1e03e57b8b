"""Conformance of engines: a suite that each kind of engine passes, with its own client.

A test module makes a fixture `subject` and inherits from Conformance (an engine without a model: a
stand-in) or from ModelConformance. The suite leaves an engine with the weights of the model
directory it was started with.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from pa_npu.engines.group_session import GroupSession
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import (
    EngineCapabilities,
    EngineError,
    EngineGone,
    Generation,
    Sampling,
)
from pa_npu.errors import DeadlineExceeded, InvariantViolation, PaNpuError
from tests.helpers.engine_subjects import (
    DEADLINE_S,
    EOS,
    MAX_RESPONSE,
    SAMPLING,
    VOCAB,
    Subject,
    ask,
    bits,
    prompt,
)


class Conformance:
    """Needs no model."""

    @pytest.fixture
    async def client(self, subject: Subject) -> Any:
        async with subject.client() as client:
            yield client

    async def publish(self, subject: Subject, client: Any, version: int) -> None:
        await client.load_weights(version, deadline_s=DEADLINE_S)

    async def test_it_says_what_it_is(self, subject, client):
        capabilities: EngineCapabilities = await client.wait_ready(deadline_s=DEADLINE_S)
        assert capabilities.kind == subject.name and capabilities.version
        assert capabilities.num_workers == 1
        served = await asyncio.to_thread(subject.kind.served_model, subject.url, subject.key)
        assert served == str(subject.model)

    async def test_a_request_for_a_group_equals_single_requests_with_the_following_seeds(
        self, client
    ):
        group = await ask(client, 4, 40)
        singles = [(await ask(client, 1, 40 + i))[0] for i in range(4)]
        assert bits(group) == bits(singles)
        assert len({tuple(generation.tokens.tolist()) for generation in group}) == 4

    async def test_a_response_depends_on_its_seed_and_not_on_what_else_is_in_flight(self, client):
        alone = {
            number: bits(await ask(client, 3, 7 * number, number=number)) for number in range(4)
        }
        for order in ([3, 1, 2, 0], [0, 2, 3, 1]):
            together = await asyncio.gather(
                *(ask(client, 3, 7 * number, number=number) for number in order)
            )
            assert [bits(actual) for actual in together] == [alone[number] for number in order]
        assert len({str(value) for value in alone.values()}) == 4

    async def test_limits_end_tokens_and_logprobs_are_as_asked_for(self, client):
        exact = await ask(client, 4, 5, Sampling(16, 1.0, (EOS,), ignore_eos=True))
        assert {(len(g.tokens), g.finish_reason, len(g.logprobs)) for g in exact} == {
            (16, "length", 16)
        }
        assert (await ask(client, 1, 5, Sampling(1, 1.0, ignore_eos=True)))[
            0
        ].tokens.tolist() == exact[0].tokens.tolist()[:1]
        without = await ask(client, 4, 40, Sampling(24, 1.0, (EOS,), logprobs=False))
        with_logprobs = await ask(client, 4, 40)
        assert [g.tokens.tolist() for g in without] == [g.tokens.tolist() for g in with_logprobs]
        for generation in with_logprobs:
            assert generation.tokens.dtype == np.int32 and generation.logprobs.dtype == np.float32
            assert len(generation.logprobs) == len(generation.tokens) <= 24
            assert generation.finished or len(generation.tokens) == 24
        assert {len(g.logprobs) for g in without} == {0}

    async def test_health_is_open_and_everything_else_wants_the_key(self, subject):
        async with subject.client("another") as client:
            await client.check_health(deadline_s=DEADLINE_S)
            for call in (
                lambda: ask(client, 1),
                lambda: client.loaded_weights(deadline_s=DEADLINE_S),
                lambda: client.load_weights(1, deadline_s=DEADLINE_S),
                lambda: client.probe(deadline_s=DEADLINE_S),
            ):
                with pytest.raises(EngineError, match=r"answered 401: .*API key"):
                    await call()
            with pytest.raises(EngineError, match="answered 401"):
                await client.wait_ready(deadline_s=DEADLINE_S)
        with pytest.raises(OSError, match="401"):
            await asyncio.to_thread(subject.kind.served_model, subject.url, "another")

    async def test_a_deadline_is_kept_and_the_engine_works_on(self, client):
        long = Sampling(MAX_RESPONSE, 1.0, ignore_eos=True)
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"not answered within 0\.001 s"):
            await client.generate(prompt(), 4, 0, long, deadline_s=0.001)
        assert time.monotonic() - began < 60
        reference = bits(await ask(client))
        assert bits(await ask(client)) == reference

    async def test_closing_the_client_ends_its_requests(self, subject, client):
        long = Sampling(MAX_RESPONSE, 1.0, ignore_eos=True)
        request = asyncio.create_task(client.generate(prompt(), 32, 0, long, deadline_s=DEADLINE_S))
        await asyncio.sleep(0.01)
        await client.close()
        with pytest.raises(PaNpuError):
            await asyncio.wait_for(request, 20)
        async with subject.client() as another:
            await another.probe(deadline_s=DEADLINE_S)

    async def test_responses_handed_on_at_any_token_go_on_as_what_they_would_have_been(
        self, subject, client
    ):
        """Cut by the engine beside its decoding, and at random tokens by hand; the control draws
        from the stream's beginning.
        """
        assert (await client.wait_ready(deadline_s=DEADLINE_S)).continues
        await self.publish(subject, client, 1)
        pool = EnginePool([client])
        pool.continues, count, long = (
            True,
            16,
            replace(SAMPLING, max_tokens=MAX_RESPONSE - 16, ignore_eos=True),
        )
        whole = await ask(client, count, 90, long)

        async def moved() -> list[Generation]:
            lease = await pool.admit(count, 1, lambda _: count, DEADLINE_S)
            with GroupSession(
                pool,
                lease,
                lambda _: count,
                deadline_s=DEADLINE_S,
                again_deadline_s=DEADLINE_S,
                label="g",
            ) as session:
                return await session.generate(prompt(), count, 90, long)

        moving, handed_on = asyncio.create_task(moved()), 0
        while not moving.done() and handed_on < 3:
            await asyncio.sleep(0.05 * (1 + handed_on))
            await client.cut_responses(deadline_s=DEADLINE_S)
            handed_on += 1
        assert [(t, p) for t, p, *_ in bits(await moving)] == [(t, p) for t, p, *_ in bits(whole)]

        async def rest(number: int, cut: int, drawn: bool) -> Generation:
            written, left = (
                whole[number].tokens[:cut],
                replace(long, max_tokens=long.max_tokens - cut),
            )
            if drawn:
                go_on = {"written": written}
                (part,) = await client.generate(
                    prompt(), 1, 90 + number, left, deadline_s=DEADLINE_S, **go_on
                )
            else:
                inputs = np.concatenate([prompt(), written])
                (part,) = await client.generate(inputs, 1, 90 + number, left, deadline_s=DEADLINE_S)
            return part

        cuts = np.random.default_rng(0).integers(1, long.max_tokens, count).tolist()
        for drawn in (True, False):
            parts = await asyncio.gather(
                *(rest(number, cut, drawn) for number, cut in enumerate(cuts))
            )
            same = [
                part.tokens.tolist() == w.tokens[cut:].tolist()
                and part.logprobs.tolist() == w.logprobs[cut:].tolist()
                for part, w, cut in zip(parts, whole, cuts, strict=True)
            ]
            assert all(same) if drawn else sum(same) <= 2, (
                f"skipping {drawn}: {sum(same)} of {count} equal"
            )

    async def test_a_probe_is_answered_beside_long_requests(self, client):
        long = Sampling(MAX_RESPONSE, 1.0, ignore_eos=True)
        requests = [
            asyncio.create_task(client.generate(prompt(i), 8, 0, long, deadline_s=DEADLINE_S))
            for i in range(4)
        ]
        await client.probe(deadline_s=DEADLINE_S)
        await asyncio.gather(*requests)

    async def test_every_response_says_which_version_generated_it(self, subject, client):
        for version in (3, 4):
            await self.publish(subject, client, version)
            assert (await client.loaded_weights(deadline_s=DEADLINE_S)).versions == (version,)
            assert (await client.check_health(deadline_s=DEADLINE_S)) == version
            assert {g.version for g in await ask(client)} == {version}

    async def test_an_engine_that_has_slept_generates_nothing_before_it_has_loaded_weights(
        self, subject, client
    ):
        if not (await client.wait_ready(deadline_s=DEADLINE_S)).sleeps:
            pytest.skip("it says that it cannot")
        await self.publish(subject, client, 3)
        before = bits(await ask(client))
        await client.sleep(deadline_s=DEADLINE_S)
        assert (await client.check_health(deadline_s=DEADLINE_S)) is None
        assert (await client.wait_ready(deadline_s=DEADLINE_S)).sleeps, (
            "a coordinator that comes now can wake it"
        )
        await client.wake(deadline_s=DEADLINE_S)
        await client.wake(deadline_s=DEADLINE_S)
        with pytest.raises(InvariantViolation, match="I1 version"):
            await ask(client)
        await self.publish(subject, client, 4)
        assert bits(await ask(client)) == before

    async def test_another_run_that_publishes_to_it_is_noticed(self, subject, client):
        await self.publish(subject, client, 3)
        async with subject.client() as another:
            await self.publish(subject, another, 4)
        with pytest.raises(
            InvariantViolation, match=r"I1 version: .*by weight version 4, but .*gave it 3"
        ):
            await ask(client)

    @pytest.mark.parametrize(
        "answer",
        [
            b"",
            b"{",
            b"[]",
            b"null",
            b"\xff\xfe",
            b"[" * 100_000,
            b'{"choices": [], "responses": [], "results": []}',
            b'{"choices": 5, "responses": 5, "results": 5, "versions": 5}',
            b'{"choices": [{}], "responses": [{}], "results": [{"version": 1.5}], "versions": '
            b'[1.5], "digests": []}',
            b'{"choices": [{"index": 0, "text": "", "token_ids": [500], "finish_reason": "stop"}],'
            b' "responses": [{"tokens": [500], "logprobs": [], "text": "", "finish_reason": "stop"}], "results": "x"}',
            b'{"choices": [{"index": 0, "text": "", "token_ids": [1], "finish_reason": "stop",'
            b' "logprobs": {"token_logprobs": [1e999]}}],'
            b' "responses": [{"tokens": [1], "logprobs": [NaN], "text": "", "finish_reason": "stop"}]}',
        ],
        ids=lambda answer: answer[:24].decode("latin-1"),
    )
    async def test_an_answer_that_is_none_is_an_error_of_the_engine(self, subject, answer):
        async with hostile(200, answer) as url, subject.kind.client(url, VOCAB, "key") as client:  # type: ignore[attr-defined]
            with pytest.raises(EngineError):
                await ask(client, 1)
            with pytest.raises(EngineError):
                await client.load_weights(1, deadline_s=DEADLINE_S)

    async def test_redirections_errors_and_endless_answers_end_in_one_line(
        self, subject, monkeypatch
    ):
        monkeypatch.setattr("pa_npu.engines.client.ANSWER_BYTES", 1000)
        for status, body, kind in (
            (302, b"elsewhere", EngineError),
            (404, b"\n\nnone\n", EngineError),
            (500, b"the engine behind it has died", EngineGone),
            (200, b"x" * 300_000, EngineError),
        ):
            async with (
                hostile(status, body) as url,
                subject.kind.client(url, VOCAB, "key") as client,
            ):  # type: ignore[attr-defined]
                with pytest.raises(kind) as raised:
                    await ask(client, 1)
                assert "\n" not in str(raised.value) and url in str(raised.value)

    async def test_an_answer_that_drips_ends_at_the_deadline(self, subject):
        async with (
            hostile(200, b"x" * 1000, pause_s=0.05) as url,
            subject.kind.client(url, VOCAB, "key") as client,
        ):  # type: ignore[attr-defined]
            with pytest.raises(DeadlineExceeded):
                await client.generate(prompt(), 1, 0, SAMPLING, deadline_s=0.3)

    async def test_an_engine_that_is_not_there_is_waited_for_until_the_deadline(self, subject):
        async with hostile(200, b"") as url:
            pass
        async with subject.kind.client(url, VOCAB, "key") as client:  # type: ignore[attr-defined]
            with pytest.raises(DeadlineExceeded, match=r"not ready after 0\.3 s"):
                await client.wait_ready(deadline_s=0.3)
            with pytest.raises(EngineGone):
                await ask(client, 1)

    async def test_a_second_start_is_another_instance_with_no_version(self, subject, client):
        """Last: starting takes a while with some engines."""
        await self.publish(subject, client, 3)
        await subject.restart()
        with pytest.raises(EngineGone, match="it was started again"):
            await ask(client)
        async with subject.client() as fresh:
            await fresh.wait_ready(deadline_s=DEADLINE_S)
            assert (await fresh.loaded_weights(deadline_s=DEADLINE_S)).versions == (None,)
            assert (await fresh.check_health(deadline_s=DEADLINE_S)) is None


@asynccontextmanager
async def hostile(status: int, body: bytes, pause_s: float = 0.0) -> Any:
    """A server that answers everything with this; pause_s: after each byte."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(
            status=status, headers={"Location": "http://127.0.0.1:9/"} if status == 302 else {}
        )
        await response.prepare(request)
        for part in [body[i : i + 1] for i in range(len(body))] if pause_s else [body]:
            await response.write(part)
            await asyncio.sleep(pause_s)
        return response

    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()

"""One real vLLM server: it passes the suite of every engine, samples depend on seeds alone, failures are short and clear."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import closing

import aiohttp
import numpy as np
import pytest
import torch

from pa_npu.control.tasks import gather
from pa_npu.engines.client import EngineClient
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import EngineError, Generation, LoadedWeights, Sampling
from tests.helpers.engine_conformance import (
    DEADLINE_S,
    EOS,
    MAX_PROMPT,
    MAX_RESPONSE,
    ModelConformance,
    Subject,
    make_engine_model,
)
from tests.helpers.engine_process import API_KEY, EngineProcess

pytestmark = pytest.mark.integration
# so small that most prompts find a step's budget half used: they must wait for the next step and never be cut
BUDGET = 160
SAMPLING = Sampling(max_tokens=32, temperature=1.0, stop_token_ids=(EOS,))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    directory = tmp_path_factory.mktemp("engine")
    model = make_engine_model(directory / "model")
    # what a chat model ships: it must not change what is sampled here
    defaults = {"temperature": 0.2, "top_k": 2, "top_p": 0.5, "repetition_penalty": 1.5, "eos_token_id": EOS}
    (model / "generation_config.json").write_text(json.dumps(defaults))
    rollout = {"max_num_batched_tokens": BUDGET, "max_num_seqs": 128, "kv_cache_gib": 0.25}
    server = EngineProcess("vllm", model, directory, rollout)
    try:
        asyncio.run(server.wait_ready())
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def subject(server: EngineProcess) -> Subject:
    return server.subject()


def prompts(number: int) -> list[np.ndarray]:
    lengths = torch.randint(5, MAX_PROMPT + 1, (number,), generator=torch.Generator().manual_seed(1)).tolist()
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(2, 128, (n,), generator=generator).numpy().astype(np.int32) for n in lengths]


async def generate_all(
    client: EngineClient, asked: Sequence[np.ndarray], order: Sequence[int], window: int
) -> dict[int, list[Generation]]:
    """Groups of 8, with seeds 1000 * index, at most `window` sequences in flight."""
    pool = EnginePool([client])
    results: dict[int, list[Generation]] = {}

    async def one(index: int) -> None:
        with closing(await pool.admit(8, 1, lambda _: window, DEADLINE_S)):
            results[index] = await client.generate(asked[index], 8, 1000 * index, SAMPLING, deadline_s=DEADLINE_S)

    await gather([one(index) for index in order])
    return results


async def test_samples_depend_on_seeds_alone_and_not_on_the_schedule(server):
    """Orders, windows, cache hits and a step budget that never fits all prompts: bit-identical tokens and log-probs."""
    asked = prompts(12)
    async with server.client() as client:
        reference = await generate_all(client, asked, range(12), window=8)
        schedules = [(seed, window) for seed, window in enumerate((96, 32, 64))]
        for seed, window in schedules:
            order = random.Random(seed).sample(range(12), 12)
            results = await generate_all(client, asked, order, window)
            for index in range(12):
                for i in range(8):
                    got, wanted = results[index][i], reference[index][i]
                    assert got.tokens.tolist() == wanted.tokens.tolist(), (
                        f"group {index}, response {i}, window {window}"
                    )
                    assert got.logprobs.tolist() == wanted.logprobs.tolist(), f"group {index}, response {i}"
        singles = [(await client.generate(asked[3], 1, 3000 + i, SAMPLING, deadline_s=DEADLINE_S))[0] for i in range(8)]
    assert [c.tokens.tolist() for c in singles] == [c.tokens.tolist() for c in reference[3]], "seed + i"
    assert len({tuple(c.tokens.tolist()) for c in reference[3]}) == 8, "eight different responses"


async def test_worker_extension_answers_and_unknown_methods_are_refused(server):
    async with server.client() as client:
        assert await client.loaded_weights(deadline_s=30) == LoadedWeights((None,))
        with pytest.raises(EngineError, match="pa_nonsense on its workers answered 500"):
            await client._on_workers("pa_nonsense", [], 30)


@pytest.mark.parametrize("path", ["/collective_rpc", "/v1/completions", "/reset_prefix_cache", "/metrics", "/docs"])
async def test_without_the_key_every_path_but_health_is_refused(server, path):
    call = {"method": "pa_version"}
    async with aiohttp.ClientSession() as session:
        for headers in ({}, {"Authorization": "Bearer another"}):
            async with session.post(server.url + path, json=call, headers=headers) as response:
                assert response.status == 401 and (await response.text()).count("\n") == 1
        async with session.get(server.url + "/health") as response:
            assert response.status == 200
        headers = {"Authorization": f"Bearer {API_KEY}"}
        async with session.post(server.url + "/collective_rpc", json=call, headers=headers) as response:
            (answer,) = (await response.json())["results"]
            assert answer == {"version": None, "continues": True, "sleeps": False, "routes": False}
    assert API_KEY not in server.log.read_text(), "keys are not for logs"


class TestVllm(ModelConformance):
    """The suite of every engine, with the server that the tests above share."""


async def test_killed_engine_fails_requests_in_flight_within_seconds(server):
    """Last in this file: it ends the shared server."""
    async with server.client() as client:
        sampling = Sampling(MAX_RESPONSE, 1.0, ignore_eos=True)
        requests = [asyncio.create_task(client.generate(p, 8, 0, sampling, deadline_s=DEADLINE_S)) for p in prompts(12)]
        while not (await _metrics_running(server)):
            assert not any(request.done() for request in requests)
        start = time.monotonic()
        server.kill()
        outcomes = await asyncio.gather(*requests, return_exceptions=True)
    assert time.monotonic() - start < 20
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert failures and all(isinstance(failure, EngineError) for failure in failures), outcomes
    assert server.url in str(failures[0])


async def _metrics_running(server: EngineProcess) -> bool:
    """Whether the engine has sequences running."""
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(server.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    running = [line for line in lines if line.startswith("vllm:num_requests_running")]
    return any(float(line.split()[-1]) > 0 for line in running)

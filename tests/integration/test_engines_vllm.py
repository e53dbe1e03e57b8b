"""One real vLLM server: it passes the suite of every engine, follows trainers' weights, and samples depend on seeds alone."""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from transformers import AutoModelForCausalLM

from pa_npu.control.tasks import gather
from pa_npu.engines.client import EngineClient
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import EngineError, Generation, LoadedWeights, Sampling
from tests.helpers.adapters import export_merged, make_adapter, plain
from tests.helpers.engine_model_conformance import ModelConformance
from tests.helpers.engine_process import API_KEY, EngineProcess
from tests.helpers.engine_subjects import (
    DEADLINE_S,
    EOS,
    MAX_PROMPT,
    MAX_RESPONSE,
    Subject,
    make_engine_model,
)
from tests.helpers.models import make_model
from tests.helpers.weights_rank import start_ranks

pytestmark = pytest.mark.integration
# so small that most prompts find a step's budget half used: they must wait for the next step and
# never be cut
BUDGET = 200
SAMPLING = Sampling(max_tokens=32, temperature=1.0, stop_token_ids=(EOS,))


TOLERANCE = 1e-4
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"devices": 2, "tensor_parallel": 2},
    "PP2": {"devices": 2, "pipeline_parallel": 2},
}
# longer than the CPU engine's cache blocks (128 tokens), so that prefixes are cached
PROMPT = torch.randint(3, 128, (MAX_PROMPT,), generator=torch.Generator().manual_seed(5)).tolist()


@contextmanager
def serving(directory: Path, family: str, tied: bool) -> Iterator[EngineProcess]:
    """Starts an engine on directory/model, which is directory/base with directory/adapter merged."""
    base = make_engine_model(directory / "base", family=family, tied=tied)
    model = export_merged(base, make_adapter(base, directory / "adapter"), directory / "model")
    # what a chat model ships: it must not change what is sampled here
    defaults = {
        "temperature": 0.2,
        "top_k": 2,
        "top_p": 0.5,
        "repetition_penalty": 1.5,
        "eos_token_id": EOS,
    }
    (model / "generation_config.json").write_text(json.dumps(defaults))
    rollout = {"max_num_batched_tokens": BUDGET, "max_num_seqs": 128, "kv_cache_gib": 0.25}
    rollout["statistics"] = True
    engine = EngineProcess("vllm", model, directory, rollout)
    try:
        asyncio.run(engine.wait_ready())
        yield engine
    finally:
        engine.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with serving(tmp_path_factory.mktemp("engine"), "qwen3", tied=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def subject(server: EngineProcess) -> Subject:
    return server.subject()


def prompts(number: int) -> list[np.ndarray]:
    lengths = torch.randint(
        5, MAX_PROMPT + 1, (number,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randint(2, 128, (n,), generator=generator).numpy().astype(np.int32) for n in lengths
    ]


async def generate_all(
    client: EngineClient, asked: Sequence[np.ndarray], order: Sequence[int], window: int
) -> dict[int, list[Generation]]:
    """Groups of 8, with seeds 1000 * index, at most `window` sequences in flight."""
    pool = EnginePool([client])
    results: dict[int, list[Generation]] = {}

    async def one(index: int) -> None:
        with closing(await pool.admit(8, 1, lambda _: window, DEADLINE_S)):
            results[index] = await client.generate(
                asked[index], 8, 1000 * index, SAMPLING, deadline_s=DEADLINE_S
            )

    await gather([one(index) for index in order])
    return results


async def test_samples_depend_on_seeds_alone_and_not_on_the_schedule(server):
    """Orders, windows, cache hits and a step budget that never fits all prompts: bit-identical
    tokens and log-probs.
    """
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
                    assert got.logprobs.tolist() == wanted.logprobs.tolist(), (
                        f"group {index}, response {i}"
                    )
        singles = [
            (await client.generate(asked[3], 1, 3000 + i, SAMPLING, deadline_s=DEADLINE_S))[0]
            for i in range(8)
        ]
    assert [c.tokens.tolist() for c in singles] == [c.tokens.tolist() for c in reference[3]], (
        "seed + i"
    )
    assert len({tuple(c.tokens.tolist()) for c in reference[3]}) == 8, "eight different responses"


async def test_worker_extension_answers_and_unknown_methods_are_refused(server):
    async with server.client() as client:
        assert await client.loaded_weights(deadline_s=30) == LoadedWeights((None,))
        with pytest.raises(EngineError, match="pa_nonsense on its workers answered 500"):
            await client._on_workers("pa_nonsense", [], 30)


@pytest.mark.parametrize(
    "path", ["/collective_rpc", "/v1/completions", "/reset_prefix_cache", "/metrics", "/docs"]
)
async def test_without_the_key_every_path_but_health_is_refused(server, path):
    call = {"method": "pa_version"}
    async with aiohttp.ClientSession() as session:
        for headers in ({}, {"Authorization": "Bearer another"}):
            async with session.post(server.url + path, json=call, headers=headers) as response:
                assert response.status == 401 and (await response.text()).count("\n") == 1
        async with session.get(server.url + "/health") as response:
            assert response.status == 200
        headers = {"Authorization": f"Bearer {API_KEY}"}
        async with session.post(
            server.url + "/collective_rpc", json=call, headers=headers
        ) as response:
            (answer,) = (await response.json())["results"]
            assert answer == {
                "version": None,
                "continues": True,
                "sleeps": False,
                "expert_choices": False,
                "images": False,
                "scores_at_temperature": True,
            }
    assert API_KEY not in server.log.read_text(), "keys are not for logs"


class Asked:
    """An engine, asked as the coordinator asks it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def call(self, path: str, body: dict[str, Any] | None = None, timeout_s: float = 90.0) -> Any:
        """The JSON answer; AssertionError with the body on another status than 200."""
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body or {}).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                data = response.read()
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.code}: {error.read().decode()}") from None
        return json.loads(data) if data else None

    def rpc(self, method: str, *args: Any) -> Any:
        return self.call("/collective_rpc", {"method": method, "args": list(args)})["results"][0]

    def sample(self, seed: int, tokens: int = 24) -> tuple[list[int], torch.Tensor]:
        body = {
            "model": "policy",
            "prompt": PROMPT,
            "max_tokens": tokens,
            "temperature": 1.0,
            "seed": seed,
            "logprobs": 0,
        }
        choice = self.call(
            "/v1/completions", body | {"return_token_ids": True, "ignore_eos": True}
        )["choices"][0]
        return choice["token_ids"], torch.tensor(choice["logprobs"]["token_logprobs"])

    def prefix_hits(self) -> float:
        """Tokens of prompts that were found in the prefix cache so far."""
        request = urllib.request.Request(
            self.url + "/metrics", headers={"Authorization": f"Bearer {API_KEY}"}
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            lines = response.read().decode().splitlines()
        return sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith("vllm:prefix_cache_hits_total")
        )


def hf_logprobs(model: Path, tokens: list[int]) -> torch.Tensor:
    return logprobs_of(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), tokens
    )


def logprobs_of(hf: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = hf(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def disagreement(engine: Asked, model: Path, seed: int = 3) -> float:
    """Largest |engine - HF| log-prob over a sampled response."""
    tokens, logprobs = engine.sample(seed)
    return (logprobs - hf_logprobs(model, tokens)).abs().max().item()


@contextmanager
def trainers(job: dict[str, Any], world_size: int, directory: Path) -> Iterator[None]:
    ranks = start_ranks(job, world_size, directory)
    try:
        yield
        codes = [process.wait(60) for process in ranks]
        logs = "\n".join(
            (directory / f"rank{rank}.log").read_text()[-3000:] for rank in range(world_size)
        )
        assert codes == [0] * world_size, logs
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def assert_follows(server: EngineProcess, family: str, tied: bool, directory: Path) -> None:
    """Two runs one after the other, the trainers of each in another layout.

    The engine begins with adapters, merged.
    """
    models = [
        make_model(directory / f"model{seed}", family, tied=tied, seed=seed, hidden=128)
        for seed in (1, 2)
    ]
    base, engine = server.model.parent / "base", Asked(server.url)
    engine.rpc("pa_close")
    tokens, logprobs = engine.sample(3)
    by_peft = logprobs_of(
        PeftModel.from_pretrained(plain(base), server.model.parent / "adapter"), tokens
    )
    assert (logprobs - by_peft).abs().max() < TOLERANCE, "the merged model is peft's"
    assert (logprobs - hf_logprobs(base, tokens)).abs().max() > 0.1, "the base would be seen"
    former, held = server.model, engine.rpc("pa_version")["version"]
    for name, trainer in LAYOUTS.items():
        (directory / name).mkdir()
        follow(engine, trainer, models, former, held, directory / name)
        former, held = models[-1], len(models) - 1


def follow(
    engine: Asked,
    trainer: dict[str, Any],
    models: list[Path],
    former: Path,
    held: int | None,
    directory: Path,
) -> None:
    """Publish `models` as versions 0, 1, ... to an engine that has the weights of `former`, stamped
    with version `held`.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stages = trainer.get("pipeline_parallel", 1)
    job = {
        "trainer": trainer,
        "models": [str(model) for model in models],
        "store": ["127.0.0.1", store.port],
        "workers": 1,
        "bucket_mib": 0.05,
    }
    with trainers(job, 2, directory), ThreadPoolExecutor(1) as pool:
        assert disagreement(engine, former) < TOLERANCE, (
            "the engine must agree with HF before anything is published"
        )
        assert disagreement(engine, models[0]) > 0.1, (
            "models too similar: the test could not see a publish"
        )
        with pytest.raises(AssertionError, match="call pa_connect before pa_receive"):
            engine.rpc("pa_receive", 0)

        announced = [json.loads(store.get(f"manifest/{stage}")) for stage in range(stages)]
        assert sum(len(entry["manifest"]["buckets"]) for entry in announced) > 3
        place = {"store": ["127.0.0.1", store.port], "first_rank": 1, "world_size": 2}
        groups = {**place, "backend": "gloo", "timeout_s": 60.0}
        wrong = json.loads(json.dumps(announced))
        wrong[0]["manifest"]["model"]["hidden_size"] = 96
        with pytest.raises(AssertionError, match="hidden_size=96, the engine's model 128"):
            engine.rpc("pa_connect", groups | {"stages": wrong})
        engine.rpc("pa_connect", groups | {"stages": announced})
        assert engine.rpc("pa_version")["version"] == held

        digests_before: list[list[str]] = []
        for version, model in enumerate(models):
            receiving = pool.submit(engine.rpc, "pa_receive", version)
            store.set(f"go/{version}", b"")
            received = receiving.result(90)
            assert received["version"] == version
            sent = [store.get(f"digests/{version}/{stage}").decode() for stage in range(stages)]
            assert received["digests"] == sent and all(len(digests.split()) > 1 for digests in sent)
            assert sent not in digests_before, "another version's weights"
            digests_before.append(sent)
            assert engine.rpc("pa_version")["version"] == version
            # the load has forgotten the prefixes of the old weights, by which log-probs would be
            # off by more than 1e-3
            for seed in (3, 4):
                assert disagreement(engine, model, seed) < TOLERANCE, f"version {version}"
            hits = engine.prefix_hits()
            engine.sample(3)
            assert engine.prefix_hits() > hits, (
                "no prefix is cached at all: the test could not see a load that keeps them"
            )
            assert disagreement(engine, former) > 0.1, "still the former weights"
            former = model
        engine.rpc("pa_close")


async def test_after_each_publish_log_probs_are_those_of_hf_for_the_new_weights(
    server, subject, tmp_path
):
    await asyncio.to_thread(assert_follows, server, "qwen3", True, tmp_path)
    async with server.client() as client:
        await subject.sender.publish(client, 2, server.model)  # as it was found


@pytest.mark.nightly
def test_so_are_those_of_a_model_whose_embeddings_are_not_tied(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    with serving(tmp_path / "engine", "qwen2", tied=False) as engine:
        assert_follows(engine, "qwen2", False, tmp_path)


class TestVllm(ModelConformance):
    """The suite of every engine, with the server that the tests above share."""

    # a start takes most of a minute; unit/test_engines_transformers.py starts the other kind again
    @pytest.mark.nightly
    async def test_a_second_start_is_another_instance_with_no_version(self, subject, client):
        await super().test_a_second_start_is_another_instance_with_no_version(subject, client)


async def test_what_was_sampled_before_a_cut_is_answered(server):
    """Tokens that the engine has kept back, of all requests that it had begun."""
    async with server.client() as client:
        sampling = Sampling(MAX_RESPONSE, 1.0, ignore_eos=True)
        request = asyncio.create_task(
            client.generate(prompts(1)[0], 8, 0, sampling, deadline_s=DEADLINE_S)
        )
        while not (await _metrics_running(server)):
            assert not request.done()
        await asyncio.sleep(0.05)
        await client.cut_responses(deadline_s=DEADLINE_S)
        parts = await request
        whole = await client.generate(prompts(1)[0], 8, 0, sampling, deadline_s=DEADLINE_S)
    assert {part.finish_reason for part in parts} == {"cut"}, "the control: none had ended"
    lengths = [len(part.tokens) for part in parts]
    assert min(lengths) > 0, lengths
    for part, rest in zip(parts, whole, strict=True):
        assert part.tokens.tolist() == rest.tokens[: len(part.tokens)].tolist()
        assert part.logprobs.tolist() == rest.logprobs[: len(part.tokens)].tolist()


async def test_killed_engine_fails_requests_in_flight_within_seconds(server):
    """Last in this file: it ends the shared server."""
    async with server.client() as client:
        sampling = Sampling(MAX_RESPONSE, 1.0, ignore_eos=True)
        requests = [
            asyncio.create_task(client.generate(p, 8, 0, sampling, deadline_s=DEADLINE_S))
            for p in prompts(12)
        ]
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
    """Returns whether the engine has sequences running."""
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(server.url + "/metrics") as response,
    ):
        lines = (await response.text()).splitlines()
    running = [line for line in lines if line.startswith("vllm:num_requests_running")]
    return any(float(line.split()[-1]) > 0 for line in running)

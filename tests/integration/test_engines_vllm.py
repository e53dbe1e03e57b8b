"""One real vLLM server: log-probs are HF's, samples depend on seeds alone, failures are short and clear."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from pa_npu.config import Config, ModelSpec
from pa_npu.control.tasks import gather
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import EngineError, Generation, LoadedWeights, Sampling
from pa_npu.engines.vllm.client import VllmEngine
from pa_npu.engines.vllm.command import server_command
from pa_npu.engines.vllm.guard import KEY_VARIABLE
from pa_npu.errors import DeadlineExceeded
from tests.helpers.models import make_model

pytestmark = pytest.mark.integration
ROOT = Path(__file__).resolve().parents[2]
EOS = 1
MAX_PROMPT, MAX_RESPONSE = 64, 64
# so small that most prompts find a step's budget half used: they must wait for the next step and never be cut
BUDGET = 160
SAMPLING = Sampling(max_tokens=32, temperature=1.0, stop_token_ids=(EOS,))
DEADLINE_S = 120.0
API_KEY = "key-of-this-test"


class Server:
    """A vLLM server in a process group of its own."""

    def __init__(self, directory: Path) -> None:
        self.model = make_model(directory / "model", hidden=128, tied=True)
        vocabulary = {"<pad>": 0, "</s>": EOS} | {f"w{i}": i for i in range(2, 128)}
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary)), eos_token="</s>").save_pretrained(
            self.model
        )
        # what a chat model ships: it must not change what is sampled here
        defaults = {"temperature": 0.2, "top_k": 2, "top_p": 0.5, "repetition_penalty": 1.5, "eos_token_id": EOS}
        (self.model / "generation_config.json").write_text(json.dumps(defaults))
        config = Config.model_validate(
            {
                "run": {"device": "cpu", "dir": str(directory)},
                "model": {"path": str(self.model), "dtype": "fp32"},
                "data": {"train": "none", "max_prompt_tokens": MAX_PROMPT},
                "rollout": {
                    "max_response_tokens": MAX_RESPONSE,
                    "max_num_batched_tokens": BUDGET,
                    "max_num_seqs": 128,
                    "kv_cache_gib": 0.25,
                },
            }
        )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = server_command(config, ModelSpec.read(str(self.model)), 0, port)
        self.url = f"http://127.0.0.1:{port}"
        self.log = directory / "engine.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command.argv,
                env={**os.environ, **command.env, KEY_VARIABLE: API_KEY},
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def client(self) -> VllmEngine:
        return VllmEngine(self.url, vocab_size=128, api_key=API_KEY)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("engine"))
    try:
        asyncio.run(_ready(server))
        yield server
    finally:
        server.kill()


async def _ready(server: Server) -> None:
    async with server.client() as client:
        try:
            await client.wait_ready(deadline_s=400)
        except DeadlineExceeded as error:
            raise AssertionError(f"{error}\n{server.log.read_text()[-3000:]}") from None


def prompts(number: int) -> list[np.ndarray]:
    lengths = torch.randint(5, MAX_PROMPT + 1, (number,), generator=torch.Generator().manual_seed(1)).tolist()
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(2, 128, (n,), generator=generator).numpy().astype(np.int32) for n in lengths]


def hf_logprobs(model: torch.nn.Module, prompt: np.ndarray, completion: Generation, temperature: float) -> np.ndarray:
    tokens = torch.tensor(np.concatenate([prompt, completion.tokens]), dtype=torch.long)
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, len(prompt) - 1 : -1].float()
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, tokens[len(prompt) :, None])[:, 0].numpy()


async def generate_all(
    client: VllmEngine, asked: Sequence[np.ndarray], order: Sequence[int], window: int
) -> dict[int, list[Generation]]:
    """Groups of 8, with seeds 1000 * index, at most `window` sequences in flight."""
    pool = EnginePool([client])
    results: dict[int, list[Generation]] = {}

    async def one(index: int) -> None:
        with await pool.admit(8, 1, lambda: window, DEADLINE_S):
            results[index] = await client.generate(asked[index], 8, 1000 * index, SAMPLING, deadline_s=DEADLINE_S)

    await gather([one(index) for index in order])
    return results


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_the_sampling_distribution(server, temperature):
    model = AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32).eval()
    sampling = Sampling(max_tokens=32, temperature=temperature, stop_token_ids=(EOS,))
    worst = 0.0
    async with server.client() as client:
        for number, prompt in enumerate(prompts(6)):
            for completion in await client.generate(prompt, 4, number, sampling, deadline_s=DEADLINE_S):
                difference = np.abs(completion.logprobs - hf_logprobs(model, prompt, completion, temperature))
                worst = max(worst, float(difference.max()))
                # negative control: another temperature is another distribution
                other = np.abs(completion.logprobs - hf_logprobs(model, prompt, completion, 1.7 - temperature))
                if len(other) > 8:
                    assert other.max() > 0.01
    print(f"largest |vLLM - HF| log-prob at temperature {temperature}: {worst:.2e}")
    assert worst < 1e-4, f"largest |vLLM - HF| log-prob {worst:.2e}"


async def test_samples_depend_on_seeds_alone_and_not_on_the_schedule(server):
    """Orders, windows, cache hits and a step budget that never fits all prompts: bit-identical tokens and log-probs."""
    asked = prompts(12)
    async with server.client() as client:
        reference = await generate_all(client, asked, range(12), window=8)
        schedules = [(seed, window) for seed, window in enumerate((96, 32, 64))]
        for seed, window in schedules:
            if seed % 2:
                await client.reset_prefix_cache(deadline_s=10)
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


async def test_end_token_is_kept_and_responses_are_cut_at_the_limit(server):
    async with server.client() as client:
        short = await client.generate(prompts(1)[0], 64, 5, Sampling(48, 1.0, (EOS,)), deadline_s=DEADLINE_S)
        ignoring = await client.generate(
            prompts(1)[0], 8, 5, Sampling(16, 1.0, (EOS,), ignore_eos=True), deadline_s=DEADLINE_S
        )
    finished = [completion for completion in short if completion.finished]
    assert finished, "of 64 responses over 128 tokens some must end"
    for completion in short:
        assert (completion.tokens[-1] == EOS) == completion.finished
        assert EOS not in completion.tokens[:-1]
        assert completion.finished or len(completion.tokens) == 48
        assert "</s>" not in completion.text
    assert {len(completion.tokens) for completion in ignoring} == {16}


async def test_prompt_longer_than_the_engine_takes_is_refused_and_nothing_else_suffers(server):
    async with server.client() as client:
        with pytest.raises(EngineError, match=r"answered 400: .*maximum context length"):
            await client.generate(np.full(200, 5, np.int32), 1, 0, SAMPLING, deadline_s=DEADLINE_S)
        assert len(await client.generate(prompts(1)[0], 2, 0, SAMPLING, deadline_s=DEADLINE_S)) == 2


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
            assert (await response.json())["results"] == [{"version": None}]
    assert API_KEY not in server.log.read_text(), "keys are not for logs"


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


async def _metrics_running(server: Server) -> bool:
    """Whether the engine has sequences running."""
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(server.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    running = [line for line in lines if line.startswith("vllm:num_requests_running")]
    return any(float(line.split()[-1]) > 0 for line in running)

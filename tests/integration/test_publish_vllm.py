"""Weights into a live vLLM server: after each publish the engine's log-probs are those of HF for the new weights."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from pa_npu.engines.vllm.kind import server_command
from pa_npu.families.spec import ModelSpec
from tests.helpers.adapters import export_merged, make_adapter, plain
from tests.helpers.megatron import model_config
from tests.helpers.models import make_model
from tests.helpers.weights_rank import ROOT, start_ranks

pytestmark = pytest.mark.integration
TOLERANCE = 1e-4
API_KEY = "key-of-this-test"
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"devices": 2, "tensor_parallel": 2},
    "PP2": {"devices": 2, "pipeline_parallel": 2},
}
# longer than the CPU engine's cache blocks (128 tokens), so that prefixes are cached
PROMPT = torch.randint(3, 128, (150,), generator=torch.Generator().manual_seed(5)).tolist()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Engine:
    """A vLLM server on `model`."""

    def __init__(self, model: Path, log: Path) -> None:
        config = model_config(
            model,
            run={"device": "cpu"},
            data={"max_prompt_tokens": 200},
            rollout={
                "max_response_tokens": 32,
                "max_num_batched_tokens": 1024,
                "max_num_seqs": 8,
                "kv_cache_gib": 0.25,
            },
        )
        port = free_port()
        command = server_command(config, ModelSpec.read(str(model)), 0, port)
        self.url, self.log = f"http://127.0.0.1:{port}", log
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                command.argv,
                env={**os.environ, **command.env, "VLLM_API_KEY": API_KEY},
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

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
        choice = self.call("/v1/completions", body | {"return_token_ids": True, "ignore_eos": True})["choices"][0]
        return choice["token_ids"], torch.tensor(choice["logprobs"]["token_logprobs"])

    def prefix_hits(self) -> float:
        """Tokens of prompts that were found in the prefix cache so far."""
        request = urllib.request.Request(self.url + "/metrics", headers={"Authorization": f"Bearer {API_KEY}"})
        with urllib.request.urlopen(request, timeout=10) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))

    def wait_ready(self, deadline_s: float = 240.0) -> None:
        start = time.monotonic()
        while time.monotonic() - start < deadline_s:
            assert self.process.poll() is None, f"the engine died:\n{self.log.read_text()[-5000:]}"
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise AssertionError(f"the engine is not ready after {deadline_s} s:\n{self.log.read_text()[-5000:]}")

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def hf_logprobs(model: Path, tokens: list[int]) -> torch.Tensor:
    return logprobs_of(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), tokens)


def logprobs_of(hf: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = hf(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def disagreement(engine: Engine, model: Path, seed: int = 3) -> float:
    """Largest |engine - HF| log-prob over a sampled response."""
    tokens, logprobs = engine.sample(seed)
    return (logprobs - hf_logprobs(model, tokens)).abs().max().item()


def add_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(128)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t1", pad_token="t0").save_pretrained(directory)


@contextmanager
def trainers(job: dict[str, Any], world_size: int, directory: Path) -> Iterator[None]:
    ranks = start_ranks(job, world_size, directory)
    try:
        yield
        codes = [process.wait(60) for process in ranks]
        logs = "\n".join((directory / f"rank{rank}.log").read_text()[-3000:] for rank in range(world_size))
        assert codes == [0] * world_size, logs
    finally:
        for process in ranks:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        pytest.param("qwen3", True, id="qwen3-tied"),
        pytest.param("qwen2", False, id="qwen2-untied", marks=pytest.mark.nightly),
    ],
)
def test_engine_follows_the_trainers_weights(family: str, tied: bool, tmp_path: Path) -> None:
    """One engine and two runs one after the other, the trainers of each in another layout. It begins with adapters, merged."""
    models = [make_model(tmp_path / f"model{seed}", family, tied=tied, seed=seed, hidden=128) for seed in range(3)]
    base, adapter = models[0], make_adapter(models[0], tmp_path / "adapter")
    models[0] = export_merged(base, adapter, tmp_path / "merged")
    add_tokenizer(models[0])
    engine = Engine(models[0], tmp_path / "engine.log")
    former, held = models[0], None
    try:
        engine.wait_ready()
        tokens, logprobs = engine.sample(3)
        by_peft = logprobs_of(PeftModel.from_pretrained(plain(base), adapter), tokens)
        assert (logprobs - by_peft).abs().max() < TOLERANCE, "the merged model is peft's"
        assert (logprobs - hf_logprobs(base, tokens)).abs().max() > 0.1, "the base would be seen"
        for name, trainer in LAYOUTS.items():
            directory = tmp_path / name
            directory.mkdir()
            follow(engine, trainer, models[1:], former, held, directory)
            former, held = models[2], 1
    finally:
        engine.stop()


def follow(
    engine: Engine, trainer: dict[str, Any], models: list[Path], former: Path, held: int | None, directory: Path
) -> None:
    """Publish `models` as versions 0, 1, ... to an engine that has the weights of `former`, stamped with version `held`."""
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
        assert disagreement(engine, former) < TOLERANCE, "the engine must agree with HF before anything is published"
        assert disagreement(engine, models[0]) > 0.1, "models too similar: the test could not see a publish"
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
            # the load has forgotten the prefixes of the old weights, by which log-probs would be off by more than 1e-3
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

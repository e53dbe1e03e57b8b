"""Real vLLM with images: its log-probs are transformers' after every publish, and an adapter's export is served with an image."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import PeftModel

from pa_npu.backends.fsdp.model import ScoredModel, load_model
from pa_npu.backends.fsdp.vision import pack_images
from pa_npu.backends.registry import backend_module
from pa_npu.engines.client import EngineClient
from pa_npu.engines.protocol import Sampling
from pa_npu.engines.vllm.kind import MIDDLEWARE, WORKER_EXTENSION
from pa_npu.families.spec import ModelSpec
from pa_npu.samples.microbatch import pack
from pa_npu.telemetry.timeline import Timeline
from pa_npu.vision.images import to_png
from tests.helpers.engine_process import API_KEY, EngineProcess
from tests.helpers.megatron import PLATFORM, model_config, single_process
from tests.helpers.vision import (
    IMAGE_TOKEN,
    Prompted,
    group_of,
    make_vision,
    picture,
    prompt_of,
    reader_of,
    sample_of,
    transformers_logprobs,
)
from tests.helpers.weight_sender import WeightSender
from tools.tiny_vision import VOCAB_SIZE

pytestmark = [
    pytest.mark.integration,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("torchvision") is None,
        reason="launch/install_cpu.sh vision installs torchvision",
    ),
]

TOLERANCE = 1e-5
CARELESS = 0.01  # a thousand times that
NUM_PUBLISHES = 10
SAMPLING = Sampling(max_tokens=12, temperature=1.0, ignore_eos=True)
KEEPS_IMAGES = {MIDDLEWARE: "tests.helpers.careless_engine.KeepsImages"}
KEEPS_HEAD = {WORKER_EXTENSION: "tests.helpers.careless_engine.KeepsHead"}

Start = Callable[..., EngineProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[EngineProcess] = []

    def begin(model: Path, **more: Any) -> EngineProcess:
        directory = tmp_path / f"engine {len(started)}"
        directory.mkdir()
        rollout = {"max_num_seqs": 16, "kv_cache_gib": 0.25, "max_num_batched_tokens": 2048}
        engine = EngineProcess("vllm", model, directory, rollout, trainer="fsdp", **more)
        started.append(engine)
        asyncio.run(engine.wait_ready())
        return engine

    yield begin
    for engine in started:
        engine.kill()


def prompts_of(model: Path) -> list[Prompted]:
    first = prompt_of(model, [picture(1)])
    second = prompt_of(model, [picture(2)])
    assert np.array_equal(first[0], second[0]), "equal ids"
    # in a later turn, behind a placeholder that the policy wrote
    written = np.array([5, IMAGE_TOKEN, 9], np.int32)
    before = len(first[0]) + len(written)
    later = (
        np.concatenate([first[0], written, second[0]]),
        (*first[1], *(image.moved(before) for image in second[1])),
    )
    two = prompt_of(model, [picture(1), picture(3, 112, 56)])
    return [first, second, two, prompt_of(model, []), later]


class Trainer:
    """Weights that change with every version, and what they give."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.model, self.directory = model, directory
        self.causal = load_model(str(model), torch.float32).eval()
        self.processor = reader_of(model).processor
        self.sender = WeightSender()

    async def publish(self, client: Any, version: int) -> None:
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in self.causal.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * 0.05 * parameter.abs().mean())
        target = self.directory / str(version)
        self.causal.save_pretrained(target)
        loaded = await self.sender.publish(client, version, target)
        assert loaded.versions == (version,)

    @torch.no_grad()
    def logprobs(self, prompted: Prompted, response: np.ndarray) -> np.ndarray:
        tokens, images = prompted
        if np.count_nonzero(tokens == IMAGE_TOKEN) > sum(image.length for image in images):
            # transformers' own forward takes every placeholder for an image's
            scored = ScoredModel(self.causal, "auto")
            microbatch = pack([group_of([sample_of(prompted, response.tolist())])], True, 1)
            shown = pack_images(microbatch, self.processor)
            scores = scored(
                microbatch.tokens, microbatch.layout, microbatch.rows, microbatch.targets, 1.0, 512,
                images=shown,
            )  # fmt: skip
            return np.asarray(scores.logprobs.numpy())
        shown_images = [(i.start, i.end, i.pixels, i.grid) for i in images]
        whole = np.concatenate([tokens, response])
        logprobs = transformers_logprobs(
            load_eager(self.causal), self.processor, whole, shown_images
        )
        return np.asarray(logprobs[len(tokens) - 1 :].numpy())

    async def differences(self, client: Any, seed: int) -> list[float]:
        """The largest difference of log-probs for each prompt."""
        largest = []
        for prompted in prompts_of(self.model):
            tokens, images = prompted
            (response,) = await client.generate(
                tokens, 1, seed, SAMPLING, deadline_s=60, images=images
            )
            expected = self.logprobs(prompted, response.tokens)
            largest.append(float(np.abs(response.logprobs - expected).max()))
        return largest


def load_eager(causal: Any) -> Any:
    """The model with transformers' own attention."""
    causal.set_attn_implementation("sdpa")
    return causal


@pytest.mark.parametrize(
    ("family", "tied", "careless"),
    [("qwen2_5_vl", False, KEEPS_IMAGES), ("qwen3_vl", True, KEEPS_HEAD)],
)
def test_log_probs_are_transformers_after_every_one_of_ten_publishes(
    family: str, tied: bool, careless: dict[str, str], start: Start, tmp_path: Path
) -> None:
    model = make_vision(tmp_path / "made", family, tied=tied)
    engine = start(model)

    async def publish_and_compare() -> list[list[float]]:
        trainer = Trainer(model, tmp_path / "versions")
        async with EngineClient(engine.url, VOCAB_SIZE, API_KEY) as client:
            compared = [await trainer.differences(client, 100)]
            for version in range(NUM_PUBLISHES):
                await trainer.publish(client, version)
                compared.append(await trainer.differences(client, version))
        return compared

    compared = asyncio.run(publish_and_compare())
    assert max(map(max, compared)) < TOLERANCE, compared
    engine.kill()

    control = start(model, replaced=careless)

    async def publish_carelessly() -> tuple[list[float], list[float]]:
        trainer = Trainer(model, tmp_path / "careless versions")
        async with EngineClient(control.url, VOCAB_SIZE, API_KEY) as client:
            before = await trainer.differences(client, 100)
            await trainer.publish(client, 0)
            return before, await trainer.differences(client, 0)

    before, after = asyncio.run(publish_carelessly())
    assert max(before) < TOLERANCE
    assert max(after) > CARELESS, "what the load leaves out has to show"


def test_an_export_of_adapters_is_served_with_an_image(start: Start, tmp_path: Path) -> None:
    model = make_vision(tmp_path / "made")
    config = model_config(
        model,
        model={"dtype": "fp32"},
        run={"dir": str(tmp_path / "run")},
        trainer={"backend": "fsdp"},
        lora={"rank": 4},
    )
    adapters = tmp_path / "adapters"
    with single_process(config):
        backend: Any = backend_module("fsdp").create(
            config,
            ModelSpec.from_config(config),
            PLATFORM,
            dist.HashStore(),
            0,
            0,
            Timeline(None, ""),
        )
        torch.manual_seed(4)
        with torch.no_grad():
            for name, parameter in backend._policy.model.named_parameters():
                if ".lora_B." in name:
                    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                    local.normal_(std=0.2)
        backend.export(adapters)
    tuned = PeftModel.from_pretrained(load_model(str(model), torch.float32), adapters).eval()
    more = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"tuned={adapters}"]
    engine = start(model, more=more)
    image = picture(1)
    url = f"data:image/png;base64,{base64.b64encode(to_png(np.array(image))).decode()}"
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "How many?"},
    ]
    body = {
        "model": "tuned",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
        "logprobs": True,
        "return_token_ids": True,
        "seed": 3,
    }
    request = urllib.request.Request(
        f"{engine.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.load(response)
    (choice,) = answer["choices"]
    prompt = answer["prompt_token_ids"]
    start_of = prompt.index(IMAGE_TOKEN)
    pixels = np.array(image)
    processor = reader_of(model).processor
    grid = processor.grid_of(*pixels.shape[:2])
    shown = [(start_of, start_of + processor.num_tokens(grid), pixels, grid)]
    tokens = np.array([*prompt, *choice["token_ids"]], np.int32)
    sampled = np.array([entry["logprob"] for entry in choice["logprobs"]["content"]])
    with torch.no_grad():
        expected = transformers_logprobs(tuned, processor, tokens, shown)[len(prompt) - 1 :]
        with tuned.disable_adapter():
            plain = transformers_logprobs(tuned, processor, tokens, shown)[len(prompt) - 1 :]
    assert np.abs(sampled - expected.numpy()).max() < 1e-4
    assert np.abs(sampled - plain.numpy()).max() > 0.01, "the adapter has to show"

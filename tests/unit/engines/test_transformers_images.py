"""The transformers engine with images: token truth, an image sent once, and what was expanded differently is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pa_npu.backends.fsdp.model import load_model
from pa_npu.engines.client import EngineClient
from pa_npu.engines.protocol import EngineError, Sampling
from pa_npu.engines.transformers.server import Server, load_server, serving
from tests.helpers.vision import (
    IMAGE_TOKEN,
    Prompted,
    make_vision,
    picture,
    prompt_of,
    reader_of,
    transformers_logprobs,
)

SAMPLING = Sampling(max_tokens=8, temperature=1.0, ignore_eos=True)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision(tmp_path_factory.mktemp("vision"), request.param)


@asynccontextmanager
async def engine(model: Path) -> AsyncIterator[tuple[EngineClient, Server]]:
    server = load_server(str(model), "fp32", torch.device("cpu"), "key", 256, 8)
    async with (
        serving(server, "127.0.0.1", 0) as url,
        EngineClient(url, 384, "key", "transformers") as client,
    ):
        yield client, server


def shown(prompted: Prompted) -> list[Any]:
    return [(image.start, image.end, image.pixels, image.grid) for image in prompted[1]]


def test_log_probs_are_those_of_transformers_own_forward(model: Path) -> None:
    prompts = [
        prompt_of(model, [picture(1)]),
        prompt_of(model, [picture(2)]),  # equal tokens
        prompt_of(model, [picture(1), picture(3, 112, 56)]),
        prompt_of(model, []),
    ]

    async def ask() -> list[Any]:
        async with engine(model) as (client, _):
            # at once: what transformers keeps in the model of one sequence must not meet another's
            return await asyncio.gather(
                *(
                    client.generate(tokens, 2, 7, SAMPLING, deadline_s=60, images=images)
                    for tokens, images in prompts
                )
            )

    theirs = load_model(str(model), torch.float32).eval()
    processor = reader_of(model).processor
    first = []
    for prompt, generations in zip(prompts, asyncio.run(ask()), strict=True):
        first.append(generations[0].tokens.tolist())
        for generation in generations:
            tokens = np.concatenate([prompt[0], generation.tokens])
            with torch.no_grad():
                expected = transformers_logprobs(theirs, processor, tokens, shown(prompt))
            behind = expected[len(prompt[0]) - 1 :].numpy()
            assert np.abs(generation.logprobs - behind).max() < 5e-6
    assert first[0] != first[1], "another image, another response"


def test_an_image_is_sent_once_and_again_to_an_engine_that_forgot_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, images = prompt_of(model, [picture(1)])
    sizes = []
    request = EngineClient._request

    async def counted(
        self: EngineClient, method: Any, path: str, body: Any, *rest: Any, **more: Any
    ):
        sizes.append(len(body))
        return await request(self, method, path, body, *rest, **more)

    monkeypatch.setattr(EngineClient, "_request", counted)

    async def ask() -> list[Any]:
        async with engine(model) as (client, server):
            answers = []
            for forgets in (False, False, True):
                if forgets:
                    server._images._pixels.clear()
                answers += await client.generate(
                    prompt, 1, 7, SAMPLING, deadline_s=60, images=images
                )
            return answers

    answers = asyncio.run(ask())
    assert len({answer.tokens.tobytes() for answer in answers}) == 1
    first, second, missed, again = sizes
    assert second == missed < 1000 < first == again


def test_a_response_goes_on_behind_a_placeholder_that_the_policy_wrote(model: Path) -> None:
    prompt, images = prompt_of(model, [picture(1)])
    begun = np.array([5, IMAGE_TOKEN, 9], np.int32)

    async def ask() -> tuple[Any, Any]:
        async with engine(model) as (client, _):
            more = {"deadline_s": 60, "images": images}
            (rest,) = await client.generate(prompt, 1, 7, SAMPLING, written=begun, **more)
            # a later turn: the written placeholder is among the prompt's tokens
            turn = np.concatenate([prompt, begun, [4]]).astype(np.int32)
            (later,) = await client.generate(turn, 1, 7, SAMPLING, **more)
            return rest, later

    rest, later = asyncio.run(ask())
    assert len(rest.tokens) == len(later.tokens) == 8


def test_what_the_engine_expands_otherwise_ends_the_request(model: Path) -> None:
    """As where its processor has another bound: here the coordinator says fewer placeholders."""
    prompt, (image,) = prompt_of(model, [picture(1)])
    fewer = np.delete(prompt, image.start)
    wrong = replace(image, length=image.length - 1)

    async def ask() -> None:
        async with engine(model) as (client, _):
            await client.generate(fewer, 1, 7, SAMPLING, deadline_s=60, images=[wrong])

    with pytest.raises(EngineError) as refused:
        asyncio.run(ask())
    assert f"it made {len(prompt)} tokens of a prompt with images that has {len(fewer)}" in str(
        refused.value
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"key": "0" * 32}, "its pixels do not have the key 000"),
        ({"data": "AAAA"}, "are no image in one of the formats"),
        ({"place": 0}, "at each place must be the model's placeholder"),
        ({"place": 900}, "their places must ascend within the prompt"),
    ],
)
def test_a_request_with_a_damaged_image_is_refused_in_one_line(
    change: dict[str, Any], reason: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pa_npu.engines import client as client_module
    from pa_npu.engines.codec import encode_request

    def damaged(short: Any, n: int, seed: int, sampling: Any, written: Any, parts: Any) -> bytes:
        import msgspec

        changed = [msgspec.structs.replace(part, **change) for part in parts]
        return encode_request(short, n, seed, sampling, written, changed)

    monkeypatch.setattr(client_module, "encode_request", damaged)
    prompt, images = prompt_of(model, [picture(1)])

    async def ask() -> None:
        async with engine(model) as (client, _):
            await client.generate(prompt, 1, 7, SAMPLING, deadline_s=60, images=images)

    with pytest.raises(EngineError) as refused:
        asyncio.run(ask())
    assert reason in str(refused.value) and "\n" not in str(refused.value)

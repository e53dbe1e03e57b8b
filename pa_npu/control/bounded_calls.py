"""BoundedCalls: gives a deadline to calls that have none of their own, e.g. of a store whose process has been stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from queue import SimpleQueue
from typing import Any, TypeVar

from pa_npu.errors import PaNpuError

T = TypeVar("T")


class NoAnswer(PaNpuError):
    """asked: the call was made and did not return in time; else it was not made, because one before it had not."""

    def __init__(self, asked: bool) -> None:
        super().__init__("it does not answer" if asked else "it did not answer before")
        self.asked = asked


class BoundedCalls:
    """Calls one after another in a thread of this name. timeout_s: how long a caller waits for its own."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # one thread, because what is called keeps one connection, and no executor's, because the end of the program would wait
        # for a call that never returns
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._gave_up = False
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def __call__(self, call: Callable[[], T]) -> T:
        """Call it: return what it returns, raise what it raises. Raises NoAnswer after timeout_s, and from then on at once."""
        if self._gave_up:  # whoever comes next need not wait as long again
            raise NoAnswer(asked=False)
        future: Future[T] = Future()
        self._calls.put((call, future))
        try:
            return future.result(self._timeout_s)
        except FutureTimeout:
            if future.done():  # at the last moment, or this timeout is the call's own
                return future.result()
            self._gave_up = True
            raise NoAnswer(asked=True) from None

    def _serve(self) -> None:
        while True:
            call, future = self._calls.get()
            try:
                future.set_result(call())
            except BaseException as error:  # whatever it is, the caller has to hear of it
                future.set_exception(error)

"""Stand-in engines in a thread of the test, so that a test can look into them and end them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tools.stand_in import Speed, StandInEngine, serving

API_KEY = "key-of-the-stand-ins"


class Requests(list[dict[str, Any]]):
    """Requests as they arrive, each shown to `look` before anything is written for it."""

    def __init__(self) -> None:
        super().__init__()
        self.look: Callable[[dict[str, Any]], None] = lambda request: None

    def append(self, request: dict[str, Any]) -> None:
        super().append(request)
        self.look(request)


class Served:
    """One running stand-in.

    `stop` closes its port and drops its connections, as a dying engine does.
    """

    def __init__(self, speed: Speed, port: int = 0, sleeps: bool = False) -> None:
        self.url = ""
        self._sleeps = sleeps
        self._port = port
        self.engine: StandInEngine
        self.requests = Requests()
        self._speed = speed
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="stand-in engine", daemon=True)
        self._thread.start()
        assert self._started.wait(10), "the stand-in engine did not start"

    def wait_for_request(self, matches: Callable[[dict[str, Any]], bool], timeout_s: float) -> bool:
        """Returns whether a matching request has arrived before the deadline."""

        async def arrived() -> bool:
            deadline = self._loop.time() + timeout_s
            while not any(map(matches, self.engine.requests)):
                if self._loop.time() > deadline:
                    return False
                await asyncio.sleep(0.01)
            return True

        return asyncio.run_coroutine_threadsafe(arrived(), self._loop).result(timeout_s + 5)

    def left(self) -> int:
        """Decode steps until nothing is in flight, of what runs."""
        return max(
            (max(request.lengths) - request.decoded for request in self.engine._running), default=0
        )

    def start_again(self, speed: Speed) -> Served:
        """Its successor at the same address, once it has stopped."""
        return Served(speed, int(self.url.rpartition(":")[2]), self._sleeps)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)
        assert not self._thread.is_alive(), "the stand-in engine did not stop"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self.engine = StandInEngine(
            self._speed, vocab_size=100, api_key=API_KEY, sleeps=self._sleeps
        )
        self.engine.requests = self.requests
        async with serving(self.engine, port=self._port) as self.url:
            self._started.set()
            await self._end.wait()


@contextmanager
def stand_in_engines(number: int, speed: Speed) -> Iterator[list[Served]]:
    engines = [Served(speed) for _ in range(number)]
    try:
        yield engines
    finally:
        for engine in engines:
            engine.stop()

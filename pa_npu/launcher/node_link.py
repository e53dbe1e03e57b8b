"""An agent's connection to the head: a thread that gives and takes signs of life, orders and events, so that nothing else waits."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from pa_npu.control.channel import StoreChannel
from pa_npu.errors import PaNpuError
from pa_npu.launcher.node_messages import BEAT_S, Ended, Leaving, Mail, to_json

_LAST_WORDS_S = 2.0


@dataclass(frozen=True)
class Over:
    """The head ended the run, or the node's part in it."""

    code: int
    reason: str


class HeadLink:
    """Of one launcher of one node. Use it as a context manager: leaving it sends what is left to send.

    A store whose machine vanished does not answer and does not refuse either, so the thread may hang: silent_s() tells.
    """

    def __init__(self, channel: StoreChannel, node: int, generation: int) -> None:
        self.orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.over: Over | None = None
        self.lost: str | None = None
        self._channel = channel
        self._place = f"{node}/{generation}"
        self._orders = Mail(channel, f"{self._place}/orders")
        self._events = Mail(channel, f"{self._place}/events")
        self._outgoing: queue.SimpleQueue[Ended | Leaving] = queue.SimpleQueue()
        self._heard_s = time.monotonic()
        self._head_beat = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="head-link", daemon=True)

    def send(self, event: Ended | Leaving) -> None:
        self._outgoing.put(event)

    def silent_s(self) -> float:
        """Since the head's last sign of life."""
        return time.monotonic() - self._heard_s

    def __enter__(self) -> HeadLink:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join(_LAST_WORDS_S if self.silent_s() < _LAST_WORDS_S else 0.0)

    def _run(self) -> None:
        try:
            while not self._closing.wait(BEAT_S):
                self._exchange()
            self._exchange()
        except PaNpuError as error:
            self.lost = str(error)

    def _exchange(self) -> None:
        """Events before the beat: whoever has seen two more beats has seen every event from before the first look."""
        while not self._outgoing.empty():
            self._events.send(to_json(self._outgoing.get()))
        self._channel.add(f"{self._place}/beat", 1)
        beat = self._channel.add("beat", 0)
        if beat != self._head_beat:
            self._head_beat, self._heard_s = beat, time.monotonic()
        for order in self._orders.receive():
            self.orders.put(order)
        for key in (f"{self._place}/refused", "end"):
            if self.over is None and self._channel.exists(key):
                raw = self._channel.get_json(key)
                self.over = Over(int(raw["code"]), str(raw["reason"]))

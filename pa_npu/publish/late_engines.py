"""Engines that come late: one that was started again inside an iteration gets its weights from a thread of the trainers.

    coordinator                              this thread, on all ranks of replica 0
    late/<n>: version, workers        ->     hold the version: the optimizer may not touch its weights meanwhile
    all ranks have answered           <-     late/<n>/answer/<rank>: whether it is still held here
    late/<n>/go: whether all hold it  ->     send to a group of this engine alone, or do nothing; let the version go

Without it an engine that dies would be of no use before the next publish, and the only engine's death would end the
iteration. The main thread goes on training: what the two do at the same time uses different groups and streams.
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import Any

from pa_npu.control.channel import StoreChannel
from pa_npu.errors import DeadlineExceeded, PaNpuError
from pa_npu.platform.base import Platform
from pa_npu.publish.publisher import Publisher

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_LONGEST_END_S = 10.0


class VersionGate:
    """Which version's weights are complete and unchanged on this rank, and whether a reader holds them so."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._version: int | None = None
        self._held = False
        self._changed = threading.Condition()

    def open(self, version: int) -> None:
        """The weights are those of `version`, until `close`."""
        with self._changed:
            self._version = version

    def close(self) -> None:
        """The weights are about to change: waits for a reader to let go, after which nobody can hold them."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._held, self._timeout_s):
                raise DeadlineExceeded(
                    f"weight version {self._version} is still being sent to a late engine after {self._timeout_s:g} s; look at "
                    f"that engine's log, or raise publish.timeout_s"
                )
            self._version = None

    def hold(self, version: int) -> bool:
        """Keep the weights as they are until `release`, if they are those of `version`."""
        with self._changed:
            self._held = self._version == version
            return self._held

    def release(self) -> None:
        with self._changed:
            self._held = False
            self._changed.notify_all()


class LateEngines:
    """The thread. publisher: one of its own, over groups of its own, reading the weights that `gate` guards. Use it with `with`."""

    def __init__(
        self,
        publisher: Publisher,
        channel: StoreChannel,
        gate: VersionGate,
        platform: Platform,
        rank: int,
        timeout_s: float,
    ) -> None:
        self._publisher = publisher
        self._channel = channel
        self._gate = gate
        self._platform = platform
        self._rank = rank
        self._timeout_s = timeout_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="late engines", daemon=True)

    def __enter__(self) -> LateEngines:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join(_LONGEST_END_S)

    def _serve(self) -> None:
        number = 0
        try:
            while not self._end.is_set():
                if self._channel.exists(f"late/{number}"):
                    self._answer(number)
                    number += 1
                self._end.wait(_POLL_S)
        except PaNpuError as error:
            # the run goes on without this service; the main thread says what matters if the store is gone
            logger.warning("engines that come late cannot be served any more: %s", error)

    def _answer(self, number: int) -> None:
        wanted: dict[str, Any] = self._channel.get_json(f"late/{number}")
        held = self._gate.hold(int(wanted["version"]))
        try:
            self._channel.put_json(f"late/{number}/answer/{self._rank}", held)
            go = self._channel.wait_json(
                f"late/{number}/go", self._timeout_s, f"the coordinator to decide about late engine {number}"
            )
            if go:
                self._send(int(wanted["version"]), number, int(wanted["workers"]))
        except PaNpuError as error:
            logger.warning("late engine %d did not get weight version %s: %s", number, wanted["version"], error)
        finally:
            self._gate.release()

    def _send(self, version: int, number: int, workers: int) -> None:
        with self._platform.side_stream():
            self._publisher.connect(number, workers)
            stats = self._publisher.publish(version)
            self._platform.synchronize()
        self._publisher.close()
        logger.info("late engine %d got weight version %d in %.2f s", number, version, stats.seconds)

"""Engines that come late: one that was started again inside an iteration gets its weights from a thread of the trainers.

    coordinator                           this thread, on all ranks of replica 0
    LateRequest: version, workers   ->    hold the version: the optimizer may not touch its weights meanwhile
    all ranks have answered         <-    LateAnswer: whether it is still held here
    LateDecision                    ->    where all hold it: join a group with this engine alone, send, let the version go
    the engine's digests are these  <-    SentWeights of each stage; or LateBroken, and the engine waits for the next publish

Without it an engine that dies would be of no use before the next publish, and the only engine's death would end the iteration.

Training goes on meanwhile: weights go through host memory (gloo), in groups and a stream of their own. Two groups of NCCL or HCCL
on one device at the same time could deadlock.
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType

from pa_npu.config.mesh import Place
from pa_npu.control.channel import StoreChannel, StoreError
from pa_npu.platform.base import Platform
from pa_npu.publish.messages import (
    LATE_ANSWER,
    LATE_BROKEN,
    LATE_DECISION,
    LATE_REQUEST,
    LATE_SENT,
    LateAnswer,
    LateRequest,
    PublishBroken,
    PublishMembers,
    SentWeights,
)
from pa_npu.publish.publisher import Publisher
from pa_npu.publish.version_gate import VersionGate

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_LONGEST_END_S = 10.0


class LateEngines:
    """The thread. publisher: one of its own, over groups of its own, reading the weights that `gate` guards. Use it with `with`."""

    def __init__(
        self,
        publisher: Publisher,
        channel: StoreChannel,
        gate: VersionGate,
        platform: Platform,
        place: Place,
        timeout_s: float,
    ) -> None:
        self._publisher = publisher
        self._channel = channel
        self._gate = gate
        self._platform = platform
        self._place = place
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
        """Every request gets an answer or a reason, whatever goes wrong: an engine, and the coordinator with it, waits for one."""
        number = 0
        try:
            while not self._end.is_set():
                if LATE_REQUEST.exists(self._channel, number=number):
                    try:
                        self._answer(number)
                    except StoreError:
                        raise
                    except (
                        Exception
                    ) as error:  # torch raises RuntimeError and its kinds; nobody but this thread would hear of it
                        self._break(number, error)
                    number += 1
                self._end.wait(_POLL_S)
        except StoreError as error:
            # the run's store is gone, and the run with it; the main thread says what matters
            logger.warning("engines that come late cannot be served any more: %s", error)

    def _break(self, number: int, error: Exception) -> None:
        reason = f"trainer rank {self._place.rank}: {type(error).__name__}: {error}"
        logger.warning("late delivery %d broke: %s", number, reason)
        LATE_BROKEN.put(self._channel, PublishBroken(reason), number=number)

    def _answer(self, number: int) -> None:
        wanted = LATE_REQUEST.get(self._channel, number=number)
        held = self._gate.hold(wanted.version)
        try:
            LATE_ANSWER.put(self._channel, LateAnswer(held), number=number, rank=self._place.rank)
            if LATE_DECISION.wait(self._channel, self._timeout_s, number=number).go:
                self._deliver(number, wanted)
        finally:
            self._gate.release()

    def _deliver(self, number: int, wanted: LateRequest) -> None:
        """Join and send. What one stage does, all its ranks do; where one fails, the others stop waiting for it."""
        try:
            self._publisher.connect(PublishMembers(number, wanted.workers))
            self._send(number, wanted.version)
        finally:
            self._publisher.close()

    def _send(self, number: int, version: int) -> None:
        with self._platform.side_stream():
            stats = self._publisher.publish(version)
        if self._place.publishes:
            sent = SentWeights(version, stats.digests)
            LATE_SENT.put(self._channel, sent, number=number, stage=self._place.stage)
        logger.info("late engine %d got weight version %d in %.2f s", number, version, stats.seconds)

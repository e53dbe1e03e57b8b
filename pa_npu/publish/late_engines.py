"""Engines that come late: one that was started again inside an iteration gets its weights from a thread of the trainers.

    coordinator                           this thread, on all ranks whose weights are sent
    LateRequest: version, workers   ->    hold the version: the optimizer may not touch its weights meanwhile
    all ranks have answered         <-    LateAnswer: whether it is still held here
    LATE_DECISION                   ->    where all hold it: join a group with this engine alone, send, let the version go
    the engine's digests are these  <-    SentWeights of each sender; or LateBroken, and the engine waits for the next publish

Without it an engine that dies would be of no use before the next publish, and the only engine's
death would end the iteration.

Training goes on meanwhile: weights go through host memory (gloo), in groups and a stream of their
own. Two groups of NCCL or HCCL on one device at the same time could deadlock.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType

from pa_npu.config.mesh import Place
from pa_npu.control.channel import StoreChannel, StoreError
from pa_npu.errors import DeadlineExceeded
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

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_LONGEST_END_S = 10.0


class VersionGate:
    """Says when a rank's weights may be sent to a late engine: as long as they are one version's.

    The training thread says which version they are; the thread that sends late holds them. `close`,
    which comes before they change, waits for `release`. This gate guards the policy itself.
    timeout_s: the longest that training waits.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._version: int | None = None
        self._offered: tuple[int, Callable[[], None]] | None = None
        self._held = False
        self._changed = threading.Condition()

    # training

    def open(self, version: int) -> None:
        """Says that the weights are those of `version`, until `close`."""
        with self._changed:
            self._version = version
            self._offered = None

    def close(self) -> None:
        """Waits for a sender to let go, before the weights change; nobody can hold them then."""
        with self._changed:
            self._wait_released()
            self._version = None

    def close_policy(self) -> None:
        """Closes the gate if it guards the policy, which is about to change."""
        self.close()

    def offer(self, version: int, switch_to_offered: Callable[[], None]) -> None:
        """Announces that engines receive `version` and will swap to it.

        Until they do, the version before is held. switch_to_offered: makes `version` what is held.
        """
        with self._changed:
            self._offered = (version, switch_to_offered)

    def accept_offer(self) -> None:
        """Holds from now on what was offered, since engines have swapped.

        Does nothing if a request for it has come before, as that holds it too.
        """
        with self._changed:
            self._wait_released()
            self._switch_to_offered()

    def _wait_released(self) -> None:
        if not self._changed.wait_for(lambda: not self._held, self._timeout_s):
            raise DeadlineExceeded(
                f"weight version {self._version} is still being sent to a late engine after "
                f"{self._timeout_s:g} s; look at that engine's log, or raise publish.timeout_s"
            )

    def _switch_to_offered(self) -> None:
        if self._offered is not None:
            self._version, switch_to_offered = self._offered
            self._offered = None
            switch_to_offered()

    # a thread that sends

    def acquire(self, version: int) -> bool:
        """Keeps the weights as they are until `release`, if they are those of `version`."""
        with self._changed:
            if self._offered is not None and self._offered[0] == version:
                self._switch_to_offered()  # who asks for it knows that engines have swapped
            self._held = self._version == version
            return self._held

    def release(self) -> None:
        """Lets the weights change."""
        with self._changed:
            self._held = False
            self._changed.notify_all()


class CopyGate(VersionGate):
    """A gate that guards a copy, which does not change when the policy does."""

    def close_policy(self) -> None:
        """Stays open: late engines still get the version that was copied."""


class LateEngineSender:
    """The thread that sends to late engines, while it is entered with `with`."""

    def __init__(
        self,
        publisher: Publisher,
        channel: StoreChannel,
        gate: VersionGate,
        platform: Platform,
        place: Place,
        timeout_s: float,
    ) -> None:
        """publisher: used by nobody else, over groups that nobody else uses; it reads the weights
        that `gate` guards.
        """
        self._publisher = publisher
        self._channel = channel
        self._gate = gate
        self._platform = platform
        self._place = place
        self._timeout_s = timeout_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="late engines", daemon=True)

    def __enter__(self) -> LateEngineSender:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join(_LONGEST_END_S)

    def _serve(self) -> None:
        """Answers every request, or says why not: an engine and the coordinator wait for that."""
        number = 0
        try:
            while not self._end.is_set():
                if LATE_REQUEST.exists(self._channel, number=number):
                    try:
                        self._answer(number)
                    except StoreError:
                        raise
                    except Exception as error:
                        # torch has errors of its own; nobody but this thread would hear of them
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
        request = LATE_REQUEST.get(self._channel, number=number)
        held = self._gate.acquire(request.version)
        try:
            LATE_ANSWER.put(self._channel, LateAnswer(held), number=number, rank=self._place.rank)
            if LATE_DECISION.wait(self._channel, self._timeout_s, number=number).held:
                self._deliver(number, request)
        finally:
            self._gate.release()

    def _deliver(self, number: int, request: LateRequest) -> None:
        """Joins the engine and sends.

        All ranks that take part do so; if one fails, the others stop waiting for it.
        """
        try:
            with self._platform.side_stream():
                stats = self._publisher.publish(
                    request.version, PublishMembers(number, request.workers)
                )
            if self._publisher.is_leader:
                sent = SentWeights(request.version, stats.digests)
                LATE_SENT.put(self._channel, sent, number=number, rank=self._place.rank)
            logger.info(
                "late engine %d got weight version %d in %.2f s",
                number,
                request.version,
                stats.seconds,
            )
        finally:
            self._publisher.close()

"""Engines that come late: one that was started again inside an iteration gets its weights from a thread of the trainers.

    coordinator                           this thread, on all ranks of replica 0
    LateRequest: version, workers   ->    hold the version: the optimizer may not touch its weights meanwhile
    all ranks have answered         <-    LateAnswer: whether it is still held here
    LateDecision                    ->    where all hold it: join a group with this engine alone, send, let the version go
    the engine's digests are these  <-    SentWeights of each stage; or LateBroken, and the engine waits for the next publish

Without it an engine that dies would be of no use before the next publish, and the only engine's death would end the iteration.

Where the backend of collectives allows it (gloo), training goes on meanwhile: what the two do at the same time uses different
groups and streams. Where it does not (NCCL, HCCL; see weight_transfer/collectives.py), joining and sending take turns with
training:

  - A stage's tensor-parallel ranks stop at one microbatch border (pa_npu.publish.version_gate), wait for their device, and do the
    step. Ranks of other replicas go on, and wait at the next gradient reduction at the latest.
  - Pipeline stages take one step after another, first stage first, which is also the order in which an engine joins and reads.
    While one has stopped the others train on, so that whatever was sent to it or by it before its border is still taken, and its
    device comes to rest. Everything before border m of a stage depends on nothing behind border m of any stage (1F1B), hence no
    deadlock.
  - A stage other than the first that waits for a microbatch waits in a receive from its neighbour, which is no border. With
    pipeline stages a delivery therefore needs rollouts that still arrive. Where they do not, as when the only engine died, the stop
    ends at its deadline, the delivery is broken off, and the run goes on from its checkpoint when the trainers' wait ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

from pa_npu.config.mesh import Place
from pa_npu.control.channel import StoreChannel, StoreError
from pa_npu.control.typed import Topic
from pa_npu.errors import PaNpuError
from pa_npu.platform.base import Platform
from pa_npu.publish.messages import (
    LATE_ANSWER,
    LATE_BROKEN,
    LATE_DECISION,
    LATE_POSITION,
    LATE_REQUEST,
    LATE_SENT,
    LATE_STEP_DONE,
    LateAnswer,
    LatePosition,
    LateRequest,
    LateStepDone,
    PublishBroken,
    PublishMembers,
    SentWeights,
)
from pa_npu.publish.publisher import Publisher
from pa_npu.publish.version_gate import VersionGate
from pa_npu.weight_transfer import collectives
from pa_npu.weight_transfer.transport import Deadline

T = TypeVar("T")

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_BROKEN_POLL_S = 0.02  # while a delivery is under way and training may stand still for it
_LONGEST_END_S = 10.0
# Of publish.timeout_s, within which the engine's own wait ends: how long a stage may take to come to a border.
_STOP_SHARE = 0.5


class _BrokenElsewhere(PaNpuError):
    """Another rank could not do its part of this delivery, and has said why."""


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
        self._overlaps = collectives.rules(platform.comm_backend).overlaps
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
                    except _BrokenElsewhere as error:
                        logger.warning("late delivery %d is given up: %s", number, error)
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
        members = PublishMembers.of(number, {wanted.way: wanted.workers})
        try:
            self._step(number, "join", lambda: self._publisher.connect(members))
            self._step(number, "send", lambda: self._send(number, wanted.version))
        finally:
            self._publisher.close()

    def _send(self, number: int, version: int) -> None:
        stats = self._publisher.publish(version)
        if self._place.publishes:
            sent = SentWeights(version, stats.digests)
            LATE_SENT.put(self._channel, sent, number=number, stage=self._place.stage)
        logger.info("late engine %d got weight version %d in %.2f s", number, version, stats.seconds)

    def _step(self, number: int, step: str, work: Callable[[], None]) -> None:
        if self._overlaps:
            self._on_side_stream(work)
            return
        place: dict[str, Any] = {"number": number, "step": step}
        if self._place.stage:
            self._wait(LATE_STEP_DONE, stage=self._place.stage - 1, **place)
        with self._stopped(number, step):
            self._on_side_stream(work)
        if self._place.publishes:
            LATE_STEP_DONE.put(self._channel, LateStepDone(self._place.stage), stage=self._place.stage, **place)

    @contextmanager
    def _stopped(self, number: int, step: str) -> Iterator[None]:
        """Training stands still on all ranks of this stage, at the same border, and nothing of it is left on the device."""
        try:
            own = LatePosition(self._gate.freeze())
            LATE_POSITION.put(self._channel, own, number=number, step=step, rank=self._place.rank)
            positions = [
                self._wait(LATE_POSITION, number=number, step=step, rank=rank) for rank in self._place.group("tensor")
            ]
            self._gate.stop_at(max(position.border for position in positions))
            self._gate.wait_stopped(self._timeout_s * _STOP_SHARE, lambda: self._check_whole(number))
            self._platform.synchronize()
            yield
        finally:
            self._gate.go_on()

    def _wait(self, topic: Topic[T], *, number: int, **place: Any) -> T:
        """Wait for what another rank says of this delivery. Raises _BrokenElsewhere as soon as one has failed: training stands
        still."""
        deadline = Deadline(self._timeout_s)
        while not topic.exists(self._channel, number=number, **place) and deadline.remaining_s > 0:
            self._check_whole(number)
            self._end.wait(_BROKEN_POLL_S)
        return topic.wait(self._channel, 0.0, number=number, **place)

    def _check_whole(self, number: int) -> None:
        broken = LATE_BROKEN.get_if_there(self._channel, number=number)
        if broken is not None:
            raise _BrokenElsewhere(broken.reason)

    def _on_side_stream(self, work: Callable[[], None]) -> None:
        with self._platform.side_stream():
            work()
            self._platform.synchronize()

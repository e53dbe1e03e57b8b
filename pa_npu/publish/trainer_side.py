"""The trainers' end of the protocol: announce a version, take part in attempts to publish it until one is done. On every rank.

What moves the weights is pa_npu.publish.publisher; the coordinator's end is
pa_npu.publish.coordinator_side.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

from pa_npu.control.channel import StoreChannel
from pa_npu.control.messages import DivergenceReport
from pa_npu.errors import DeadlineExceeded, InvariantViolation
from pa_npu.publish.messages import (
    BROKEN,
    ENGINES_SWAPPED,
    GAVE_UP,
    MEMBERS,
    READY,
    SENT,
    TRAINED,
    VERDICT,
    Probe,
    PublishBroken,
    PublishMembers,
    SentWeights,
    TrainedContents,
    TrainersReady,
)
from pa_npu.publish.publisher import PublishStats
from pa_npu.telemetry.timeline import Timeline
from pa_npu.weight_transfer.contents import summed
from pa_npu.weight_transfer.transport import WeightSyncError

logger = logging.getLogger(__name__)

Send = Callable[[int, PublishMembers], PublishStats | None]
"""Sends a version to its members; returns None on a rank that sends nothing."""


@dataclass(frozen=True)
class Published:
    """A version that the engines hold, or that was left out.

    Args:
        probe: the engines' answers, where a probe was due.
        send_s: this rank's seconds of sending the version.
        wait_s: all other seconds from its announcement on.
        delayed: whether engines have only received it, and swap to it when they are through with
            the version before.
        policy: digest of the weights that this rank trains.
        divergence: why it was published or left out, where that is decided anew for each version.
    """

    probe: Probe | None
    send_s: float
    wait_s: float
    delayed: bool = False
    policy: str = ""
    divergence: DivergenceReport = field(default_factory=DivergenceReport)


class TrainerPublish:
    """Takes one rank's part in the protocol."""

    def __init__(
        self,
        channel: StoreChannel,
        send: Send,
        trained: Callable[[], str],
        rank: int,
        stage: int | None,
        timeout_s: float,
        timeline: Timeline,
        contents: Callable[[], dict[str, str]] | None = None,
    ) -> None:
        """Args:
        channel: to the coordinator.
        send: sends a version.
        trained: returns the digest of the weights that this rank trains; called after they were
            sent, while the engines load them.
        rank: of this trainer.
        stage: the pipeline stage of which this rank sends weights; None if it sends nothing.
        timeout_s: of every wait for the coordinator, which in that time starts engines and makes
            attempts that fail.
        timeline: gets the spans of sending and of waiting.
        contents: sums up what this rank trains of what is sent (Publisher.contents); None on a
            rank that takes no part.
        """
        self._channel = channel
        self._send = send
        self._trained = trained
        self._rank = rank
        self._stage = stage
        self._timeout_s = timeout_s
        self._timeline = timeline
        self._contents = contents
        self._last: PublishStats | None = None
        self._policy = ""

    def publish(self, version: int) -> Published:
        """Announces `version`, and returns when the engines hold it.

        Raises DeadlineExceeded if the coordinator says nothing.
        """
        if self._rank == 0:
            READY.put(self._channel, TrainersReady(version), version=version)
        start = time.perf_counter()
        send_s = 0.0
        for attempt in count():
            place = {"version": version, "attempt": attempt}
            with self._timeline.span("wait for engines"):
                members = MEMBERS.wait(self._channel, self._timeout_s, **place)
            with self._timeline.span("publish", version=version):
                send_s += self._attempt(members, **place)
            with self._timeline.span("wait for engines"):
                verdict = VERDICT.wait(self._channel, self._timeout_s, **place)
            if verdict.done:
                break
            logger.warning("weight version %d is published again: %s", version, verdict.reason)
        sent = self._last.bytes if self._last is not None else 0
        logger.info(
            "published version %d, %.1f MiB of it from here, in %.2f s",
            version,
            sent / 2**20,
            send_s,
        )
        wait_s = time.perf_counter() - start - send_s
        return Published(verdict.probe, send_s, wait_s, members.delayed, self._policy)

    def wait_swapped(self, version: int) -> None:
        """Waits until engines have swapped to what was published with a delay.

        Raises DeadlineExceeded.
        """
        with self._timeline.span("wait for engines"):
            ENGINES_SWAPPED.wait(self._channel, self._timeout_s, version=version)

    def skip(self, version: int) -> Published:
        """Announces `version` as one that engines do not get."""
        if self._rank == 0:
            READY.put(self._channel, TrainersReady(version, publishes=False), version=version)
        logger.info("version %d is not published: the engines' policy is near it", version)
        return Published(None, 0.0, 0.0, policy=self._trained())

    def _attempt(self, members: PublishMembers, version: int, attempt: int) -> float:
        """Makes one attempt and returns this rank's seconds.

        The coordinator judges whether it failed.
        """
        start = time.perf_counter()
        try:
            stats = self._send(version, members)
        except (WeightSyncError, DeadlineExceeded) as error:
            logger.warning("%s", error)
            place = {"version": version, "attempt": attempt}
            broken = PublishBroken(str(error))
            GAVE_UP.put(self._channel, broken, rank=self._rank, **place)
            BROKEN.put(self._channel, broken, **place)
            if self._contents is not None:
                self._contents()  # peers for which all went well do it together with this rank
            return time.perf_counter() - start
        if self._stage is not None and stats is not None:
            sent = SentWeights(version, stats.digests)
            SENT.put(self._channel, sent, version=version, attempt=attempt, rank=self._rank)
        send_s = time.perf_counter() - start
        # from here on engines load
        trained_here = ""
        if self._contents is not None:
            contents = self._contents()
            trained_here = summed(contents.values())
            trained = TrainedContents(version, contents)
            TRAINED.put(self._channel, trained, version=version, attempt=attempt, rank=self._rank)
        self._policy = self._trained()
        if self._stage is not None and stats is not None:
            stats = replace(stats, policy=trained_here or self._policy)
            check_follows(version, self._stage, stats, self._last)
            self._last = stats
        return send_s


def check_follows(
    version: int, stage: int, stats: PublishStats, before: PublishStats | None
) -> None:
    """Checks that what a rank sent changed since the publish `before`, if what it trains of that
    did (I5).

    Raises InvariantViolation. The check is exact: an update too small to change any weight in its
    type changes neither.
    """
    if before is None or not stats.policy or not stats.digests:
        return
    if stats.digests == before.digests and stats.policy != before.policy:
        raise InvariantViolation(
            f"I5: stage {stage} sent, as weight version {version}, bit for bit what it sent as the "
            "version before, although the update has changed the policy; what is published is not "
            "what is trained"
        )
    if stats.policy == before.policy:
        logger.info(
            "weight version %d is the one before bit for bit: the update changed no weight here",
            version,
        )

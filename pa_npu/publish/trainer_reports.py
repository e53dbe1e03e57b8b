"""TrainerReports: what the coordinator learns from the trainers while engines load a version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from pa_npu.control.channel import StoreChannel
from pa_npu.control.typed import Topic
from pa_npu.engines.protocol import EngineError
from pa_npu.publish.messages import GAVE_UP, READY, SENT, TRAINED, PublishBroken, SentWeights
from pa_npu.weight_transfer.contents import added

# Workers have the same deadline and a better message (which bucket, which stage); the client's only
# catches workers that hang.
GRACE_S = 15.0
# Ranks that are alive look whether they should give up several times a second.
_ANSWER_S = 3.0
_LOOK_EVERY_S = 0.1


class TrainersBroke(EngineError):
    """Raised when the trainers could not do their part of a publish. Engines are not to blame."""


class TrainerReports:
    """Waits for the messages of the trainers about a publish."""

    def __init__(
        self,
        *,
        channel: StoreChannel,
        senders: Sequence[int],
        publishers: Sequence[int],
        deadline_s: float,
    ) -> None:
        """senders: the trainer ranks whose weights together are sent. publishers: those that send
        them.
        """
        self._channel = channel
        self._senders = senders
        self._publishers = publishers
        self._deadline_s = deadline_s
        self._complete: dict[str, int] = {}  # the attempt that all ranks have ended

    async def ready(self, version: int, within_s: float) -> float:
        """Waits for the trainers; returns when they were seen to be ready (time.perf_counter)."""
        await READY.wait_async(self._channel, within_s, version=version)
        return time.perf_counter()

    async def sent(self, topic: Topic[SentWeights], place: dict[str, int]) -> list[SentWeights]:
        """Waits for each sender to report what it sent.

        It reports it when the last engine has its last bucket.
        """
        return [
            await topic.wait_async(self._channel, self._deadline_s, rank=rank, **place)
            for rank in self._publishers
        ]

    async def trained(self, place: dict[str, int]) -> dict[str, str]:
        """Waits for the contents of each tensor that the trainers train, and sums them over ranks.

        The trainers sum them up while engines load.
        """
        of_ranks = []
        for rank in self._senders:
            trained = await TRAINED.wait_async(self._channel, self._deadline_s, rank=rank, **place)
            self._channel.delete(TRAINED.at(rank=rank, **place))  # a mixture has many tensors
            of_ranks.append(trained.contents)
        self._complete = dict(place)
        return added(of_ranks)

    async def silent(self, place: dict[str, int]) -> list[int]:
        """Returns the ranks that take part in an attempt that was given up, and within a few seconds
        have neither ended their part nor given it up: they hang.
        """
        if self._complete == place:
            return []
        silent = list(self._senders)
        deadline = time.monotonic() + _ANSWER_S
        while True:
            silent = [rank for rank in silent if not self._has_answered(rank, place)]
            if not silent or time.monotonic() > deadline:
                return silent
            await asyncio.sleep(_LOOK_EVERY_S)

    def _has_answered(self, rank: int, place: dict[str, int]) -> bool:
        topics = (GAVE_UP, SENT, TRAINED)
        return any(topic.exists(self._channel, rank=rank, **place) for topic in topics)

    async def broken(
        self, topic: Topic[PublishBroken], place: dict[str, int], longer_s: float = 0.0
    ) -> None:
        """Guards work that may never end: raises TrainersBroke if the trainers cannot do their part.

        longer_s: how long the work may wait for the trainers, in addition to the time of a publish.
        """
        limit_s = 2 * self._deadline_s + GRACE_S + longer_s
        broken = await topic.wait_async(self._channel, limit_s, **place)
        raise TrainersBroke(f"the trainers could not send: {broken.reason}")

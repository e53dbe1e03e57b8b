"""The borders of a run without engines: a version is announced, and nothing is sent, probed or waited for.

TrainersKeepWeights has the calls of TrainerPublish (trainer_side.py), so that a trainer's border
does not ask whether there are engines.
"""

from __future__ import annotations

from collections.abc import Callable

from pa_npu.control.channel import StoreChannel
from pa_npu.publish.messages import READY, TrainersReady
from pa_npu.publish.trainer_side import Published


class TrainersKeepWeights:
    """One rank's part.

    follow: told of each version, makes the models that follow the policy equal to it where they
    are due (Learner.skip_publish). trained: the digest of the weights that this rank trains.
    """

    def __init__(
        self,
        channel: StoreChannel,
        follow: Callable[[int], None],
        trained: Callable[[], str],
        rank: int,
    ) -> None:
        self._channel = channel
        self._follow = follow
        self._trained = trained
        self._rank = rank

    def publish(self, version: int) -> Published:
        """Announces `version` and returns at once."""
        self._follow(version)
        return self.skip(version)

    def skip(self, version: int) -> Published:
        """Announces `version`, which the policy holds already."""
        if self._rank == 0:
            READY.put(self._channel, TrainersReady(version, publishes=False), version=version)
        return Published(None, 0.0, 0.0, policy=self._trained())

    def wait_swapped(self, version: int) -> None:
        """Nothing swaps."""

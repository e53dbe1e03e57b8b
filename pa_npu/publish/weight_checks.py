"""WeightChecks: whether engines hold what the trainers trained and sent (I5).

Three things are compared: digests of what arrived with digests of what was sent (ArrivalCheck),
contents of what arrived with contents of what trains, and an engine's memory with what it received
(both LiveMemoryCheck).
"""

from __future__ import annotations

from collections.abc import Mapping

from pa_npu.engines.protocol import LoadedWeights
from pa_npu.publish.engines import ArrivalCheck, Connection
from pa_npu.publish.live_memory import LiveMemoryCheck
from pa_npu.publish.messages import LATE_SENT, SENT
from pa_npu.publish.trainer_reports import TrainerReports


class WeightChecks:
    """Compares what engines loaded with what the trainers report.

    Nothing is compared if the trainers have not said what they will send: they send nothing then.
    Every method raises InvariantViolation where something differs. `loaded`: answers of engines, by
    the engine's name.
    """

    def __init__(self, connection: Connection, trainers: TrainerReports) -> None:
        self._connection = connection
        self._trainers = trainers
        self._arrival = ArrivalCheck(connection)
        self._live_memory = LiveMemoryCheck(connection.computation)

    async def check_arrival(
        self, version: int, place: dict[str, int], loaded: Mapping[str, LoadedWeights]
    ) -> None:
        """Compares what arrived with what was sent, and keeps what the trainers say they train.

        place: the version and the attempt, as keys of messages name them.
        """
        if not self._arrival.applies:
            return
        self._arrival.check(version, await self._trainers.sent(SENT, place), loaded)
        self._live_memory.expect(version, await self._trainers.trained(place))

    def check_live(self, version: int, loaded: Mapping[str, LoadedWeights]) -> None:
        """Compares the memory of engines with what they received, after they loaded `version`."""
        if self._arrival.applies:
            self._live_memory.check(version, loaded, as_published=True)

    async def check_late(
        self, version: int, number: int, loaded: Mapping[str, LoadedWeights]
    ) -> None:
        """Compares both for an engine that got `version` in late delivery `number`."""
        if not self._arrival.applies:
            return
        sent = await self._trainers.sent(LATE_SENT, {"number": number})
        self._arrival.check_late(version, sent, loaded)
        self._live_memory.check(version, loaded, as_published=self._connection.sends_late_alike)

"""Collects groups that were produced ahead of a version, for a checkpoint of it, and the coordinator's words about them.

With schedule.max_staleness = k these are iterations v to v + k - 1 at the border before iteration v, or fewer where producing
runs fewer iterations ahead (Config.iterations_ahead): all of them are complete by then, or will be before the next publish, which
waits for them too. With schedule.tokens_per_update there are also groups that were carried to a later update.
"""

from __future__ import annotations

from dataclasses import asdict

from pa_npu.checkpoints.ahead import AheadIteration
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.messages import CARRIED, DATA_POSITION, DISPATCHED, PRODUCED_AHEAD
from pa_npu.samples.rollout_buffer import RolloutBuffer

# pa_npu.coordinator.resumed reads it.
_CARRIED = "carried"


class RolloutsAhead:
    """One rank asks, once for each version."""

    def __init__(self, config: Config, channel: StoreChannel, buffer: RolloutBuffer) -> None:
        self._config = config
        self._channel = channel
        self._buffer = buffer

    def __call__(self, version: int) -> list[AheadIteration]:
        """Iterations that are produced by versions before `version` and trained from it on. Raises DeadlineExceeded."""
        schedule = self._config.schedule
        end = min(version + self._config.iterations_ahead, schedule.iterations)
        found = [self._iteration(iteration) for iteration in range(version, end)]
        if self._config.trained_groups is None and version < schedule.iterations:
            found.append(self._carried(version))
        return found

    def _iteration(self, iteration: int) -> AheadIteration:
        limit_s = self._config.wait_timeout_s
        produced = PRODUCED_AHEAD.wait(self._channel, limit_s, iteration=iteration)
        data = DATA_POSITION.wait(self._channel, limit_s, iteration=iteration + 1).state
        mesh = self._config.mesh
        numbers = range(len(DISPATCHED.wait(self._channel, limit_s, iteration=iteration).groups))
        groups = [self._buffer.read_bytes(iteration, *mesh.slot_of(number)) for number in numbers]
        return AheadIteration(iteration, produced.numbers, produced.samples, data, groups)

    def _carried(self, version: int) -> AheadIteration:
        """Groups that no update before this version has trained, and no iteration that is produced by then."""
        carried = CARRIED.wait(self._channel, self._config.wait_timeout_s, version=version)
        buffer = self._buffer.written(version)
        groups = []
        for index in range(len(carried.groups)):
            groups.append(buffer.read_bytes(carried.iteration, 0, index))
            buffer.done(carried.iteration, 0, index)
        return AheadIteration(carried.iteration, {_CARRIED: asdict(carried)}, [], {}, groups)
